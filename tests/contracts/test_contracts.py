"""What every run keeps, whatever its algorithm, policy and environment: one compiled program for each such cell."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import NUM_TOKENS, Probe, bits, copy_task
from small import small_config

from grpo_jax import GRPO, PPO, Config, Hyperparams, TrainState, make_init, make_train_step, with_reference
from grpo_jax.environments.spaces import Box
from grpo_jax.groups import FRESH, forked
from grpo_jax.policies import MLP, Transformer
from grpo_jax.training import train_step as iteration


class Push(Probe):
    """A real action, paid by how near it is to the mark."""

    def step_env(self, key, state, action, params):
        observation, after, _, terminated, info = super().step_env(key, state, 0, params)
        return observation, after, 1 - jnp.square(action[0] - state.mark), terminated, info

    def action_space(self, params):
        return Box(-1.0, 1.0)


def paid_tokens():
    """The copy task, where every token is paid, since a policy that knows nothing never copies."""
    env = copy_task()

    def step(key, state, action, params):
        moved = env.step(key, state, action, params)
        return moved._replace(reward=moved.reward + jnp.float32(action) / NUM_TOKENS)

    return env._replace(step=step)


POLICIES = {
    "mlp": {"normalize_rewards": True},
    "normalised": {"normalize_observations": True, "normalize_rewards": True},
    "gru": {"network": MLP((4,), recurrent="gru", recurrent_size=3)},
    "transformer": {"network": Transformer(num_layers=1, width=8, num_heads=2), "num_steps": 4},
}
ENVIRONMENTS = {"discrete": Probe(), "continuous": Push(), "tokens": paid_tokens()}
LIGHT = {
    "grpo-mlp-discrete": (with_reference(GRPO), "mlp", "discrete"),
    "ppo-normalised-discrete": ("ppo", "normalised", "discrete"),
}
SLOW = {
    "ppo-gru-continuous": ("ppo", "gru", "continuous"),
    "grpo-transformer-tokens": (with_reference(GRPO), "transformer", "tokens"),
    "grpo-gru-continuous": (with_reference(GRPO), "gru", "continuous"),
    "ppo-transformer-tokens": (PPO._replace(start=FRESH), "transformer", "tokens"),
    "dapo-gru-discrete": ("dapo", "gru", "discrete"),
    "forked-mlp-discrete": (GRPO._replace(start=forked(2)), "mlp", "discrete"),
    "kernel_gae-mlp-continuous": ("kernel_gae", "mlp", "continuous"),
    "same_step_critic-gru-discrete": ("same_step_critic", "gru", "discrete"),
}
GROUP_SIZE = 4
ORDER = np.array([6, 4, 5, 7, 2, 1, 3, 0])  # of environments: both groups change places, and their members too


class Cell(NamedTuple):
    """Two rows before training, and the program of every test: rows play a number of iterations."""

    config: Config
    row: Callable  # (state, num_iterations, order of the environments, whether masked steps hold garbage) -> state
    play: Callable  # jitted, of rows
    init: Callable  # jitted, (keys, hyperparams) -> rows
    starts: TrainState


def make_cell(algorithm, policy, environment) -> Cell:
    fields = {"num_steps": 6} | POLICIES[policy] | {"env_params": {"max_steps_in_episode": 4, "bonus": 0.5}}
    if environment == "tokens":
        del fields["env_params"]
    if algorithm != "ppo":
        fields["group_size"] = GROUP_SIZE
    config = small_config(algorithm, ENVIRONMENTS[environment], **fields)
    train_step = make_train_step(config)
    # One group's episodes end after two steps and the other's are truncated after four.
    lifetimes = None if environment == "tokens" else {"lifetime": jnp.array([2, 99]).repeat(config.num_groups // 2)}

    def row(state, num_iterations, order, garbage):
        with changed_trajectories(order, garbage):
            return jax.lax.fori_loop(0, num_iterations, lambda _, state: train_step(state)[0], state)

    def init(key, hyperparams):
        return make_init(config)(key, hyperparams, lifetimes)

    init, play = jax.jit(jax.vmap(init)), jax.jit(jax.vmap(row, in_axes=(0, None, None, None)))
    return Cell(config, row, play, init, init(KEYS, HYPERPARAMS))


@contextlib.contextmanager
def changed_trajectories(order, garbage):
    """Train steps see their environments in this order, and possibly garbage where a step is masked."""

    def collect(*arguments):
        rollout, trajectory = original(*arguments)

        def spoilt(leaf):
            mask = trajectory.valid.reshape(trajectory.valid.shape + (1,) * (leaf.ndim - 2)) | ~garbage
            other = 3.7 * leaf + 41.0 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf // 2
            return jnp.where(mask, leaf, other.astype(leaf.dtype))

        def permuted(leaf):
            of_groups = order.reshape(-1, GROUP_SIZE)[:, 0] // GROUP_SIZE
            return leaf[:, order if leaf.shape[1] == order.size else of_groups]

        names = "observation", "action", "reward", "log_prob", "distribution", "value", "next_value"
        fields = {name: jax.tree.map(spoilt, getattr(trajectory, name)) for name in names}
        return rollout, jax.tree.map(permuted, trajectory._replace(**fields))

    original = iteration.collect
    with mock.patch.object(iteration, "collect", collect):
        yield


KEYS = jax.random.split(jax.random.key(0), 2)
# Adam moves a parameter by the sign of a gradient that is smaller than this, so that rounding would be seen.
HYPERPARAMS = Hyperparams(learning_rate=jnp.array([1e-2, 1e-3]), adam_eps=0.1, total_steps=1e6).broadcast(2)
UNCHANGED = (np.arange(8), False)


def matrix(light, slow):
    marked = [pytest.param(each, marks=pytest.mark.slow, id=name) for name, each in slow.items()]
    return [pytest.param(each, id=name) for name, each in light.items()] + marked


@pytest.fixture(scope="module", params=matrix(LIGHT, SLOW))
def cell(request):
    return make_cell(*request.param)


@pytest.fixture(scope="module")
def end(cell):
    """After three iterations."""
    return cell.play(cell.starts, 3, *UNCHANGED)


def row_of(states, row):
    return jax.tree.map(lambda leaf: leaf[row], states)


def close(actual, expected):
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6), actual, expected)


def test_a_run_is_bitwise_a_function_of_its_state(cell, end):
    assert bits(cell.play(cell.starts, 3, *UNCHANGED)) == bits(end)
    assert bits(row_of(end, 0).params) != bits(row_of(end, 1).params) != bits(row_of(cell.starts, 1).params)


def test_a_row_does_not_depend_on_its_neighbour(cell, end):
    other = cell.init(KEYS[jnp.array([0, 0])], HYPERPARAMS.replace(learning_rate=jnp.array([1e-2, 1e38])))
    assert bits(row_of(cell.play(other, 3, *UNCHANGED), 0)) == bits(row_of(end, 0))


@pytest.mark.slow
def test_a_row_is_the_single_run(cell, end):
    alone = jax.jit(cell.row)(row_of(cell.starts, 1), 3, *UNCHANGED)
    close(alone.params, row_of(end, 1).params)
    assert bits(alone.steps) == bits(row_of(end, 1).steps)


def test_masked_steps_change_nothing(cell, end):
    if cell.config.algorithm.start.auto_reset:
        pytest.skip("every step is valid")
    assert bits(cell.play(cell.starts, 3, UNCHANGED[0], True)) == bits(end)


def test_the_order_of_environments_changes_nothing(cell):
    one, other = (cell.play(cell.starts, 1, order, False) for order in (UNCHANGED[0], ORDER))
    close((one.params, one.opt_state), (other.params, other.opt_state))
    assert bits(one.rollout) == bits(other.rollout)


def test_a_resumed_run_is_the_uninterrupted_one(cell, end):
    middle = cell.play(cell.starts, 1, *UNCHANGED)
    saved = middle.replace(key=jax.random.key_data(middle.key))
    saved = jax.tree.map(lambda leaf: jnp.array(np.asarray(leaf)), saved)
    resumed = saved.replace(key=jax.random.wrap_key_data(saved.key))
    assert bits(cell.play(resumed, 2, *UNCHANGED)) == bits(end)


def test_one_trace_serves_all_hyperparameters(cell, end):
    changed = jax.tree.map(lambda leaf: 0.9 * leaf, HYPERPARAMS)
    other = cell.play(cell.init(KEYS, changed), 3, *UNCHANGED)
    assert bits(other.params) != bits(end.params)
    assert cell.play._cache_size() == cell.init._cache_size() == 1

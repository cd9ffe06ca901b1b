"""Least-squares values against float64 loops, on a chain whose values are known, and what they leave out."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import NUM_TOKENS, Recall, check, copy_task, random_window

from grpo_jax import Config, Hyperparams, make_init, make_train_step
from grpo_jax.algorithms import LSTD_GAE
from grpo_jax.baselines import Window, lstd_values, policy_features
from grpo_jax.environments import group_parameters
from grpo_jax.errors import ConfigError
from grpo_jax.groups import one_carry_per_group
from grpo_jax.policies import MLP, Transformer, make_token_policy
from grpo_jax.policies.distributions import categorical
from grpo_jax.rollouts.rollout import Simulator

T, N, F, E = 9, 6, 3, 4
DISCOUNT, TRACE, RIDGE = 0.9, 0.7, 1e-2


@functools.partial(jax.jit, static_argnames=("num_folds", "group_size"))
def solve(ridge, num_folds=4, group_size=1, **data):
    options = {"ridge": ridge, "num_folds": num_folds, "group_size": group_size}
    return lstd_values(Window(**data), discount=DISCOUNT, trace=TRACE, **options)


def window(seed=0):
    """A random window, and the first steps of its episodes; about half of the rollouts begin with one."""
    data = random_window(T, N, F, E, seed)
    ended = data["terminated"] | data["truncated"]
    begins = np.random.default_rng(seed).random((1, N)) < 0.5
    return data | {"is_first": np.concatenate([begins, ended[:-1] & data["mask"][1:]])}


def oracle(data, num_folds, ridge=RIDGE, group_size=1):
    """In loops over steps, in float64."""
    features, finals = (np.asarray(data[name], np.float64) for name in ("features", "final_features"))
    (T, N, E), F = features.shape, len(finals)
    scale = np.sqrt(np.mean(features[data["mask"]] ** 2, axis=0))
    x, final_x = (np.concatenate([y / scale, np.ones((*y.shape[:2], 1))], axis=-1) for y in (features, finals))
    matrices, vectors, numbers = np.zeros((N, E + 1, E + 1)), np.zeros((N, E + 1)), np.zeros(N)
    for n in range(N):
        z = np.zeros(E + 1)
        for t in np.flatnonzero(data["mask"][:, n]):
            z = x[t, n] + DISCOUNT * TRACE * z * (not data["is_first"][t, n])
            if data["truncated"][t, n] and F > 1:
                after = final_x[data["truncated"][:t, n].sum(), n]
            else:
                after = x[t + 1, n] if t + 1 < T else final_x[-1, n]
            after = after * (not data["terminated"][t, n])
            matrices[n] += np.outer(z, x[t, n] - DISCOUNT * after)
            vectors[n] += z * data["rewards"][t, n]
            numbers[n] += 1
    penalty = np.diag([ridge] * E + [ridge * 1e-6])
    size = -(-N // group_size // num_folds) * group_size
    values, final_values = np.zeros((T, N)), np.zeros((F, N))
    for n in range(N):
        others = np.arange(N) // size != n // size
        weights = np.linalg.solve(
            matrices[others].sum(0) / numbers[others].sum() + penalty, vectors[others].sum(0) / numbers[others].sum()
        )
        values[:, n], final_values[:, n] = x[:, n] @ weights, final_x[:, n] @ weights
    return values, final_values


@pytest.mark.parametrize("num_folds", [2, 3, 4, N], ids=["2", "3", "4, uneven", "one environment each"])
def test_values_are_those_of_a_loop(num_folds):
    data = window()
    for actual, expected in zip(solve(**data, ridge=RIDGE, num_folds=num_folds), oracle(data, num_folds), strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-5)


@pytest.mark.parametrize("group_size, num_folds", [(2, 2), (2, 4), (3, 4)])
def test_folds_are_whole_groups(group_size, num_folds):
    data, folds = window(), {"num_folds": num_folds, "group_size": group_size}
    for actual, expected in zip(solve(**data, ridge=RIDGE, **folds), oracle(data, **folds), strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_values_of_a_chain_are_exact():
    """Five states in a row, each with a reward; a third of the environments is truncated in state 3."""
    rewards = np.array([1.0, 0.0, 2.0, -1.0, 3.0])
    known = np.zeros(5)
    for s in reversed(range(5)):
        known[s] = rewards[s] + DISCOUNT * (known[s + 1] if s < 4 else 0)
    state, first, last, cut = (np.zeros((14, N), int) for _ in range(4))
    final = np.zeros((4, N), int)
    here = np.arange(N) % 5
    for t in range(14):
        state[t], first[t] = here, here == 0
        last[t], cut[t] = here == 4, (here == 2) & (np.arange(N) % 3 == 0)
        for n in np.flatnonzero(cut[t]):
            final[cut[:t, n].sum(), n] = 3
        here = np.where(last[t] | cut[t], 0, here + 1)
    final[-1] = here
    one_hot = np.eye(5, dtype=np.float32)
    data = dict(rewards=rewards[state], terminated=last == 1, truncated=cut == 1, is_first=first == 1)
    mask = np.ones_like(data["truncated"])
    value, final_value = solve(features=one_hot[state], final_features=one_hot[final], **data, mask=mask, ridge=1e-6)
    np.testing.assert_allclose(value, known[state], atol=1e-5)
    used = np.arange(4)[:, None] < cut.sum(0)
    used[-1] = True
    np.testing.assert_allclose(final_value[used], known[final][used], atol=1e-5)


def test_no_call_of_lapack_is_batched():
    program = str(jax.make_jaxpr(solve)(**window(), ridge=RIDGE))
    assert re.findall(r"f32(\S+) \S+ \S+ = lu", program) == [f"[{E + 1},{E + 1}]"]


@pytest.mark.slow
def test_undiscounted_values_without_an_end_differ_as_rewards_do():
    """State 0 pays 1 and state 1 pays 0, in turn, forever: V(0) - V(1) is 1/2 more than in the mean."""
    state = (np.arange(20)[:, None] + np.arange(N)) % 2
    never, features = np.zeros((20, N), bool), np.eye(2, dtype=np.float32)
    values, _ = lstd_values(
        Window(features[state], features[1 - state[-1:]], 1 - state, never, never, ~never, never),
        **{"discount": 1.0, "trace": 0.95, "ridge": 1e-6},
    )
    np.testing.assert_allclose(values[state == 0][0] - values[state == 1][0], 0.5, atol=0.05)


def test_no_reward_has_a_part_in_the_values_of_its_own_rollout():
    data = window()
    before = solve(**data, ridge=RIDGE)
    changed = data["rewards"].copy()
    changed[:, 2] += 100
    after = solve(**data | {"rewards": changed}, ridge=RIDGE)
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old[:, 2:4], new[:, 2:4]), "a fold is two environments"
        assert (np.abs(new - old)[:, [0, 1, 4, 5]].max(axis=0) > 0.1).all()


def test_features_that_repeat_or_vanish_change_nothing():
    data = window()
    padded = {
        name: np.concatenate([data[name], data[name][..., :1], np.zeros_like(data[name][..., :2])], axis=-1)
        for name in ("features", "final_features")
    }
    plain, wide = solve(**data, ridge=1e-5)[0], solve(**data | padded, ridge=1e-5)[0]
    np.testing.assert_allclose(wide, plain, atol=2e-3)
    constant = {name: np.zeros_like(data[name]) for name in ("features", "final_features")}
    assert np.ptp(solve(**data | constant, ridge=RIDGE)[0][:, :2]) < 1e-6, "one number for each fold"


def test_values_have_the_units_of_rewards_alone():
    data = window()
    plain = solve(**data, ridge=RIDGE)[0]
    np.testing.assert_allclose(
        solve(**data | {"rewards": 1e6 * data["rewards"]}, ridge=RIDGE)[0], 1e6 * plain, rtol=1e-4, atol=10
    )
    factor = np.array([1e-6, 1.0, 1e3, 1e6], np.float32)
    scaled = {name: data[name] * factor for name in ("features", "final_features")}
    np.testing.assert_allclose(solve(**data | scaled, ridge=RIDGE)[0], plain, atol=1e-4)


def test_numbers_that_are_not_finite_are_left_out():
    data = window()
    data["features"][3, 5, 1], data["rewards"][6, 3] = np.nan, np.inf
    values, final_values = solve(**data, ridge=RIDGE)
    assert np.isfinite(values).all() and np.isfinite(final_values).all() and values[3, 5] == 0
    nothing = solve(**data | {"mask": np.zeros((T, N), bool)}, ridge=RIDGE)
    assert (nothing[0] == 0).all() and (nothing[1] == 0).all()


def test_values_of_tokens_are_linear_in_the_last_hidden_states():
    """Completions that end, or are cut after 4 tokens, in 6 steps; features by steps of the policy, one by one.

    The logits of a step are its features times the embeddings, of which there are more than features.
    """
    env, architecture = copy_task(), Transformer(num_layers=2, width=4, num_heads=1, tie_embeddings=True)
    policy = make_token_policy(architecture, categorical(NUM_TOKENS), max_steps=7)
    params = jax.jit(policy.init)(jax.random.key(0))
    hyperparams = Hyperparams(discount=DISCOUNT, gae_lambda=TRACE, value_ridge=RIDGE)

    @jax.jit
    def play(params):
        simulator = Simulator(env, policy, params, plan="cpu", keep_final=True)
        start = simulator.reset(group_parameters(env, None, N, 2), jax.random.key(1), N, group_size=2)
        _, trajectory = simulator.unroll(start, jax.random.key(4), num_steps=6, auto_reset=False)
        tokens = jnp.concatenate([trajectory.observation, trajectory.final_observation])

        def read(carry, token):
            logits, _, carry = policy.step(params, token, carry)
            return carry, logits

        logits = jax.lax.scan(read, start.policy_carry, tokens)[1]
        rewards = trajectory.valid * jax.random.normal(jax.random.key(3), trajectory.reward.shape)
        trajectory = one_carry_per_group(trajectory._replace(reward=rewards), 2)
        return trajectory, logits, LSTD_GAE.baseline.apply(trajectory, (), policy, params, hyperparams, 2)[:2]

    trajectory, logits, values = jax.tree.map(np.asarray, play(params))
    assert trajectory.truncated[3].any() and trajectory.terminated.any() and not trajectory.valid[4:].any()
    embedding = np.asarray(params["actor"]["embedding"], np.float64)
    features = np.linalg.lstsq(embedding, logits.astype(np.float64).reshape(-1, NUM_TOKENS).T)[0].T.reshape(7, N, -1)
    data = {"features": features[:-1], "final_features": features[-1:], "rewards": trajectory.reward}
    flags = {name: getattr(trajectory, name) for name in ("terminated", "truncated", "is_first")}
    for actual, expected in zip(values, oracle(data | flags | {"mask": trajectory.valid}, 4), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-4)


@pytest.mark.parametrize("recurrent", ["none", pytest.param("gru", marks=pytest.mark.slow)])
def test_a_train_step(recurrent):
    network = MLP((4,), recurrent=recurrent, recurrent_size=3)
    sizes = dict(num_envs=6, num_steps=6, num_epochs=1, num_minibatches=1, network=network)
    config = Config(environment=Recall(), algorithm="lstd_gae", **sizes)
    state = jax.jit(make_init(config))(jax.random.key(0), Hyperparams())
    after, metrics = jax.jit(make_train_step(config))(state)
    assert metrics["optim/skipped_updates"] == 0 and np.isfinite(metrics["value/explained_variance"])
    assert any(
        jnp.any(new != old) for new, old in zip(*map(jax.tree.leaves, (after.params, state.params)), strict=True)
    )


def test_a_transformer_that_reads_several_episodes_is_refused():
    policy = make_token_policy(Transformer(num_layers=1, width=4, num_heads=1), categorical(NUM_TOKENS), max_steps=7)
    several = SimpleNamespace(final_observation=jnp.zeros((2, N), jnp.int32), carry=(), valid=jnp.ones((6, N), bool))
    with pytest.raises(ValueError, match="rollouts of one episode.*start=FRESH"):
        policy_features(several, policy, None)


def test_a_single_environment_or_fold_is_refused():
    with pytest.raises(ValueError, match="num_folds=1 leaves no other environments"):
        lstd_values(Window(**window()), discount=DISCOUNT, trace=TRACE, ridge=RIDGE, num_folds=1)
    with pytest.raises(ConfigError, match="lstd_values values an environment by.*num_envs=2"):
        check(Config(environment=Recall(), algorithm=LSTD_GAE, num_envs=1, num_steps=4, num_minibatches=1))
    with pytest.raises(
        ValueError, match="num_envs=6 and group_size=6 make one group; use num_envs=12 or more, or smal"
    ):
        lstd_values(Window(**window()), discount=DISCOUNT, trace=TRACE, ridge=RIDGE, group_size=6)

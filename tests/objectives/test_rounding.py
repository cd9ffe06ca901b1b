"""What differs by rounding alone is equal: log-ratios, returns of paths, whole updates. More counts in full."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from probes import Probe

from grpo_jax import GRPO, Config, Hyperparams, make_init, make_train_step, objectives, with_reference
from grpo_jax.algorithms import by_name
from grpo_jax.environments.tokens import Reward, make_task
from grpo_jax.policies import MLP, Transformer, categorical, diagonal_gaussian
from grpo_jax.types import RewardParts, Trajectory

EPS = np.finfo(np.float32).eps
NOISE, REAL = 4 * EPS, 100 * EPS


def beside(x, change):
    """Numbers that differ from these by a fraction of their size."""
    return np.float32(x) + np.float32(change) * np.maximum(1.0, np.abs(np.float32(x))) * np.float32([1, -1] * 3)


LOG_PROB = np.float32([-0.5, -1.0, -2.0, -0.5, -1.0, -30.0])
PENALTIES = {
    "k1": objectives.k1,
    "k2": objectives.k2,
    "k3": objectives.k3,
    "k2_straight_through": objectives.k2_straight_through,
    "k3_from_behaviour": lambda p, q: objectives.k3_from_behaviour(q, p),
    "exact": lambda p, q: objectives.exact(jax.nn.log_softmax(p), jax.nn.log_softmax(q)),
    "categorical": lambda p, q: categorical(6).kl(q, p),
    "gaussian": lambda p, q: diagonal_gaussian((-1.0,) * 3, (1.0,) * 3).kl(q / 10, p / 10),
}
KEPT = {  # at a limit of 0, all that has not moved is kept
    "near_behaviour": lambda p, q: objectives.near_behaviour(p, q, limit=0.0),
    "on_policy_sequences": lambda p, q: objectives.on_policy_sequences(
        p[:, None], q[:, None], -jnp.ones((6, 1)), jnp.ones((6, 1)), limit=0.0
    ),
}


def test_penalties_and_masks_start_beyond_rounding():
    @jax.jit
    def all_of(p, q):
        def total(p, penalty):
            return jnp.sum(jnp.asarray(penalty(p, q)))

        return {name: jax.value_and_grad(total)(p, penalty) for name, penalty in PENALTIES.items()}

    moved = beside(LOG_PROB, 10 * REAL)
    with jax.enable_x64(True):
        exact = all_of(np.float64(moved), np.float64(LOG_PROB))
    within, beyond = all_of(beside(LOG_PROB, NOISE), LOG_PROB), all_of(moved, LOG_PROB)
    for name, (value, slope) in beyond.items():
        assert within[name][0] == 0 and not within[name][1].any(), name
        np.testing.assert_allclose(value, exact[name][0], rtol=2e-2, atol=2e-7, err_msg=name)
        np.testing.assert_allclose(slope, exact[name][1], rtol=2e-2, atol=2e-6, err_msg=name)
        assert slope.any() or name == "k1"
    for name, keep in KEPT.items():
        keep = jax.jit(keep)
        assert keep(beside(LOG_PROB, NOISE), LOG_PROB).all(), name
        assert not all(keep(beside(LOG_PROB, sign * REAL), LOG_PROB).all() for sign in (-1, 1)), name


NOTHING = Trajectory(**dict.fromkeys(Trajectory._fields))
PATHS = np.random.default_rng(0).normal(300, 200, (10, 16)).astype(np.float32)


def of_paths(names, change):
    """The advantages of algorithms on rewards that add up to 1,000 on every path, but for a change to one."""
    steps = np.diff(PATHS[:9], axis=0, prepend=np.float32(0))  # differences of a potential
    steps = np.concatenate([steps, np.float32(1000) - PATHS[8:9]])
    steps[9, 3] += np.float32(change)
    valid = np.ones(steps.shape, bool)
    terminated = valid & (np.arange(10) == 9)[:, None]
    trajectory = NOTHING._replace(
        **{"reward": steps, "valid": valid, "terminated": terminated, "truncated": ~valid, "observation": terminated},
        reward_parts=RewardParts(steps[..., None], np.ones((10, 16, 1), np.float32)),
    )
    hyperparams = Hyperparams(discount=1.0)
    advantages = jax.jit(lambda t: {name: by_name(name).advantage(t, hyperparams, 8) for name in names})
    return jax.device_get(advantages(jax.tree.map(jnp.asarray, trajectory)))


OF_SCORES = "grpo dr_grpo rloo pass_at_k lite_ppo max_rl gdpo reinforce_plus_plus_baseline".split()


def test_rewards_with_the_same_sum_on_every_path_teach_nothing():
    assert len({*np.sum(PATHS, 0)}) > 1
    equal, changed = of_paths(OF_SCORES, 0.0), of_paths(OF_SCORES, 0.05)  # one in 20,000
    for name in OF_SCORES:
        assert not equal[name].any() and changed[name][0, 3] > 0 and changed[name][0, 3] == changed[name].max(), name
    expected = (8 * (np.arange(8) == 3) - 1) / np.sqrt(7)
    np.testing.assert_allclose(changed["grpo"][0, :8], expected, rtol=5e-2, atol=2e-2)


# --- whole updates ----------------------------------------------------------------------------------------------------

ZERO = (Reward("zero", lambda task, problem, completion: jnp.float32(0.0)),)
SMALL = {"num_envs": 16, "group_size": 4, "num_minibatches": 2, "num_epochs": 2}


def rmsprop(hyperparams, learning_rate):
    return optax.rmsprop(learning_rate, eps=hyperparams.adam_eps, eps_in_sqrt=False)


def half(num_layers):
    network = Transformer(num_layers=num_layers, width=32, num_heads=2, compute_dtype="bfloat16")
    return {"num_envs": 64, "network": network}


MOVES = {
    "reference": ({"algorithm": with_reference(GRPO), "optimizer": "muon"}, {}),
    "off_policy_mask": (
        {"algorithm": "off_policy_mask", "num_microbatches": 2, "optimizer": rmsprop},
        {"kl_target": 1e-6, "adam_eps": 1e-12},
    ),
    "bfloat16": ({"algorithm": "grpo", **half(2)}, {}),
    "dense": ({"environment": Probe(), "algorithm": with_reference(GRPO), "network": MLP((8,))}, {"adam_eps": 1e-12}),
    "reference, bfloat16": ({"algorithm": with_reference(GRPO), "optimizer": rmsprop, **half(1)}, {"adam_eps": 1e-12}),
}
SLOW = {name: [pytest.mark.slow] * (name != "dense") for name in MOVES}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW[name]) for name in MOVES])
def test_an_update_without_signal_changes_nothing(name):
    """Rounding of each penalty and mask alone is in `test_penalties_and_masks_start_beyond_rounding`."""
    fields, numbers = MOVES[name]
    task = make_task("sort-3")._replace(rewards=ZERO)
    common = {"environment": task, "network": Transformer(width=16, num_layers=1, num_heads=2)}
    config = Config(**SMALL | common | fields)
    hyperparams = Hyperparams(num_iterations=20, kl_coef=0.1, learning_rate=0.01, **numbers)
    state = first = jax.jit(make_init(config))(jax.random.key(0), hyperparams)
    step = jax.jit(make_train_step(config))
    for _ in range(5):
        state, metrics = step(state)
    assert metrics["optim/grad_norm"] == 0 and metrics["policy/kl_behaviour"] == 0
    for before, after in zip(*map(jax.tree.leaves, (first.params, state.params)), strict=True):
        np.testing.assert_array_equal(before, after)

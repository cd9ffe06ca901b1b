"""What differs by rounding alone is equal: log-ratios in penalties, scores of a group. More counts in full."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import GRPO, Config, Hyperparams, make_init, make_train_step, objectives, with_reference
from grpo_jax.algorithms import by_name
from grpo_jax.baselines import same_state_advantage
from grpo_jax.environments.tokens import Reward, make_task
from grpo_jax.policies import Transformer, categorical, diagonal_gaussian
from grpo_jax.precision import ROUNDING, above_rounding
from grpo_jax.types import RewardParts, Trajectory

EPS = np.finfo(np.float32).eps
NOISE, REAL = 4 * EPS, 100 * EPS


def beside(x, change):
    """Numbers that differ from these by a fraction of their size."""
    return np.float32(x) + np.float32(change) * np.maximum(1.0, np.abs(np.float32(x))) * np.float32([1, -1] * 3)


LOG_PROB = np.float32([-0.5, -1.0, -2.0, -0.5, -1.0, -30.0])
LIMIT = {"low": 0.0, "high": 0.0}
SIGNS = np.float32([1, -1, 1, -1, 1, -1])
PENALTIES = {
    "k1": objectives.k1,
    "abs_k1": objectives.abs_k1,
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
    "within_total_variation": lambda p, q: objectives.within_total_variation(p, q, SIGNS, **LIMIT),
    "within_kl": lambda p, q: objectives.within_kl(p, q, SIGNS, **LIMIT),
    "on_policy_sequences": lambda p, q: objectives.on_policy_sequences(
        p[:, None], q[:, None], -jnp.ones((6, 1)), jnp.ones((6, 1)), limit=0.0
    ),
}


@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
def test_a_policy_within_rounding_pays_nothing_and_one_beyond_all(penalty):
    @jax.jit
    def both(p, q):
        return jax.value_and_grad(lambda p: jnp.sum(jnp.asarray(penalty(p, q))))(p)

    value, slope = both(beside(LOG_PROB, NOISE), LOG_PROB)
    assert value == 0 and not slope.any()
    value, slope = both(beside(LOG_PROB, 10 * REAL), LOG_PROB)
    with jax.enable_x64(True):
        exact, exact_slope = both(np.float64(beside(LOG_PROB, 10 * REAL)), np.float64(LOG_PROB))
    np.testing.assert_allclose(value, exact, rtol=2e-2, atol=2e-7)
    np.testing.assert_allclose(slope, exact_slope, rtol=2e-2, atol=2e-6)
    assert slope.any() or penalty is objectives.k1


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_a_mask_leaves_out_what_moved_and_nothing_within_rounding(keep):
    assert keep(beside(LOG_PROB, NOISE), LOG_PROB).all()
    assert not keep(beside(LOG_PROB, -REAL), LOG_PROB).all() or not keep(beside(LOG_PROB, REAL), LOG_PROB).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
def test_the_floor_is_that_of_the_type(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        one, eps = jnp.asarray(1.0, dtype), float(jnp.finfo(dtype).eps)
        within, beyond = (eps, 4 * eps) if eps > 1e-4 else (ROUNDING / 2 * eps, 2 * ROUNDING * eps)
        assert objectives.k1(one - 1 + jnp.asarray(within, dtype), one - 1) == 0
        assert objectives.k1(one - 1 + jnp.asarray(beyond, dtype), one - 1) > 0
        assert np.isnan(above_rounding(jnp.nan, one)) and np.isinf(above_rounding(jnp.inf, one * jnp.inf))


def test_no_step_is_picked_where_no_covariance_is():
    x, mask = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32), jnp.ones((4, 8), bool)
    for advantages in (0 * x, 0 * x + 0.3):
        assert not objectives.most_covariant_steps(x, advantages, mask).any()
    assert objectives.most_covariant_steps(x, x, mask).sum() == 1


IN_GROUPS = {
    "group_normalized": objectives.group_normalized,
    "group_centered": objectives.group_centered,
    "leave_one_out": objectives.leave_one_out,
    "batch_normalized": objectives.batch_normalized,
    "pass_at_k": objectives.pass_at_k,
    "max_rl": objectives.max_rl,
    "length_weighted": lambda scores: objectives.length_weighted(scores, jnp.ones(scores.shape)),
    "decoupled_normalized": lambda scores: objectives.decoupled_normalized(scores[None], jnp.ones(1)),
    "whiten": objectives.whiten,
    "process_supervised": lambda scores: objectives.process_supervised(scores, jnp.ones(scores.shape), 6),
    "same_state_advantage": lambda scores: same_state_advantage(
        scores, jnp.zeros(scores.shape), jnp.ones(scores.shape), 6
    ),
}


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e3, 1e15])
@pytest.mark.parametrize("name", IN_GROUPS)
def test_scores_that_differ_by_rounding_are_equal_and_by_one_in_100_000_are_not(name, magnitude):
    estimate = jax.jit(IN_GROUPS[name])
    scores = np.full((1, 6), magnitude, np.float32)
    noisy, real = scores.copy(), scores.copy()
    noisy[0, ::2] *= 1 + NOISE
    real[0, ::2] *= 1 + np.float32(1e-5)
    assert not estimate(noisy).any()
    by_hand = {
        "group_normalized": [1, -1],
        "batch_normalized": [1, -1],
        "decoupled_normalized": [1, -1],
        "whiten": [1, -1],
        "same_state_advantage": [1, -1],
        "process_supervised": [1, -1],
    }
    if magnitude == 1e3 and name in by_hand:
        np.testing.assert_allclose(np.asarray(estimate(real))[0, :2], by_hand[name], rtol=1e-2)
    elif name != "pass_at_k":  # two reach the best score
        assert estimate(real).any()


NOTHING = Trajectory(**dict.fromkeys(Trajectory._fields))
PATHS = np.random.default_rng(0).normal(300, 200, (10, 16)).astype(np.float32)


def of_paths(name, change):
    """The advantages of an algorithm on rewards that add up to 1,000 on every path, but for a change to one."""
    steps, before = PATHS.copy(), np.zeros(16, np.float32)
    for t in range(9):  # differences of a potential
        before, steps[t] = PATHS[t], PATHS[t] - before
    steps[9] = np.float32(1000) - before
    steps[9, 3] += np.float32(change)
    valid = np.ones(steps.shape, bool)
    terminated = valid & (np.arange(10) == 9)[:, None]
    trajectory = NOTHING._replace(
        **{"reward": steps, "valid": valid, "terminated": terminated, "truncated": ~valid, "observation": terminated},
        reward_parts=RewardParts(steps[..., None], np.ones((10, 16, 1), np.float32)),
    )
    advantage = jax.jit(lambda t: by_name(name).advantage(t, Hyperparams(discount=1.0, step_advantage_coef=0.0), 8))
    return np.asarray(advantage(jax.tree.map(jnp.asarray, trajectory)))


@pytest.mark.parametrize("scores", [[0.0] * 4, [1e8, 1e8 + 8, 1e8, 1e8], [-0.1] * 4])
@pytest.mark.parametrize("formula", [objectives.whiten, objectives.group_normalized])
def test_equal_scores_have_no_slope(formula, scores):
    with jax.debug_nans(True):
        assert not jnp.any(jax.grad(lambda x: formula(x)[0, 1])(jnp.array([scores])))


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "opo", "pass_at_k", "lite_ppo", "max_rl", "gdpo", "gigpo"]
    + ["reinforce_plus_plus_baseline"],
)  # fmt: skip
def test_rewards_that_add_up_to_the_same_on_every_path_teach_nothing(name):
    assert len({*np.sum(PATHS, 0)}) > 1 and not of_paths(name, 0.0).any()
    changed = of_paths(name, 0.05)  # one in 20,000
    assert changed[0, 3] > 0 and changed[0, 3] == changed.max()
    if name == "grpo":
        np.testing.assert_allclose(changed[0, :8], (8 * (np.arange(8) == 3) - 1) / np.sqrt(7), rtol=5e-2, atol=2e-2)


# --- whole updates ----------------------------------------------------------------------------------------------------

ZERO = (Reward("zero", lambda task, problem, completion: jnp.float32(0.0)),)
SMALL = {"num_envs": 16, "group_size": 4, "num_minibatches": 2, "num_epochs": 2}
MOVES = {
    "behaviour": ({"algorithm": "grpo"}, {"adam_eps": 1e-12}),
    "reference": ({"algorithm": with_reference(GRPO), "optimizer": "muon"}, {}),
    "off_policy_mask": ({"algorithm": "off_policy_mask", "num_microbatches": 2}, {"kl_target": 1e-6}),
    "kl_cov": ({"algorithm": "kl_cov"}, {}),
    "dro": ({"algorithm": "dro", "optimizer": "rmsprop"}, {}),
    "exact, moving": (
        {"algorithm": with_reference(GRPO, objectives.refreshed_reference, objectives.exact_kl_to_reference)},
        {"reference_interval": 2},
    ),
    "in the reward": (
        {"algorithm": with_reference(GRPO)._replace(reward=objectives.kl_penalized_reward, penalties=())},
        {},
    ),
    "adaptive": ({"algorithm": "grpo", "schedule": "adaptive_kl"}, {}),
}


@pytest.mark.parametrize("fields, numbers", MOVES.values(), ids=MOVES)
def test_an_update_without_signal_changes_nothing(fields, numbers):
    task = make_task("sort-3")._replace(rewards=ZERO)
    config = Config(environment=task, network=Transformer(width=16, num_layers=1, num_heads=2), **SMALL | fields)
    hyperparams = Hyperparams(num_iterations=20, kl_coef=0.1, learning_rate=0.01, **numbers)
    state = first = jax.jit(make_init(config))(jax.random.key(0), hyperparams)
    step = jax.jit(make_train_step(config))
    for _ in range(3):
        state, metrics = step(state)
    assert metrics["optim/grad_norm"] == 0 and metrics["policy/kl_behaviour"] == 0
    for before, after in zip(*map(jax.tree.leaves, (first.params, state.params)), strict=True):
        np.testing.assert_array_equal(before, after)

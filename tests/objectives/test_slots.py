"""What fills the slots: every algorithm's update, and the options that the layer-1 functions do not have."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from probes import check

from grpo_jax import GRPO, Config, Hyperparams, make_init, make_train_step, objectives
from grpo_jax.algorithms import ALGORITHMS, with_reference
from grpo_jax.environments.tokens.rewards import overlong_punishment
from grpo_jax.errors import ConfigError
from grpo_jax.groups import forked
from grpo_jax.objectives import mean_of_sequence_sums
from grpo_jax.policies import MLP
from grpo_jax.rollouts.collect import collect
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.types import Batch
from grpo_jax.updates.batch import make_batch
from grpo_jax.updates.loss import predict
from grpo_jax.updates.minibatches import minibatch_gradient
from grpo_jax.updates.shuffle import shuffled_order

SMALL = {"num_envs": 8, "group_size": 4, "env_params": {"max_steps_in_episode": 16}, "network": MLP((8,))}


def rolled_out(algorithm, **fields):
    """A config, its state at the start, and one rollout's trajectory and batch."""
    config = Config(algorithm=algorithm, num_minibatches=1, num_steps=16, **SMALL, **fields)

    @jax.jit
    def play(key, *keys):
        state = make_init(config)(key, Hyperparams())
        simulator = Simulator(config.env, config.policy, state.params, state.hyperparams.discount)
        _, trajectory = collect(config, simulator, state.rollout, *keys)
        batch, _ = make_batch(config, config.policy, state, trajectory, state.hyperparams)
        return state, trajectory, batch

    return config, *play(jax.random.key(0), *jax.random.split(jax.random.key(1)))


def in_parts(config, number):
    """The config whose gradients are accumulated over so many parts."""
    return dataclasses.replace(config, num_microbatches=number)


REDUCTIONS = {
    "mean_over_steps": ALGORITHMS["grpo"],
    "mean_over_steps, PPO": ALGORITHMS["ppo"],
    "sum_over_horizon": ALGORITHMS["dr_grpo"],
    "mean_of_sequence_means": ALGORITHMS["gspo"],
    "mean_of_sequence_sums": GRPO._replace(reduce=mean_of_sequence_sums),
    "masked members": ALGORITHMS["remax"],
}


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(REDUCTIONS[name], id=name, marks=[pytest.mark.slow] * name.startswith(("mean_over", "sum_over")))
        for name in REDUCTIONS
    ],
)
def test_microbatches_leave_the_gradient_unchanged(algorithm):
    config, state, _, batch = rolled_out(algorithm)
    moved = jax.tree.map(lambda leaf: leaf + 0.05, state.params)  # off the behaviour policy, so that clips matter

    @jax.jit
    def gradients(params):
        indices = shuffled_order(jax.random.key(3), jnp.any(batch.mask, axis=0))
        return [
            minibatch_gradient(in_parts(config, n), config.policy, params, batch, indices, state.hyperparams)
            for n in (1, 4)
        ]

    (whole_loss, whole_metrics, whole), (loss, metrics, accumulated) = gradients(moved)
    np.testing.assert_allclose(loss, whole_loss, rtol=1e-5, atol=1e-6)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(accumulated), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * max(1.0, float(jnp.max(jnp.abs(a)))))
    for metric in whole_metrics:
        np.testing.assert_allclose(metrics[metric], whole_metrics[metric], rtol=1e-4, atol=1e-6, err_msg=metric)
    assert max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(whole)) > 1e-4


def test_microbatches_lower_the_peak_memory():
    config = Config(num_envs=64, num_minibatches=1, network=MLP((64, 64)), num_steps=500)

    def temporary_bytes(parts):
        def gradient(key):
            state = make_init(config)(key, Hyperparams())
            rows = jnp.zeros((1, 32_000))
            batch = Batch(
                observation=jnp.zeros((1, 32_000, 4)),
                action=rows.astype(int),
                log_prob=rows,
                distribution=jnp.zeros((1, 32_000, 2)),
                reference_distribution=None,
                advantage=rows,
                mask=rows == 0,
                weight=rows,
                value=None,
                target=None,
                is_first=rows == 0,
                carry=config.policy.initial_carry(None, 1),
            )
            order = jax.random.permutation(key, 32_000)
            one = in_parts(config, parts)
            return minibatch_gradient(one, config.policy, state.params, batch, order, state.hyperparams)

        return jax.jit(gradient).lower(jax.random.key(0)).compile().memory_analysis().temp_size_in_bytes

    whole, split = temporary_bytes(1), temporary_bytes(64)
    assert split < whole / 4, (split, whole)  # 2.5 MB in place of 30 MB on a CPU


def test_parts_without_valid_samples_are_skipped():
    # Samples that are not valid stand last; were their part computed, its NaN observations would spoil the sum.
    config, state, _, batch = rolled_out("grpo")
    num_valid = int(batch.mask.sum())
    order = jnp.argsort(~batch.mask[0], stable=True)
    poisoned = batch._replace(observation=jnp.where(batch.mask[..., None], batch.observation, jnp.nan))
    parts = batch.mask.size
    assert num_valid < parts
    loss, _, gradient = minibatch_gradient(
        in_parts(config, parts), config.policy, state.params, poisoned, order, state.hyperparams
    )
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves((loss, gradient)))


def trained(algorithm, hyperparams, num_iterations=1, **fields):
    config = Config(algorithm=algorithm, num_minibatches=4, **SMALL, **fields)
    step = jax.jit(make_train_step(config))
    states, metrics = [jax.jit(make_init(config))(jax.random.key(0), hyperparams)], []
    for _ in range(num_iterations):
        state, measured = step(states[-1])
        states.append(state)
        metrics.append(measured)
    return states, metrics


def test_the_greedy_member_acts_greedily_and_is_not_learnt_from():
    config, state, _, batch = rolled_out("remax")
    assert not batch.mask.reshape(16, 8)[:, [0, 4]].any()
    assert batch.mask.reshape(16, 8)[0, [1, 2, 3, 5, 6, 7]].all()
    simulator = Simulator(config.env, config.policy, state.params)
    start = config.algorithm.start.begin(simulator, state.rollout, jax.random.key(1), 4)
    greedy = jnp.arange(8) % 4 == 0
    _, trajectory = simulator.unroll(start, jax.random.key(2), num_steps=16, auto_reset=False, greedy=greedy)
    most_probable = jnp.argmax(trajectory.distribution, axis=-1)
    assert jnp.all(trajectory.action[:, greedy] == most_probable[:, greedy])
    assert not jnp.all(trajectory.action[:, ~greedy] == most_probable[:, ~greedy])
    advantage = objectives.outcome(objectives.greedy_baseline, objectives.episode_scores, objectives.greedy_scores)(
        trajectory, state.hyperparams, 4
    )
    scores = np.asarray(trajectory.reward.sum(0)).reshape(2, 4)
    np.testing.assert_allclose(advantage[0].reshape(2, 4), scores - scores[:, :1])


# --- what a slot needs, it says itself -------------------------------------------------------------------------------

ALL_ACTIONS = forked(1, all_actions=True)
NEEDS = {
    "values": (
        {"advantage": objectives.gae_advantage},
        {"critic": objectives.tuned(objectives.value_loss)},
        "set critic=",
    ),
    "values of another advantage": (
        {"advantage": objectives.return_minus_value_advantage},
        {"critic": objectives.tuned(objectives.value_loss)},
        "set critic=",
    ),
    "a greedy member": (
        {
            "advantage": objectives.outcome(
                objectives.greedy_baseline, objectives.episode_scores, objectives.greedy_scores
            )
        },
        {"greedy_member": True},
        "set greedy_member=True",
    ),
    "all actions": ({"advantage": objectives.all_actions_advantage}, {"start": ALL_ACTIONS}, "all_actions=True"),
    "sequences": (
        {"ratio": objectives.sequence_ratio},
        {"whole_sequences": True},
        "sequence_ratio .*set whole_sequences=True",
    ),
    "sequences of tokens": (
        {"ratio": objectives.sequence_token_ratio},
        {"whole_sequences": True},
        "whole_sequences=True",
    ),
    "sequences for a mean": (
        {"ratio": objectives.geometric_mean_ratio},
        {"whole_sequences": True},
        "whole_sequences=True",
    ),
    "minibatches": (
        {"ratio": objectives.covariance_clipped_ratio},
        {"whole_minibatches": True},
        "set whole_minibatches=",
    ),
    "minibatches for a penalty": (
        {"penalties": (objectives.covariance_kl,)},
        {"whole_minibatches": True},
        "set whole_minibatches=True",
    ),
    "a reference": (
        {"penalties": (objectives.kl_to_reference,)},
        {"reference": objectives.frozen_reference},
        "with_reference",
    ),
    "a reference's distribution": (
        {"penalties": (objectives.exact_kl_to_reference,)},
        {"reference": objectives.frozen_reference},
        "with_reference",
    ),
    "a reference for the reward": (
        {"reward": objectives.kl_penalized_reward},
        {"reference": objectives.frozen_reference},
        "with_reference",
    ),
}


def as_it_is(function):
    return function


def wrapped(function):
    return lambda *arguments: function(*arguments)


@pytest.mark.parametrize("given", [as_it_is, wrapped])
@pytest.mark.parametrize("slot, need, message", NEEDS.values(), ids=NEEDS)
def test_what_a_slot_needs_is_told_before_training(slot, need, message, given):
    ((name, value),) = slot.items()
    value = tuple(map(given, value)) if name == "penalties" else given(value)
    algorithm = GRPO._replace(**{"penalties": (), name: value})
    size = {"num_minibatches": 1} | ({"group_size": 2} if "start" in need else {})
    with pytest.raises(ConfigError, match=message):
        check(Config(algorithm=algorithm, **SMALL | size))
    check(Config(algorithm=algorithm._replace(**need), **SMALL | size))


def test_an_error_in_a_custom_slot_is_told_before_training():
    def relative(trajectory, hyperparams, group_size):
        return trajectory.reward - trajectory.value.astype(float)

    with pytest.raises(ConfigError, match="'NoneType' object has no attribute 'astype'"):
        check(Config(algorithm=GRPO._replace(advantage=relative), **SMALL))


@pytest.mark.parametrize("parts", [None, 1, 2])
def test_what_compares_a_minibatch_is_not_given_parts_of_it(parts):
    algorithm = GRPO._replace(ratio=wrapped(objectives.covariance_clipped_ratio))
    with pytest.raises(ConfigError, match="set whole_minibatches=True"):
        check(Config(algorithm=algorithm, num_microbatches=parts, **SMALL))
    if parts == 2:
        with pytest.raises(ConfigError, match="num_microbatches=2"):
            Config(algorithm=algorithm._replace(whole_minibatches=True), num_microbatches=parts, **SMALL)


# --- what is reported of clips ---------------------------------------------------------------------------------------


def clip_fractions(algorithm, hyperparams):
    """Of a gradient off the behaviour policy, and the same from the ratios of the steps."""
    config, state, trajectory, batch = rolled_out(algorithm)
    params = jax.tree.map(lambda leaf: leaf + 0.3 * jnp.cos(jnp.arange(leaf.size).reshape(leaf.shape)), state.params)
    order = jnp.arange(batch.mask.shape[1])
    gradient = jax.jit(functools.partial(minibatch_gradient, in_parts(config, 1), config.policy))
    _, metrics, _ = gradient(params, batch, order, hyperparams)
    prediction = predict(config.policy, params, batch)
    low, high = objectives.clip_fractions(
        prediction.log_prob - batch.log_prob,
        batch.advantage,
        clip_low=hyperparams.clip_low,
        clip_high=hyperparams.clip_high,
    )
    return (metrics["policy/clip_fraction_low"], metrics["policy/clip_fraction_high"]), (
        jnp.mean(low, where=batch.mask),
        jnp.mean(high, where=batch.mask),
    )


@pytest.mark.parametrize("name", ["gpg", "sapo", "kl_cov", "cispo"])
def test_a_surrogate_that_never_clips_reports_no_clips(name):
    reported, _ = clip_fractions(ALGORITHMS[name], Hyperparams(clip_low=0.01, clip_high=0.01))
    assert reported == (0.0, 0.0)


@pytest.mark.parametrize("name", ["grpo", "gmpo"])
def test_clip_fractions_are_of_the_steps_that_were_clipped_in_whichever_slot(name):
    reported, expected = clip_fractions(ALGORITHMS[name], Hyperparams(clip_low=0.02, clip_high=0.03))
    np.testing.assert_allclose(reported, expected, rtol=1e-5)
    assert all(0.05 < share < 0.95 for share in expected)


def test_a_surrogate_of_ones_own_reports_its_own_clips():
    def one_sided(log_ratio, advantage, hyperparams):
        return jnp.minimum(jnp.exp(log_ratio), 1.0) * advantage

    (low, high), _ = clip_fractions(GRPO._replace(surrogate=one_sided), Hyperparams())
    config, _, _, batch = rolled_out(GRPO)
    assert 0 < low < jnp.mean(batch.advantage < 0, where=batch.mask) and 0 < high


# --- limits and controllers ------------------------------------------------------------------------------------------


def test_updates_stop_once_the_kl_limit_is_exceeded():
    (start, free), _ = trained("grpo", Hyperparams(learning_rate=0.05))
    (_, limited), (metrics,) = trained("grpo", Hyperparams(learning_rate=0.05, kl_limit=1e-3))
    moved = [
        float(jnp.sqrt(sum(jnp.sum((a - b) ** 2) for a, b in zip(*map(jax.tree.leaves, pair), strict=True))))
        for pair in ((free.params, start.params), (limited.params, start.params))
    ]
    assert 0 < moved[1] < 0.5 * moved[0]
    assert metrics["policy/kl_behaviour"] <= 1e-3  # of the updates that were applied
    assert metrics["optim/skipped_updates"] == 0  # leaving out is not skipping


@pytest.mark.parametrize("target, direction", [(1e-6, 1), (10.0, -1)])
def test_the_kl_coefficient_follows_the_measured_kl(target, direction):
    algorithm = GRPO._replace(kl_controller=objectives.tuned(objectives.adaptive_coefficient, target="kl_target"))
    states, metrics = trained(algorithm, Hyperparams(kl_coef=0.1, kl_target=target, learning_rate=0.01), 3)
    coefficients = [float(state.kl_coef) for state in states]
    expected = [0.1 * (1 + direction * 0.1 * 0.2) ** i for i in range(4)]  # the error is clipped at ±0.2, gain 0.1
    np.testing.assert_allclose(coefficients, expected, rtol=1e-5)
    assert float(states[-1].hyperparams.kl_coef) == pytest.approx(0.1)
    np.testing.assert_allclose([m["policy/kl_coef"] for m in metrics], coefficients[1:])


def test_the_kl_penalty_moves_into_the_reward():
    algorithm = with_reference(GRPO)._replace(reward=objectives.kl_penalized_reward, penalties=())
    config, state, trajectory, _ = rolled_out(algorithm)
    reference = jax.tree.map(lambda leaf: leaf + 0.1, state.params)
    hyperparams = state.hyperparams.replace(kl_coef=jnp.float32(50.0))
    batch = make_batch(config, config.policy, state.replace(reference_params=reference), trajectory, hyperparams)[0]
    reference_logits, _ = config.policy.sequence(
        reference, trajectory.observation, config.policy.initial_carry(None, 8), trajectory.is_first
    )
    reference_log_prob = np.take_along_axis(
        np.asarray(jax.nn.log_softmax(reference_logits)), np.asarray(trajectory.action)[..., None], -1
    )[..., 0]
    kl = np.asarray(trajectory.log_prob) - reference_log_prob
    valid = np.asarray(trajectory.valid)
    scores = np.sum(np.where(valid, np.asarray(trajectory.reward) - 50.0 * kl, 0), axis=0).reshape(2, 4)
    expected = (scores - scores.mean(1, keepdims=True)) / (scores.std(1, keepdims=True) + 1e-6)
    actual = np.asarray(batch.advantage).reshape(16, 8)[0].reshape(2, 4)
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=1e-4)


def test_a_reward_slot_needs_no_reference():
    def punished(trajectory, kl, hyperparams):
        """DAPO's soft overlong punishment, on the last step."""
        lengths = jnp.sum(trajectory.valid, axis=0)
        return trajectory.reward + trajectory.ended * overlong_punishment(lengths, max_length=16, buffer=8)

    config, state, trajectory, batch = rolled_out(GRPO._replace(reward=punished))
    lengths = np.asarray(trajectory.valid).sum(0)
    scores = (lengths - np.clip((lengths - 8) / 8, 0, 1)).reshape(2, 4)
    expected = (scores - scores.mean(1, keepdims=True)) / (scores.std(1, keepdims=True) + 1e-6)
    actual = np.asarray(batch.advantage).reshape(16, 8)[0]
    np.testing.assert_allclose(actual, expected.reshape(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "slot, function",
    [
        ("advantage", lambda trajectory, hyperparams, group_size: objectives.episode_scores(trajectory, group_size)),
        ("reduce", jnp.mean),
        ("ratio", lambda log_ratio, batch, hyperparams: log_ratio.sum()),
        ("surrogate", lambda log_ratio, advantage, hyperparams: log_ratio[0]),
        ("penalties", (lambda prediction, batch, hyperparams: 0.0,)),
    ],
)
def test_a_slot_of_the_wrong_shape_is_named(slot, function):
    with pytest.raises(ValueError, match=f"the slot '{slot}' returned shape"):
        check(Config(algorithm=GRPO._replace(**{slot: function}), **SMALL))


def test_a_variant_from_outside_the_package_trains():
    @struct.dataclass
    class Mine(Hyperparams):
        temperature: float = 2.0

    mine = GRPO._replace(surrogate=lambda log_ratio, advantage, hp: hp.temperature * jnp.tanh(log_ratio) * advantage)
    (start, end), (metrics,) = trained(mine, Mine(temperature=3.0))
    assert metrics["optim/skipped_updates"] == 0
    assert any(jnp.any(a != b) for a, b in zip(*map(jax.tree.leaves, (start.params, end.params)), strict=True))


@pytest.mark.parametrize("formula", [jnp.mean, jnp.transpose, jnp.ravel], ids=lambda formula: formula.__name__)
def test_a_formula_of_the_wrong_shape_is_refused(formula):
    with pytest.raises(ConfigError, match=r"outcome\(\w+\) returned shape .*, and should return \(2, 4\)"):
        check(Config(algorithm=GRPO._replace(advantage=objectives.outcome(formula)), **SMALL))


def test_slots_made_of_formulas_are_functions_to_jax():
    """Which refers to them weakly, and so refuses tuples."""
    x, hyperparams = jnp.ones((1, 4)), Hyperparams()
    for transform in (jax.jit, jax.checkpoint):
        surrogate = transform(GRPO.surrogate)(x, x, hyperparams)
        np.testing.assert_allclose(surrogate, GRPO.surrogate(x, x, hyperparams), rtol=1e-6)
    assert jax.eval_shape(jax.checkpoint(GRPO.surrogate), x, x, hyperparams).shape == x.shape

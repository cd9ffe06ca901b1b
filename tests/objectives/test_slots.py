"""What fills the slots: every algorithm's update, and the options that the layer-1 functions do not have."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import check
from small import minibatch_gradient

from grpo_jax import GRPO, Config, Hyperparams, make_init, make_train_step, objectives
from grpo_jax.algorithms import ALGORITHMS, with_reference
from grpo_jax.environments.tokens import overlong_punishment
from grpo_jax.errors import ConfigError
from grpo_jax.objectives import EntropyHyperparams
from grpo_jax.policies import MLP
from grpo_jax.rollouts.collect import collect
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.training.train_step import initial_state
from grpo_jax.updates.batch import make_batch
from grpo_jax.updates.loss import predict
from grpo_jax.updates.orders import sorted_order

SMALL = {"num_envs": 8, "group_size": 4, "env_params": {"max_steps_in_episode": 16}, "network": MLP((8,))}


@functools.cache
def played(start, **slots):
    """A state at the start, and the trajectory of one rollout."""
    config = config_of(GRPO._replace(start=start, **slots))

    @jax.jit
    def play(key, *keys):
        state = initial_state(config, key, Hyperparams())
        simulator = Simulator(config.env, config.policy, state.params, state.hyperparams.discount)
        return state, collect(config, simulator, state.rollout, *keys)[1]

    return play(jax.random.key(0), *jax.random.split(jax.random.key(1)))


def config_of(algorithm):
    return Config(algorithm=algorithm, num_minibatches=1, num_steps=16, **SMALL)


@functools.cache
def rolled_out(algorithm):
    """A config, its state at the start, and one rollout's trajectory and batch."""
    config = config_of(algorithm)
    of_rollout = {name: getattr(algorithm, name) for name in ("critic", "reference", "greedy_member")}
    state, trajectory = played(algorithm.start, **of_rollout)
    batch = jax.jit(lambda *arguments: make_batch(config, config.policy, *arguments))
    return config, state, trajectory, batch(state, trajectory, state.hyperparams)


def gradient_of(config, parts, *arguments):
    """The loss, metrics and gradient of a minibatch, accumulated over so many parts."""
    in_parts = dataclasses.replace(config, num_microbatches=parts)
    return minibatch_gradient(in_parts, config.policy, *arguments)


SLOW_REDUCTIONS = "remax", "grpo", "ppo", "dr_grpo"


@pytest.mark.parametrize("name", ["gspo", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_REDUCTIONS)])
def test_parts_of_a_minibatch_have_its_gradient(name):
    config, state, _, batch = rolled_out(ALGORITHMS[name])
    moved = jax.tree.map(lambda leaf: leaf + 0.05, state.params)  # off the behaviour policy, so that clips matter

    @jax.jit
    def gradients(params):
        indices = sorted_order(jax.random.key(3), jnp.any(batch.mask, axis=0))
        return [gradient_of(config, n, params, batch, indices, state.hyperparams) for n in (1, 4)]

    (whole_loss, whole_metrics, whole), (loss, metrics, accumulated) = jax.tree.map(np.asarray, gradients(moved))
    np.testing.assert_allclose(loss, whole_loss, rtol=1e-5, atol=1e-6)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(accumulated), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * max(1.0, np.abs(a).max()))
    for metric in whole_metrics:
        np.testing.assert_allclose(metrics[metric], whole_metrics[metric], rtol=1e-4, atol=1e-6, err_msg=metric)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(whole)) > 1e-4


def test_parts_of_a_minibatch_need_less_memory():
    config, state, _, batch = rolled_out(GRPO)
    batch = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf)[:, :1], 8192, axis=1), batch)

    def temporary_bytes(parts):
        def gradient(params, order):
            return gradient_of(config, parts, params, batch, order, state.hyperparams)

        program = jax.jit(gradient).lower(state.params, jnp.arange(8192)).compile()
        return program.memory_analysis().temp_size_in_bytes

    whole, split = temporary_bytes(1), temporary_bytes(64)
    assert split < whole / 3, (split, whole)


def test_parts_without_valid_samples_are_skipped():
    # Samples that are not valid stand last; were their part computed, its NaN observations would spoil the sum.
    config, state, _, batch = rolled_out(GRPO)
    order, (_, size) = np.argsort(~np.asarray(batch.mask[0]), kind="stable"), batch.mask.shape
    poisoned = batch.replace(observation=np.where(batch.mask[..., None], batch.observation, np.nan))
    assert batch.mask.sum() < size
    loss, _, gradients = jax.jit(functools.partial(gradient_of, config, size))(
        state.params, poisoned, order, state.hyperparams
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((loss, gradients)))


@functools.cache
def programs(algorithm):
    """The jitted `init` and `train_step`."""
    config = Config(algorithm=algorithm, num_minibatches=4, **SMALL)
    return jax.jit(make_init(config)), jax.jit(make_train_step(config))


def trained(algorithm, hyperparams, num_iterations=1):
    init, step = programs(algorithm)
    states, metrics = [init(jax.random.key(0), hyperparams)], []
    for _ in range(num_iterations):
        state, measured = step(states[-1])
        states.append(state)
        metrics.append(measured)
    return states, metrics


def test_the_greedy_member_is_not_learnt_from():
    _, _, trajectory, batch = rolled_out(ALGORITHMS["remax"])
    trajectory, batch = jax.tree.map(np.asarray, (trajectory, batch))
    greedy = np.arange(8) % 4 == 0
    assert not batch.mask.reshape(16, 8)[:, greedy].any() and batch.mask.reshape(16, 8)[0, ~greedy].all()
    is_most_probable = trajectory.action == trajectory.distribution.argmax(axis=-1)
    assert is_most_probable[:, greedy].all() and not is_most_probable[:, ~greedy].all()
    scores = trajectory.reward.sum(0).reshape(2, 4)
    np.testing.assert_allclose(batch.advantage.reshape(16, 8)[0].reshape(2, 4), scores - scores[:, :1])


# --- what a slot needs, it says itself -------------------------------------------------------------------------------

GREEDY = objectives.outcome(objectives.greedy_baseline, objectives.episode_scores, objectives.greedy_scores)
CRITIC = {"critic": objectives.with_hyperparams(objectives.value_loss)}
REFERENCE = {"reference": objectives.frozen_reference}
NEEDS = [
    ("advantage", objectives.gae_advantage, CRITIC, "set critic="),
    ("advantage", GREEDY, {"greedy_member": True}, "set greedy_member=True"),
    ("ratio", objectives.sequence_ratio, {"whole_sequences": True}, "sequence_ratio .*set whole_sequences=True"),
    ("step_mask", objectives.keep_high_entropy, {"whole_minibatches": True}, "set whole_minibatches=True"),
    ("penalties", objectives.kl_to_reference, REFERENCE, "with_reference"),
    ("reward", objectives.kl_penalized_reward, REFERENCE, "with_reference"),
]


@pytest.mark.parametrize("slot, function, need, message", NEEDS)
def test_what_a_slot_needs_is_named_before_training(slot, function, need, message):
    def unnamed(*arguments):  # known by what it does
        return function(*arguments)

    algorithm = GRPO._replace(**{"penalties": (), slot: (unnamed,) if slot == "penalties" else unnamed})
    with pytest.raises(ConfigError, match=message):
        check(Config(algorithm=algorithm, num_minibatches=1, **SMALL))
    check(Config(algorithm=algorithm._replace(**need), num_minibatches=1, **SMALL))


# --- what is reported of clips ---------------------------------------------------------------------------------------


def clip_fractions(algorithm, hyperparams):
    """Of a gradient off the behaviour policy, and the same from the ratios of the steps."""
    config, state, _, batch = rolled_out(algorithm)

    @jax.jit
    def reported(params):
        params = jax.tree.map(lambda leaf: leaf + 0.3 * jnp.cos(jnp.arange(leaf.size).reshape(leaf.shape)), params)
        _, metrics, _ = gradient_of(config, 1, params, batch, jnp.arange(batch.mask.shape[1]), hyperparams)
        log_ratio = predict(config.policy, params, batch).log_prob - batch.log_prob
        clip = {"clip_low": hyperparams.clip_low, "clip_high": hyperparams.clip_high}
        of_steps = objectives.clip_fractions(log_ratio, batch.advantage, **clip)
        return metrics, [jnp.mean(clipped, where=batch.mask) for clipped in of_steps]

    metrics, of_steps = reported(state.params)
    return (metrics["policy/clip_fraction_low"], metrics["policy/clip_fraction_high"]), of_steps


def test_clips_of_surrogates_and_of_ratios_are_reported():
    def clipped_ratio(log_ratio, batch, h):
        high, low = jnp.minimum(log_ratio, jnp.log1p(h.clip_high)), jnp.maximum(log_ratio, jnp.log1p(-h.clip_low))
        return jnp.where(batch.advantage > 0, high, low)

    unclipped = GRPO._replace(surrogate=objectives.with_hyperparams(objectives.unclipped_surrogate))
    for algorithm in (GRPO, unclipped._replace(ratio=clipped_ratio)):
        reported, expected = clip_fractions(algorithm, Hyperparams(clip_low=0.02, clip_high=0.03))
        np.testing.assert_allclose(reported, expected, rtol=1e-5)
    assert all(0.05 < share < 0.95 for share in expected)
    one_sided = GRPO._replace(surrogate=lambda log_ratio, advantage, h: jnp.minimum(jnp.exp(log_ratio), 1) * advantage)
    (low, high), _ = clip_fractions(one_sided, Hyperparams())
    _, _, _, batch = rolled_out(one_sided)
    assert 0 < low < np.mean(batch.advantage < 0, where=batch.mask) and 0 < high
    assert clip_fractions(unclipped, Hyperparams(clip_low=0.01, clip_high=0.01))[0] == (0.0, 0.0)


# --- limits and controllers ------------------------------------------------------------------------------------------


def flat(state):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state.params)])


def test_updates_stop_once_the_kl_limit_is_exceeded():
    (start, free), _ = trained(GRPO, Hyperparams(learning_rate=0.05))
    (_, limited), (metrics,) = trained(GRPO, Hyperparams(learning_rate=0.05, kl_limit=1e-3))
    free, limited = (np.linalg.norm(flat(end) - flat(start)) for end in (free, limited))
    assert 0 < limited < 0.5 * free
    assert metrics["policy/kl_behaviour"] <= 1e-3  # of the updates that were applied
    assert metrics["optim/skipped_updates"] == 0  # leaving out is not skipping


CONTROLLED = GRPO._replace(
    kl_controller=objectives.with_hyperparams(objectives.adaptive_coefficient, target="kl_target")
)


@pytest.mark.parametrize("target, direction", [(1e-6, 1), (10.0, -1)])
def test_the_kl_coefficient_follows_the_measured_kl(target, direction):
    states, metrics = trained(CONTROLLED, Hyperparams(kl_coef=0.1, kl_target=target, learning_rate=0.01), 3)
    coefficients = [float(state.kl_coef) for state in states]
    expected = [0.1 * (1 + direction * 0.1 * 0.2) ** i for i in range(4)]  # the error is clipped at ±0.2, gain 0.1
    np.testing.assert_allclose(coefficients, expected, rtol=1e-5)
    assert float(states[-1].hyperparams.kl_coef) == pytest.approx(0.1)
    np.testing.assert_allclose([m["policy/kl_coef"] for m in metrics], coefficients[1:])
    weak, strong = (flat(programs(CONTROLLED)[1](states[1].replace(kl_coef=jnp.float32(x)))[0]) for x in (0.1, 50))
    assert np.abs(weak - strong).max() > 1e-4, "training uses it"


HELD = GRPO._replace(
    entropy_controller=objectives.with_hyperparams(objectives.adaptive_entropy_coefficient, target="entropy_target"),
    hyperparams=EntropyHyperparams,
)


@pytest.mark.parametrize("target, moves", [(2.0, 0.005), (0.0, -0.005)])
def test_the_entropy_bonus_follows_the_measured_entropy(target, moves):
    coefficients = [0.1 + i * moves for i in range(4)]
    states, metrics = trained(HELD, EntropyHyperparams(entropy_coef=0.1, entropy_target=target, learning_rate=0.01), 3)
    np.testing.assert_allclose([float(state.entropy_coef) for state in states], coefficients, rtol=1e-5)
    np.testing.assert_allclose([m["policy/entropy_coef"] for m in metrics], coefficients[1:], rtol=1e-5)
    assert [float(state.entropy) for state in states] == [np.inf, *(float(m["policy/entropy"]) for m in metrics)]
    fixed, _ = trained(GRPO, Hyperparams(learning_rate=0.01), 3)
    np.testing.assert_allclose(flat(states[1]), flat(fixed[1]), atol=1e-6)  # no bonus before an entropy was measured
    assert (np.abs(flat(states[3]) - flat(fixed[3])).max() > 1e-4) == (moves > 0)


def assert_normalized(batch, scores):
    """The advantages of two groups of four are the normalised scores."""
    scores = scores.reshape(2, 4)
    expected = (scores - scores.mean(1, keepdims=True)) / (scores.std(1, keepdims=True) + 1e-6)
    actual = np.asarray(batch.advantage).reshape(16, 8)[0].reshape(2, 4)
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=1e-4)


def test_the_kl_penalty_moves_into_the_reward():
    algorithm = with_reference(GRPO)._replace(reward=objectives.kl_penalized_reward, penalties=())
    config, state, trajectory, _ = rolled_out(algorithm)
    reference = jax.tree.map(lambda leaf: leaf + 0.1, state.params)

    @jax.jit
    def compare(hyperparams):
        of_reference = state.replace(reference_params=reference)
        batch = make_batch(config, config.policy, of_reference, trajectory, hyperparams)
        carry = config.policy.initial_carry(None, 8)
        logits, _ = config.policy.sequence(reference, trajectory.observation, carry, trajectory.is_first)
        return batch, jax.nn.log_softmax(logits)

    batch, log_probs = compare(state.hyperparams.replace(kl_coef=50.0))
    of_actions = np.take_along_axis(np.asarray(log_probs), np.asarray(trajectory.action)[..., None], -1)[..., 0]
    penalized = np.asarray(trajectory.reward) - 50.0 * (np.asarray(trajectory.log_prob) - of_actions)
    assert_normalized(batch, np.sum(penalized, axis=0, where=np.asarray(trajectory.valid)))


def test_a_reward_slot_needs_no_reference():
    def punished(trajectory, kl, hyperparams):
        """DAPO's soft overlong punishment, on the last step."""
        lengths = jnp.sum(trajectory.valid, axis=0)
        return trajectory.reward + trajectory.ended * overlong_punishment(lengths, max_length=16, buffer=8)

    _, _, trajectory, batch = rolled_out(GRPO._replace(reward=punished))
    lengths = np.asarray(trajectory.valid).sum(0)
    assert_normalized(batch, lengths - np.clip((lengths - 8) / 8, 0, 1))


def test_a_slot_of_the_wrong_shape_is_named():
    for slot, function in {
        "advantage": lambda trajectory, hyperparams, group_size: objectives.episode_scores(trajectory, group_size),
        "reduce": jnp.mean,
        "ratio": lambda log_ratio, batch, hyperparams: log_ratio.sum(),
        "surrogate": lambda log_ratio, advantage, hyperparams: log_ratio[0],
        "penalties": (lambda prediction, batch, hyperparams: 0.0,),
    }.items():
        with pytest.raises(ValueError, match=f"the slot '{slot}' returned shape"):
            check(Config(algorithm=GRPO._replace(**{slot: function}), **SMALL))
    for formula in (jnp.mean, jnp.transpose):
        with pytest.raises(ConfigError, match=r"outcome\([\w.:]+\) returned shape .*, and should return \(2, 4\)"):
            check(Config(algorithm=GRPO._replace(advantage=objectives.outcome(formula)), **SMALL))
    forgotten = GRPO._replace(advantage=objectives.outcome(lambda scores: scores - scores.mean(axis=1)))  # no keepdims
    with pytest.raises(ConfigError, match=r"mixes up groups and members, as scores of shape \(5, 4\) show"):
        check(Config(algorithm=forgotten, **SMALL | {"num_envs": 16}))

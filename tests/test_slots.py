"""What fills the slots: every algorithm's update, and the options that the layer-1 functions do not have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from grpo_jax import GRPO, Config, Hyperparams, make_init, make_train_step, slots
from grpo_jax.algorithms import ALGORITHMS, with_reference
from grpo_jax.losses import mean_of_sequence_sums
from grpo_jax.rewards import overlong_punishment
from grpo_jax.rollout import unroll
from grpo_jax.shuffle import shuffled_order
from grpo_jax.types import Batch
from grpo_jax.updates import make_batch, minibatch_gradient

SMALL = {"num_envs": 8, "group_size": 4, "env_params": {"max_steps_in_episode": 16}, "hidden_sizes": (8,)}


def rolled_out(algorithm, **fields):
    """A config, its state at the start, and one rollout's trajectory and batch."""
    config = Config(algorithm=algorithm, num_minibatches=1, num_steps=16, **SMALL, **fields)
    state = jax.jit(make_init(config))(jax.random.key(0), Hyperparams())
    start = config.algorithm.start
    rollout = start.begin(state.rollout, config.policy, state.params, config.env, jax.random.key(1), 8, 4)
    _, trajectory = unroll(
        config.policy, config.env, state.params, rollout, jax.random.key(2), num_steps=16, auto_reset=start.auto_reset
    )
    params, hyperparams = state.params, state.hyperparams
    batch = make_batch(config.algorithm, config.policy, params, trajectory, params, hyperparams, config.group_size)
    return config, state, trajectory, batch


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
            minibatch_gradient(config.algorithm, config.policy, params, batch, indices, state.hyperparams, parts)
            for parts in (1, 4)
        ]

    (whole_loss, whole_metrics, whole), (loss, metrics, accumulated) = gradients(moved)
    np.testing.assert_allclose(loss, whole_loss, rtol=1e-5, atol=1e-6)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(accumulated), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * max(1.0, float(jnp.max(jnp.abs(a)))))
    for metric in whole_metrics:
        np.testing.assert_allclose(metrics[metric], whole_metrics[metric], rtol=1e-4, atol=1e-6, err_msg=metric)
    assert max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(whole)) > 1e-4


def test_microbatches_lower_the_peak_memory():
    config = Config(num_envs=64, num_minibatches=1, hidden_sizes=(64, 64), num_steps=500)

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
                starts=rows == 0,
                carry=config.policy.initial_carry(None, 1),
            )
            order = jax.random.permutation(key, 32_000)
            return minibatch_gradient(
                config.algorithm, config.policy, state.params, batch, order, state.hyperparams, parts
            )

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
        config.algorithm, config.policy, state.params, poisoned, order, state.hyperparams, parts
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
    begin = config.algorithm.start.begin
    start = begin(state.rollout, config.policy, state.params, config.env, jax.random.key(1), 8, 4)
    greedy = jnp.arange(8) % 4 == 0
    _, trajectory = unroll(
        config.policy, config.env, state.params, start, jax.random.key(2), num_steps=16, auto_reset=False, greedy=greedy
    )
    most_probable = jnp.argmax(trajectory.distribution, axis=-1)
    assert jnp.all(trajectory.action[:, greedy] == most_probable[:, greedy])
    assert not jnp.all(trajectory.action[:, ~greedy] == most_probable[:, ~greedy])
    advantage = slots.greedy_baseline_advantage(trajectory, state.hyperparams, 4)
    scores = np.asarray(trajectory.reward.sum(0)).reshape(2, 4)
    np.testing.assert_allclose(advantage[0].reshape(2, 4), scores - scores[:, :1])


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
    algorithm = GRPO._replace(kl_controller=slots.adaptive_kl)
    states, metrics = trained(algorithm, Hyperparams(kl_coef=0.1, kl_target=target, learning_rate=0.01), 3)
    coefficients = [float(state.kl_coef) for state in states]
    expected = [0.1 * (1 + direction * 0.1 * 0.2) ** i for i in range(4)]  # the error is clipped at ±0.2, gain 0.1
    np.testing.assert_allclose(coefficients, expected, rtol=1e-5)
    assert float(states[-1].hyperparams.kl_coef) == pytest.approx(0.1)
    np.testing.assert_allclose([m["policy/kl_coef"] for m in metrics], coefficients[1:])


def test_the_kl_penalty_moves_into_the_reward():
    algorithm = with_reference(GRPO)._replace(reward=slots.kl_penalized_reward, penalties=())
    config, state, trajectory, _ = rolled_out(algorithm)
    reference = jax.tree.map(lambda leaf: leaf + 0.1, state.params)
    hyperparams = state.hyperparams.replace(kl_coef=jnp.float32(50.0))
    batch = make_batch(config.algorithm, config.policy, state.params, trajectory, reference, hyperparams, 4)
    reference_logits, _ = config.policy.sequence(
        reference, trajectory.observation, config.policy.initial_carry(None, 8), trajectory.starts
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
        ("advantage", lambda trajectory, hyperparams, group_size: slots.episode_scores(trajectory, group_size)),
        ("reduce", jnp.mean),
        ("ratio", lambda log_ratio, batch, hyperparams: log_ratio.sum()),
        ("surrogate", lambda log_ratio, advantage, hyperparams: log_ratio[0]),
        ("penalties", (lambda prediction, batch, hyperparams: 0.0,)),
    ],
)
def test_a_slot_of_the_wrong_shape_is_named(slot, function):
    with pytest.raises(ValueError, match=f"the slot '{slot}' returned shape"):
        Config(algorithm=GRPO._replace(**{slot: function}), **SMALL)


def test_a_variant_from_outside_the_package_trains():
    @struct.dataclass
    class Mine(Hyperparams):
        temperature: float = 2.0

    mine = GRPO._replace(surrogate=lambda log_ratio, advantage, hp: hp.temperature * jnp.tanh(log_ratio) * advantage)
    (start, end), (metrics,) = trained(mine, Mine(temperature=3.0))
    assert metrics["optim/skipped_updates"] == 0
    assert any(jnp.any(a != b) for a, b in zip(*map(jax.tree.leaves, (start.params, end.params)), strict=True))

"""Algorithms as values: what their slots compose to, reference policies over train steps, and each as users run it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Echo, Probe, acted, bits, difference, known_params, known_policy
from small import minibatch_gradient, small_config

from grpo_jax import GRPO, PPO, Config, Hyperparams, make_init, make_train, make_train_step, objectives, ppo_loss
from grpo_jax.algorithms import ALGORITHMS, GRPO_RETURN_TO_GO, name_of, with_reference
from grpo_jax.groups import ANCHORED
from grpo_jax.objectives import (
    averaged_reference,
    exact_kl_to_reference,
    frozen_reference,
    kl_to_reference,
    refreshed_reference,
)
from grpo_jax.policies import MLP, Transformer
from grpo_jax.training.checks import unread_fields
from grpo_jax.types import Trajectory
from grpo_jax.updates.batch import make_batch

NUM_STEPS, NUM_ENVS, GROUP_SIZE = 5, 8, 4
LENGTHS = np.array([5, 2, 3, 5, 1, 4, 5, 2])
RNG = np.random.default_rng(0)
HYPERPARAMS = Hyperparams(entropy_coef=0.03, kl_coef=0.2, clip_low=0.1, clip_high=0.3, value_clip=0.4, discount=0.9)


def trajectory(reward=None, lengths=LENGTHS):
    """A rollout of random numbers, masked after each member's end."""
    shape = (NUM_STEPS, NUM_ENVS)
    steps = np.arange(NUM_STEPS)[:, None]
    valid = steps < lengths
    reward = RNG.normal(size=shape) if reward is None else reward
    logits, values, next_values = RNG.normal(size=(*shape, 2)), RNG.normal(size=shape), RNG.normal(size=shape)
    floats = (np.asarray(x, np.float32) for x in (np.where(valid, reward, 0), np.full(shape, -0.7), logits))
    reward, log_prob, distribution = floats
    return Trajectory(
        observation=np.asarray(RNG.normal(size=(*shape, 3)), np.float32),
        action=RNG.integers(0, 2, shape),
        reward=reward,
        terminated=steps == lengths - 1,
        truncated=np.zeros(shape, bool),
        valid=valid,
        log_prob=log_prob,
        distribution=distribution,
        value=np.asarray(values, np.float32),
        next_value=np.asarray(next_values, np.float32),
        episode_return=np.cumsum(reward, axis=0),
        episode_length=np.minimum(steps + 1, lengths),
        discounted_return=np.zeros(shape, np.float32),
        carry=(),
    )


PARAMS = known_params((0.4, -0.1), weights=(0.3, -0.2, 0.1), bias=0.2)
REFERENCE = known_params((0.1, 0.2), weights=(0.0, 0.0, 0.0), bias=0.0)
WHOLE = {"whole_sequences": True}  # so that batches keep the shape of the trajectory


def composed(algorithm, rollout):
    """The batch, and loss, metrics and gradient of the whole of it."""
    sizes = {"num_envs": NUM_ENVS, "group_size": GROUP_SIZE, "num_minibatches": 1, "num_microbatches": 1}
    config = Config(environment=Probe(), algorithm=algorithm, **sizes)

    @jax.jit
    def compose(rollout):
        state = acted(PARAMS, reference_params=REFERENCE)
        batch = make_batch(config, known_policy, state, rollout, HYPERPARAMS)
        everything = jnp.arange(batch.mask.shape[1])
        return batch, *minibatch_gradient(config, known_policy, PARAMS, batch, everything, HYPERPARAMS)

    return compose(rollout)


def log_probs(params, rollout):
    logits, _ = known_policy.sequence(params, rollout.observation, rollout.carry, rollout.is_first)
    return known_policy.distribution.log_prob(logits, rollout.action)


def assert_coincides(whole_loss, names, total, metrics, gradient):
    """The slots compose to `whole_loss`, a function of the parameters: value, gradient and the metrics of both."""
    (expected_total, expected_metrics), expected_gradient = jax.jit(jax.value_and_grad(whole_loss, has_aux=True))(
        PARAMS
    )
    np.testing.assert_allclose(total, expected_total, rtol=5e-6)
    for actual, expected in zip(gradient, expected_gradient, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)
    for name in names:
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-5, atol=1e-7, err_msg=name)


POLICY_METRICS = ["loss/policy", "policy/clip_fraction_low", "policy/clip_fraction_high", "policy/ratio_max"]


def test_ppo_composes_to_ppo_loss():
    rollout = trajectory()
    _, total, metrics, gradient = composed(PPO._replace(**WHOLE), rollout)

    def whole_loss(params):
        trace = {"discount": HYPERPARAMS.discount, "gae_lambda": HYPERPARAMS.gae_lambda}
        values = rollout.reward, rollout.value, rollout.next_value
        advantage = objectives.gae(*values, rollout.terminated, rollout.truncated, **trace)
        logits, values = known_policy.sequence(params, rollout.observation, rollout.carry, rollout.is_first)
        return ppo_loss(
            log_probs(params, rollout),
            rollout.log_prob,
            objectives.whiten(advantage, rollout.valid),
            values,
            rollout.value,
            advantage + rollout.value,
            known_policy.distribution.entropy(logits),
            rollout.valid,
            clip_low=HYPERPARAMS.clip_low,
            clip_high=HYPERPARAMS.clip_high,
            value_clip=HYPERPARAMS.value_clip,
            value_coef=HYPERPARAMS.value_coef,
            entropy_coef=HYPERPARAMS.entropy_coef,
        )

    assert_coincides(whole_loss, [*POLICY_METRICS, "loss/value", "policy/entropy"], total, metrics, gradient)


def test_penalties_weigh_exact_divergences_and_entropy():
    rollout, family = trajectory(), known_policy.distribution

    @jax.jit
    def costs(rollout):
        policy, reference = (
            known_policy.sequence(params, rollout.observation, rollout.carry, rollout.is_first)[0]
            for params in (PARAMS, REFERENCE)
        )
        of_steps = family.entropy(policy), family.kl(rollout.distribution, policy), family.kl(policy, reference)
        weights = objectives.mean_over_steps(rollout.valid)
        return [objectives.weighted_sum(values, weights) for values in of_steps]

    entropy, to_behaviour, to_reference = costs(rollout)
    referring = with_reference(GRPO, frozen_reference, exact_kl_to_reference)
    for algorithm, divergence in {GRPO: to_behaviour, referring: to_reference}.items():
        _, total, metrics, _ = composed(algorithm, rollout)
        expected = HYPERPARAMS.kl_coef * divergence - HYPERPARAMS.entropy_coef * entropy
        np.testing.assert_allclose(total - metrics["loss/policy"], expected, rtol=1e-5)


@pytest.mark.parametrize("algorithm", [GRPO, PPO], ids=["grpo", "ppo"])
def test_loose_steps_and_whole_sequences_have_the_same_loss(algorithm):
    rollout = trajectory()
    loose, total, _, gradient = composed(algorithm, rollout)
    whole, expected, _, expected_gradient = composed(algorithm._replace(**WHOLE), rollout)
    assert loose.mask.shape == (1, NUM_STEPS * NUM_ENVS) and whole.mask.shape == (NUM_STEPS, NUM_ENVS)
    assert loose.observation.shape == (1, NUM_STEPS * NUM_ENVS, 3)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    for actual, other in zip(gradient, expected_gradient, strict=True):
        np.testing.assert_allclose(actual, other, rtol=1e-5, atol=1e-7)


@functools.cache
def advantages(algorithm):
    compiled = jax.jit(lambda rollout: algorithm.advantage(rollout, HYPERPARAMS, GROUP_SIZE))
    return lambda rollout: np.asarray(compiled(rollout))


def test_returns_to_go_are_compared_at_the_same_step():
    reward = np.ones((NUM_STEPS, NUM_ENVS))
    rollout = trajectory(reward, np.array([1, 2, 2, 3, 5, 5, 5, 5]))
    advantage = advantages(GRPO_RETURN_TO_GO)(rollout)
    to_go = np.array([1, 1.9, 1.9, 2.71])
    first = to_go - (to_go.sum() - to_go) / 3
    second = np.array([0, 1 - 1.45, 1 - 1.45, 1.9 - 1])
    third = np.array([0, 0, 0, 1])  # the last member alone is still there
    np.testing.assert_allclose(advantage[:4, :4], [first, second, third, np.zeros(4)], atol=1e-6)
    assert not advantage[:, 4:].any()


def mine(trajectory, hyperparams, group_size):
    return trajectory.reward


OWN = PPO._replace(advantage=mine)


@pytest.mark.parametrize(
    ("algorithm", "name"),
    {
        GRPO_RETURN_TO_GO: "grpo_return_to_go",
        OWN: f"{__name__}:OWN",
        PPO._replace(start=ANCHORED): "ppo with start=(anchored_groups, keep_end)",
        with_reference(PPO): "ppo with penalties=(kl_to_reference, entropy_bonus), reference=frozen_reference",
        with_reference(GRPO): "grpo with penalties=(kl_to_reference, entropy_bonus), reference=frozen_reference",
        GRPO._replace(advantage=objectives.outcome(mine)): f"grpo with advantage=outcome({__name__}:mine)",
    }.items(),
)
def test_an_algorithm_is_called_by_its_name_its_import_path_or_what_sets_it_apart(algorithm, name):
    assert name_of(algorithm) == name


# --- references over train steps -------------------------------------------------------------------------------------


def make_steps(reference, kl):
    sizes = {"num_envs": 16, "group_size": 4, "num_epochs": 2, "network": MLP(())}
    config = small_config(with_reference(GRPO, reference, kl), Echo(), **sizes)
    init, step = jax.jit(make_init(config)), jax.jit(make_train_step(config))

    def history(number, **hyperparams):
        """The states before and after each of some train steps, and the metrics of the last."""
        states = [init(jax.random.key(0), Hyperparams(learning_rate=0.05, kl_coef=0.1, **hyperparams))]
        for _ in range(number):
            state, metrics = step(states[-1])
            states.append(state)
        assert step._cache_size() == 1
        return states, metrics

    return history


def test_a_refreshed_reference_is_taken_every_interval():
    states, metrics = make_steps(functools.partial(refreshed_reference, interval=3), kl_to_reference)(6)
    taken = [states[index].params for index in (0, 0, 0, 3, 3, 3, 6)]
    assert [bits(state.reference_params) for state in states] == [bits(params) for params in taken]
    assert len({str(bits(state.params)) for state in states}) == 7
    assert metrics["policy/kl_reference"] > 0


def test_an_averaged_reference_follows():
    states, _ = make_steps(functools.partial(averaged_reference, decay=0.75), kl_to_reference)(3)
    kernel = [np.asarray(state.params["actor"]["Dense_0"]["kernel"], np.float64) for state in states]
    expected = kernel[0]
    for state, current in zip(states[1:], kernel[1:], strict=True):
        expected = 0.75 * expected + 0.25 * current
        np.testing.assert_allclose(state.reference_params["actor"]["Dense_0"]["kernel"], expected, rtol=1e-5, atol=1e-7)
    assert bits(states[0].reference_params) == bits(states[0].params)


# --- as users run them: real initial weights, an optimised program, default hyperparameters ---------------------------

AS_USERS_COMPILE = {"xla_backend_optimization_level": 3, "xla_cpu_parallel_codegen_split_count": 32}
SIZES = {"num_envs": 16, "group_size": 4, "num_minibatches": 2, "num_epochs": 2}
CARTPOLE = {"environment": "CartPole-v1", "env_params": {"max_steps_in_episode": 24}, "network": MLP((8,))}
WORDS = {"environment": "tokens:sort-3", "network": Transformer(num_layers=1, width=8, num_heads=2)}


@pytest.mark.parametrize("name", [x if x == "grpo" else pytest.param(x, marks=pytest.mark.slow) for x in ALGORITHMS])
@pytest.mark.usefixtures("initial_weights_of_users")
def test_an_algorithm_trains_and_nothing_unread_changes_it(name):
    fields, numbers = CARTPOLE, {}
    if name == "gdpo":  # compares the parts of a reward, of which random tokens get none
        fields, numbers = WORDS, {"entropy_coef": 0.01}
    config, key = Config(algorithm=name, **SIZES | fields), jax.random.key(0)
    train = jax.jit(make_train(config, 3), compiler_options=AS_USERS_COMPILE)
    hyperparams = config.algorithm.hyperparams(**numbers)
    start, _ = train(key, hyperparams.replace(learning_rate=0.0))
    state, metrics = train(key, hyperparams)
    assert difference(start.params, state.params) and not metrics["optim/skipped_updates"].any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, state.opt_state, metrics)))

    numbers = {name: value for name, value in vars(hyperparams).items() if value is not None}
    unread = unread_fields(config, hyperparams, numbers)
    assert unread and "learning_rate" not in unread
    other, same = train(key, hyperparams.replace(**{name: 0.9 * numbers[name] + 0.01 for name in unread}))
    assert bits((other.params, other.opt_state, same)) == bits((state.params, state.opt_state, metrics))

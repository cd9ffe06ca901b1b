"""Each type of policy on environments of which everything is known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces
from probes import OneOrThirty, Parts, Probe, ProbeParams, Questions, QuestionState, Recall

from grpo_jax import Config, Hyperparams, evaluate, run
from grpo_jax.policies import CNN, MLP

pytestmark = pytest.mark.slow

KEYS = jax.random.split(jax.random.key(0), 2)
SIZES = {"num_envs": 64, "num_minibatches": 4}
TYPES = {"mlp": MLP, "cnn": CNN, "gru": functools.partial(MLP, recurrent="gru", recurrent_size=16)}


@pytest.mark.parametrize("shared_critic", [False, True], ids=["separate critic", "shared critic"])
@pytest.mark.parametrize("type_of_policy", TYPES)
def test_known_values_are_learnt(type_of_policy, shared_critic):
    environment = Questions(image=type_of_policy == "cnn")
    network = TYPES[type_of_policy](hidden_sizes=(32,), shared_critic=shared_critic)
    config = Config(environment, "ppo", num_steps=16, network=network, **SIZES)
    hyperparams = Hyperparams(learning_rate=0.01, discount=0.5, total_steps=60.0 * config.steps_per_iteration)
    params = run(config, hyperparams, KEYS).states.params

    kinds, cues = jnp.array([0, 1, 2, 3, 3, 4]), jnp.array([0, 0, 0, 0, 1, 0])
    observations = jnp.stack(
        [jax.vmap(environment.get_obs)(QuestionState(kind=kinds, cue=cues, time=jnp.full(6, t))) for t in range(2)]
    )
    starts = jnp.array([[True], [False]]).repeat(6, axis=1)

    @jax.vmap
    def answer(params):
        logits, values = config.policy.sequence(params, observations, config.policy.initial_carry(params, 6), starts)
        return jax.nn.softmax(logits)[..., 1], values

    probabilities, values = answer(params)
    recalled = 1.0 if config.policy.has_carry else 0.5
    np.testing.assert_allclose(values[:, 0, [0, 1, 2, 5]], [[1.0, 0.5, 1.0, 2.0]] * 2, atol=0.1)
    np.testing.assert_allclose(values[:, 1, [1, 3, 4, 5]], [[1.0, recalled, recalled, 2.0]] * 2, atol=0.1)
    assert (probabilities[:, 0, 2] > 0.9).all(), "action 1 pays"
    if config.policy.has_carry:
        np.testing.assert_allclose(values[:, 0, [3, 4]], 0.5, atol=0.1)
        np.testing.assert_allclose(probabilities[:, 1, [3, 4]], [[0.0, 1.0]] * 2, atol=0.1)
    else:
        np.testing.assert_array_equal(probabilities[:, 1, 3], probabilities[:, 1, 4])


def test_long_episodes_count_as_often_as_they_start():
    config = Config(environment=OneOrThirty(), algorithm="ppo", num_envs=64)
    hyperparams = Hyperparams(learning_rate=0.01, total_steps=60.0 * config.steps_per_iteration)
    result = run(config, hyperparams, KEYS)
    num_episodes = result.metrics["episode/count"].mean()
    assert abs(num_episodes / (config.steps_per_iteration / OneOrThirty.MEAN_LENGTH) - 1) < 0.03
    evaluated = jax.jit(jax.vmap(lambda state, key: evaluate(config, state, key, num_episodes=4096).returns.mean()))
    assert (evaluated(result.states, KEYS) > 1.05).all()


def returns_after(config, num_iterations, **hyperparams):
    hyperparams = Hyperparams(total_steps=float(num_iterations * config.steps_per_iteration), **hyperparams)
    states = run(config, hyperparams, KEYS).states
    play = jax.jit(jax.vmap(lambda state: evaluate(config, state, jax.random.key(1)).returns.mean()))
    returns = np.asarray(play(states))
    print(config.env.name, "memory", config.network.recurrent, "returns by seed:", returns)
    return returns


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("memory", ["gru", "mingru", "none"])
def test_only_a_memory_recalls(algorithm, memory):
    network = MLP((16,), recurrent=memory, recurrent_size=8)
    config = Config(Recall(), algorithm, num_steps=6, network=network, **SIZES)
    returns = returns_after(config, 30, learning_rate=0.02)
    assert (returns > 0.9).all() if memory != "none" else (abs(returns - 0.5) < 0.15).all()


def test_a_critic_that_sees_more_than_the_actor():
    network = MLP((32,), actor_observation=("position", "velocity"))
    config = Config(Parts(), "ppo", num_steps=16, network=network, **SIZES)
    hyperparams = Hyperparams(learning_rate=0.01, discount=0.5, total_steps=60.0 * config.steps_per_iteration)
    state = jax.tree.map(lambda leaf: leaf[0], run(config, hyperparams, KEYS).states)
    observation = {name: jnp.array([[0.5], [0.5], [-0.5]]) for name in ("position", "velocity")}
    luck = jnp.array([[1.0], [-1.0], [1.0]])
    observation["privileged"] = {"luck": luck, "is_lucky": luck > 0, "time": jnp.zeros((3, 1), jnp.int32)}
    logits, values, _ = config.policy.step(state.params, observation, config.policy.initial_carry(state.params, 3))
    np.testing.assert_array_equal(logits[0], logits[1])
    assert logits[0, 0] - logits[0, 1] > 2 and logits[2, 1] - logits[2, 0] > 2, "it pushes towards 0"
    np.testing.assert_allclose(values, [4.0, 0.0, 4.0], atol=0.2)


LOW, HIGH = np.float32([-1.0, 0.0]), np.float32([1.0, 4.0])


class Aim(Probe):
    """One step with reward 1 - squared distance to a target that depends on the mark; NaN outside the bounds."""

    name = "Aim"
    PARAMS = ProbeParams(max_steps_in_episode=1)

    def step_env(self, key, state, action, params):
        observation, state, _, terminated, info = super().step_env(key, state, 0, params)
        target = jnp.stack([1.6 * state.mark - 0.8, 1.0 + state.mark])
        within = jnp.all((action >= LOW) & (action <= HIGH))
        return observation, state, jnp.where(within, 1.0 - jnp.sum((action - target) ** 2), jnp.nan), terminated, info

    def action_space(self, params):
        return spaces.Box(LOW, HIGH, (2,))


@pytest.mark.parametrize("algorithm, group_size", [("ppo", 1), ("grpo", 8)])
def test_real_actions_aim(algorithm, group_size):
    sizes = {"num_envs": 64, "num_steps": 1, "num_epochs": 2, "num_minibatches": 2, "network": MLP((16,))}
    rates = jnp.array([0.02, 0.02, 0.0])
    hyperparams = Hyperparams(learning_rate=rates, final_learning_rate=rates, total_steps=100 * 64.0)
    config = Config(Aim(), algorithm, group_size=group_size, **sizes)
    returns = run(config, hyperparams, jax.random.split(jax.random.key(0), 3)).metrics["episode/return_mean"]
    assert np.isfinite(returns).all()
    assert (returns[-10:, :2].mean(0) > 0.85).all() and returns[-10:, 2].mean() < 0.4

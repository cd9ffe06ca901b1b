"""The implementations that the benchmark compares ours with: rejax's PPO, and PPO as it is commonly written in JAX.

They have the same environments, network sizes, samples and gradient steps as ours.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from grpo_jax.errors import ConfigError

DISCOUNT, GAE_LAMBDA, CLIP, VALUE_COEF, ENTROPY_COEF = 0.99, 0.95, 0.2, 0.5, 0.01
MAX_GRAD_NORM, ADAM_EPS = 0.5, 1e-5


class Size(NamedTuple):
    """What every implementation does in a train step: rollouts, then passes over their samples in minibatches."""

    num_envs: int
    num_steps: int = 128
    num_epochs: int = 4
    num_minibatches: int = 4
    hidden_sizes: tuple[int, ...] = (64, 64)  # of the policy, and of the critic beside it
    learning_rate: float = 2.5e-4

    @property
    def num_samples(self) -> int:
        """Environment steps in a train step."""
        return self.num_envs * self.num_steps

    @property
    def num_gradient_steps(self) -> int:
        return self.num_epochs * self.num_minibatches


class Implementation(NamedTuple):
    """A training loop as two pure functions for one seed, which may be vmapped."""

    init: Callable  # (key) -> state
    step: Callable  # (state) -> (state, metrics): one rollout and its updates


def rejax_version() -> str | None:
    return importlib.metadata.version("rejax") if importlib.util.find_spec("rejax") else None


def installed(names: Sequence[str]) -> tuple[str, ...]:
    """The names of implementations, without rejax's PPO if rejax is not installed.

    Raises ConfigError if none is left.
    """
    found = tuple(name for name in names if name != "rejax PPO" or rejax_version() is not None)
    if not found:
        raise ConfigError("rejax is not installed (pip install '.[benchmark]'), and nothing else was asked for")
    return found


def rejax_ppo(environment: str, size: Size, *, logged: bool = False) -> Implementation:
    """rejax's own PPO, unchanged, on gymnax's environment behind `LegacyStepAPIWrapper`.

    It has no metrics; with `logged` one, the mean return of the last episode of each environment; NaN before all had
    one.
    """
    import gymnax
    from gymnax.wrappers import LegacyStepAPIWrapper, LogWrapper
    from rejax import get_algo

    class Legacy(LegacyStepAPIWrapper):
        def __deepcopy__(self, memo):  # rejax copies it, and the wrapper as it is cannot be copied
            return self

    env, env_params = gymnax.make(environment)
    algorithm = get_algo("ppo").create(
        env=Legacy(LogWrapper(env) if logged else env),
        env_params=env_params,
        agent_kwargs={"activation": "tanh", "hidden_layer_sizes": size.hidden_sizes},
        num_envs=size.num_envs,
        num_steps=size.num_steps,
        num_epochs=size.num_epochs,
        num_minibatches=size.num_minibatches,
        learning_rate=size.learning_rate,
        gamma=DISCOUNT,
        gae_lambda=GAE_LAMBDA,
        clip_eps=CLIP,
        vf_coef=VALUE_COEF,
        ent_coef=ENTROPY_COEF,
        max_grad_norm=MAX_GRAD_NORM,
    )

    def step(state):
        state = algorithm.train_iteration(state)
        if not logged:
            return state, {}
        last = state.env_state
        all_had_one = jnp.all(last.returned_episode_lengths > 0)
        return state, {"episode/return_mean": jnp.where(all_had_one, last.returned_episode_returns.mean(), jnp.nan)}

    return Implementation(algorithm.init_state, step)


class PlainState(NamedTuple):
    params: Any
    optimizer: Any
    environment: Any
    observation: jax.Array  # [B, ...]
    episode_return: jax.Array  # [B]
    key: jax.Array


class PlainTransition(NamedTuple):
    observation: jax.Array
    action: jax.Array
    reward: jax.Array
    done: jax.Array
    value: jax.Array
    log_prob: jax.Array
    episode_return: jax.Array


class PlainActorCritic(nn.Module):
    """Two networks in one module, float32 throughout."""

    num_actions: int
    hidden_sizes: tuple[int, ...]

    @nn.compact
    def __call__(self, observation):
        flat = observation.reshape(observation.shape[0], -1).astype(jnp.float32)
        outputs = []
        for size, scale in ((self.num_actions, 0.01), (1, 1.0)):
            x = flat
            for width in self.hidden_sizes:
                x = nn.tanh(nn.Dense(width, kernel_init=nn.initializers.orthogonal(2**0.5))(x))
            outputs.append(nn.Dense(size, kernel_init=nn.initializers.orthogonal(scale))(x))
        return outputs[0], outputs[1][:, 0]


def plain_ppo(environment: str, size: Size) -> Implementation:
    """PPO in its common formulation, as in purejaxrl.

    An environment's step draws a reset each time and selects; each epoch permutes all samples with
    `jax.random.permutation`, gathers them, and scans over the minibatches; a time limit counts as termination.
    """
    import gymnax

    env, env_params = gymnax.make(environment)
    space = env.action_space(env_params)
    if not hasattr(space, "n"):
        raise ConfigError(
            f"plain PPO needs discrete actions, which {environment} lacks; use --implementations 'rejax PPO' PPO GRPO"
        )
    network = PlainActorCritic(space.n, size.hidden_sizes)
    optimizer = optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adam(size.learning_rate, eps=ADAM_EPS))

    def init(key):
        key, key_params, key_reset = jax.random.split(key, 3)
        observation, state = jax.vmap(env.reset, in_axes=(0, None))(
            jax.random.split(key_reset, size.num_envs), env_params
        )
        params = network.init(key_params, observation)
        return PlainState(params, optimizer.init(params), state, observation, jnp.zeros(size.num_envs), key)

    def environment_step(state, _):
        key, key_action, key_step = jax.random.split(state.key, 3)
        logits, value = network.apply(state.params, state.observation)
        action = jax.random.categorical(key_action, logits)
        log_prob = _log_prob(logits, action)
        observation, environment_state, reward, terminated, truncated, _ = jax.vmap(env.step, in_axes=(0, 0, 0, None))(
            jax.random.split(key_step, size.num_envs), state.environment, action, env_params
        )
        done = terminated | truncated
        episode_return = state.episode_return + reward
        transition = PlainTransition(state.observation, action, reward, done, value, log_prob, episode_return)
        return state._replace(
            environment=environment_state,
            observation=observation,
            episode_return=jnp.where(done, 0.0, episode_return),
            key=key,
        ), transition

    def update(carry, minibatch):
        params, optimizer_state = carry
        gradient = jax.grad(_loss)(params, minibatch, network)
        steps, optimizer_state = optimizer.update(gradient, optimizer_state)
        return (optax.apply_updates(params, steps), optimizer_state), None

    def step(state):
        state, trajectory = jax.lax.scan(environment_step, state, length=size.num_steps)
        advantage = _advantages(trajectory, network.apply(state.params, state.observation)[1])
        batch = (trajectory, advantage, advantage + trajectory.value)
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)

        def epoch(carry, key):
            order = jax.random.permutation(key, size.num_samples)
            shuffled = jax.tree.map(lambda leaf: jnp.take(leaf, order, axis=0), flat)
            minibatches = jax.tree.map(lambda leaf: leaf.reshape(size.num_minibatches, -1, *leaf.shape[1:]), shuffled)
            return jax.lax.scan(update, carry, minibatches)

        key, key_epochs = jax.random.split(state.key)
        carry = (state.params, state.optimizer)
        (params, optimizer_state), _ = jax.lax.scan(epoch, carry, jax.random.split(key_epochs, size.num_epochs))
        returns = jnp.mean(trajectory.episode_return, where=trajectory.done)
        state = state._replace(params=params, optimizer=optimizer_state, key=key)
        return state, {"episode/return_mean": returns}

    return Implementation(init, step)


def _advantages(trajectory, last_value):
    def backwards(carry, step):
        advantage, next_value = carry
        going_on = 1.0 - step.done
        delta = step.reward + DISCOUNT * next_value * going_on - step.value
        advantage = delta + DISCOUNT * GAE_LAMBDA * going_on * advantage
        return (advantage, step.value), advantage

    start = (jnp.zeros_like(last_value), last_value)
    return jax.lax.scan(backwards, start, trajectory, reverse=True)[1]


def _loss(params, minibatch, network):
    step, advantage, target = minibatch
    logits, value = network.apply(params, step.observation)
    clipped_value = step.value + jnp.clip(value - step.value, -CLIP, CLIP)
    value_loss = 0.5 * jnp.maximum((value - target) ** 2, (clipped_value - target) ** 2).mean()
    ratio = jnp.exp(_log_prob(logits, step.action) - step.log_prob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage).mean()
    log_probs = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1).mean()
    return policy_loss + VALUE_COEF * value_loss - ENTROPY_COEF * entropy


def _log_prob(logits, action):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=-1)[:, 0]

"""Whole episodes under fixed parameters, and actions for observations from anywhere."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import Config, behaviour_policy, kept_with
from grpo_jax.environments import EnvParams, group_parameters
from grpo_jax.errors import ConfigError
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.policies.normalization import Normalizer
from grpo_jax.policies.sampling import apply_sampling_mask
from grpo_jax.rollouts.outcomes import outcome_return
from grpo_jax.rollouts.resets import advance_where
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.types import PyTree, TrainState

CHUNK = 64
"""Steps whose states are in memory at once while episodes are recorded."""


class Evaluation(NamedTuple):
    """Returns and lengths of whole episodes."""

    returns: jax.Array  # [num_episodes] undiscounted
    lengths: jax.Array  # [num_episodes] int32


def check_evaluable(config: Config) -> None:
    """Raises ConfigError for an environment whose episodes the host rewards, which no evaluation of episodes calls."""
    if config.env.host is not None:
        raise ConfigError(
            f"{config.env.name!r} is rewarded on the host, so it has no evaluations of episodes; complete its held-out "
            "prompts by generate, and reward them by task.judge, as grpo-jax lm does"
        )


def evaluate(
    config: Config,
    state: TrainState,
    key: jax.Array,
    *,
    num_episodes: int = 128,
    greedy: bool = False,
    env_params: EnvParams = None,
) -> Evaluation:
    """Plays `num_episodes` whole episodes from independent resets. Pure: `jit` it, `vmap` it over states and keys.

    If environments have different parameters, each gets the same number of episodes. An episode that diverges ends at
    its last finite state.

    Args:
      config: the config of the run that `state` comes from.
      state: the policy, and the parameters of the environments.
      key: of the resets, the environment and the actions.
      num_episodes: number of episodes.
      greedy: take the most probable actions instead of samples.
      env_params: parameters of the environment by name, instead of the state's: one value for all episodes.
    """

    def play(policy, environment_params, key):
        end, _ = _simulator(config, *policy).play(environment_params, key, num_episodes, greedy=greedy)
        return Evaluation(returns=end.episode_return, lengths=end.episode_length)

    program = kept_with(config, ("evaluate", num_episodes, greedy), lambda: jax.jit(play, inline=True))
    environment_params = _environment_params(config, state, num_episodes, env_params)
    return program((state.params, state.normalizer, state.hyperparams), environment_params, key)


class Steps(NamedTuple):
    """Consecutive steps of `B` episodes, on the host. An episode that has ended stays in its final state."""

    states: PyTree  # of the environment, each leaf [N, B, ...]
    observations: PyTree  # each leaf [N, B, ...]
    returns: np.ndarray  # [N, B]: the sum of the rewards before
    lengths: np.ndarray  # [N, B]: the number of steps before


def record_episodes(
    config: Config,
    state: TrainState,
    key: jax.Array,
    *,
    num_episodes: int = 1,
    greedy: bool = False,
) -> Iterator[Steps]:
    """Plays whole episodes and yields their states, first to last, in chunks of `CHUNK` steps.

    Args:
      config, state, key, greedy: see `evaluate`.
      num_episodes: `B`.
    """
    policy = state.params, state.normalizer, state.hyperparams
    environment_params = _environment_params(config, state, num_episodes, None)
    key_reset, key_rollout = jax.random.split(key)
    num_chunks = config.env.max_steps // CHUNK + 1  # one more row than there are steps, for the final state

    def reset(policy, environment_params, key):
        rollout = _simulator(config, *policy).reset(environment_params, key, num_episodes)
        return rollout, jnp.ones(num_episodes, bool)

    def play(policy, start, keys):
        simulator = _simulator(config, *policy)
        # Each rollout here is one step, so the final reward is added by hand below, to the episode's last step.
        simulator = simulator._replace(environment=config.env._replace(outcome=None))

        def step(carry, key):
            state, alive = carry
            next_state, trajectory = simulator.unroll(state, key, num_steps=1, auto_reset=False, greedy=greedy)
            steps = Steps(state.environment, state.observation, state.episode_return, state.episode_length)
            goes_on = alive & trajectory.valid[0] & ~trajectory.ended[0]
            return (advance_where(alive, state, next_state), goes_on), (steps, alive)

        carry, (steps, alive) = jax.lax.scan(step, start, keys)
        if config.env.outcome is not None:
            final_reward = outcome_return(config.env, carry[0])
            steps = steps._replace(returns=steps.returns + jnp.where(alive, 0.0, final_reward))
        return carry, (steps, alive.any(axis=1))

    programs = "record episodes", num_episodes, greedy
    start, go_on = kept_with(config, programs, lambda: (jax.jit(reset), jax.jit(play)))
    carry = start(policy, environment_params, key_reset)
    for keys in jax.random.split(key_rollout, (num_chunks, CHUNK)):
        carry, (steps, alive) = go_on(policy, carry, keys)
        num_rows = min(int(alive.sum()) + 1, CHUNK)
        yield jax.tree.map(lambda leaf, num_rows=num_rows: leaf[:num_rows], jax.device_get(steps))
        if not alive.all():
            return


def _simulator(config: Config, params: PyTree, normalizer: Normalizer, hyperparams: Hyperparams) -> Simulator:
    check_evaluable(config)
    policy = behaviour_policy(config, normalizer, hyperparams)
    return Simulator(config.env, policy, params, plan=config.plan)


def _environment_params(
    config: Config, state: TrainState, num_episodes: int, env_params: EnvParams
) -> dict[str, jax.Array]:
    """The parameters in the state, spread evenly over the episodes, with `env_params` in place of some."""
    which = np.arange(num_episodes) * config.num_envs // num_episodes  # NumPy's integers have 64 bits
    environment_params = jax.tree.map(lambda leaf: leaf[which], state.rollout.environment_params)
    replaced = group_parameters(config.env, env_params, num_episodes, 1)
    return environment_params | {name: replaced[name] for name in env_params or {}}


def choose_actions(
    config: Config,
    params: PyTree,
    normalizer: Normalizer,
    hyperparams: Hyperparams,
    observation: PyTree,
    carry: PyTree,
    *,
    key: jax.Array | None = None,
    action_mask: jax.Array | None = None,
) -> tuple[jax.Array, PyTree]:
    """Actions for `N` observations, both as the environment gives and takes them, and the policy's next carry. Pure.

    Args:
      config: the run that the policy comes from.
      params, normalizer, hyperparams: of one row of it.
      observation, carry: each leaf `[N, ...]`.
      key: of samples; None takes the most probable actions.
      action_mask: bool `[N, num_actions]`, the legal actions; None if all are.
    """
    policy = behaviour_policy(config, normalizer, hyperparams)
    codec = config.env.codec
    parameters, _, carry = policy.step(params, jax.vmap(codec.encode)(observation), carry)
    parameters, _ = apply_sampling_mask(policy, parameters, action_mask)
    distribution = policy.distribution
    action = distribution.mode(parameters) if key is None else distribution.sample(parameters, key)
    return jax.vmap(codec.decode)(distribution.to_environment(action)), carry

"""Checks of what an environment does beyond single steps: outcomes of whole episodes, and actions of its own."""

import jax
import jax.numpy as jnp

from grpo_jax.config.descriptions import are_alike, describe_arrays
from grpo_jax.config.fields import Fields
from grpo_jax.environments import Environment, group_parameters
from grpo_jax.environments.environment import Transition
from grpo_jax.environments.spaces import Discrete
from grpo_jax.errors import ConfigError
from grpo_jax.types import RewardParts

_NUM_ENVS = 2


def check_environment(config: Fields) -> None:
    """Checks the environment's `outcome` and `imposed`, if it has them, against the algorithm and on shapes."""
    env, start = config.env, config.algorithm.start
    if env.outcome is not None and not start.from_reset:
        raise ConfigError(
            f"{env.name!r} rewards whole episodes (it has an outcome), but rollouts of this algorithm begin or end in "
            "mid-episode; use one-episode groups, such as algorithm=PPO._replace(start=FRESH)"
        )
    if env.imposed is None:
        return
    if not isinstance(env.action_space, Discrete):
        raise ConfigError(
            f"{env.name!r} acts itself at some steps (it has imposed), but its actions are in {env.action_space}; use "
            "Discrete actions, of which -1 is none"
        )
    if start.all_actions:
        raise ConfigError(
            f"{env.name!r} acts itself at some steps (it has imposed), but all_actions compares the policy's own first "
            "actions; use forked(trunk_steps) without it"
        )
    imposed = jax.eval_shape(lambda key: env.imposed(env.reset(key, env.params)[0], env.params), jax.random.key(0))
    if not are_alike(imposed, jax.ShapeDtypeStruct((), jnp.int32)):
        raise ConfigError(
            f"imposed of {env.name!r} gives {describe_arrays(imposed)}; return an int32 scalar, the environment's own "
            "action, or -1 where the policy acts"
        )


def empty_reward_parts(config: Fields, shape: tuple[int, int]) -> RewardParts:
    """The parts `[T, B, K]` of a reward of 0, first those of the steps and then those of the outcome.

    Args:
      config: of an environment with parts.
      shape: T and B.

    Raises:
      ConfigError: the outcome does not have the shapes `[B, K]` or `[B, max_steps, K]`.
    """
    env, family = config.env, config.policy.distribution

    def play(key) -> tuple[Transition, RewardParts | None]:
        keys, params = jax.random.split(key, _NUM_ENVS), group_parameters(env, None, _NUM_ENVS, 1)
        states, _ = jax.vmap(env.reset)(keys, params)
        actions = family.to_environment(family.mode(jnp.zeros((_NUM_ENVS, family.num_parameters))))
        moved = jax.vmap(env.step)(keys, states, actions, params)
        return moved.reward_parts, env.outcome and env.outcome(moved.state, params)

    steps, outcome = jax.eval_shape(play, jax.random.key(0))
    if outcome is not None:
        _check_outcome(env, outcome)
    parts = jnp.zeros((*shape, sum(parts.values.shape[-1] for parts in (steps, outcome) if parts is not None)))
    has_judged = outcome is not None and outcome.judged is not None
    return RewardParts(parts, parts, jnp.zeros(shape, bool) if has_judged else None)


def _check_outcome(env: Environment, outcome: RewardParts) -> None:
    steps = _NUM_ENVS, env.max_steps
    if isinstance(outcome, RewardParts) and jnp.shape(outcome.values) == jnp.shape(outcome.weights):
        leading, judged = jnp.shape(outcome.values)[:-1], outcome.judged
        of_episodes = leading == (_NUM_ENVS,) and judged is None
        of_steps = leading == steps and (judged is None or are_alike(judged, jax.ShapeDtypeStruct(steps, bool)))
        if of_episodes or of_steps:
            return
    raise ConfigError(
        f"the outcome of {env.name!r} for {_NUM_ENVS} environments is {describe_arrays(outcome)}; return "
        f"RewardParts(values, weights), both [{_NUM_ENVS}, K], for K parts of the reward, or both "
        f"[{_NUM_ENVS}, {env.max_steps}, K], for the steps of an episode, and judged None or bool{list(steps)}"
    )

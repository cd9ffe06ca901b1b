"""Families of action distributions: pure functions of their parameters, which are the output of a policy."""

from collections.abc import Callable

from grpo_jax.environments.spaces import ActionSpace, Box, Discrete, MultiDiscrete
from grpo_jax.errors import ConfigError, describe_function
from grpo_jax.importing import import_custom, is_custom
from grpo_jax.policies.distributions.discrete import categorical, multi_categorical
from grpo_jax.policies.distributions.distribution import Distribution
from grpo_jax.policies.distributions.gaussian import diagonal_gaussian


def make_distribution(space: ActionSpace, action_distribution: str | Callable = "auto") -> Distribution:
    """The family of distributions over an action space.

    Args:
      space: the action space.
      action_distribution: "auto" is categorical for Discrete and MultiDiscrete, and a Gaussian for Box. A custom one is
        a function `(space) -> Distribution`, or its path "package.module:name".

    Raises:
      ConfigError: for an unknown name or space.
    """
    if is_custom(action_distribution):
        return _make_custom(space, action_distribution)
    if action_distribution != "auto":
        raise ConfigError(
            f"unknown action_distribution {action_distribution!r}: use 'auto', a Gaussian for real actions, or "
            "'package.module:name' for a custom one"
        )
    match space:
        case Box(low, high):
            return diagonal_gaussian(low, high)
        case Discrete(num_actions):
            return categorical(num_actions)
        case MultiDiscrete(num_actions):
            return multi_categorical(num_actions)
    raise ConfigError(f"unknown action space {space}; use Discrete, MultiDiscrete or Box")


def _make_custom(space, family) -> Distribution:
    family = import_custom(family, "action_distribution")
    distribution = family(space) if callable(family) else family
    if not isinstance(distribution, Distribution):
        raise ConfigError(
            f"action_distribution gives {distribution!r} for {space}, but must give a Distribution: write a function "
            "(space) -> Distribution"
        )
    if not 0 <= distribution.num_free <= distribution.num_parameters or distribution.num_parameters < 1:
        raise ConfigError(
            f"{describe_function('action_distribution', family)}: num_parameters={distribution.num_parameters} and "
            f"num_free={distribution.num_free}; use at least one parameter, and no more free ones than there are"
        )
    return distribution

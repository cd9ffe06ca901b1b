"""Families of action distributions: pure functions of their parameters, which are the output of a policy."""

from collections.abc import Callable

from grpo_jax.environments.spaces import ActionSpace, Box, Discrete, MultiDiscrete
from grpo_jax.errors import ConfigError, describe_function, nearest
from grpo_jax.importing import import_custom, is_custom
from grpo_jax.policies.distributions.discrete import categorical, multi_categorical
from grpo_jax.policies.distributions.distribution import Distribution
from grpo_jax.policies.distributions.gaussian import diagonal_gaussian, squashed_gaussian

BOX_FAMILIES = {"gaussian": diagonal_gaussian, "squashed_gaussian": squashed_gaussian}


def make_distribution(space: ActionSpace, action_distribution: str | Callable = "auto") -> Distribution:
    """The family of distributions over an action space.

    Args:
      space: the action space.
      action_distribution: "auto" is categorical for Discrete and MultiDiscrete, and "gaussian" for Box. The
        alternative for Box is "squashed_gaussian". A custom one is a function `(space) -> Distribution`, or its
        path "package.module:name".

    Raises:
      ConfigError: for an unknown name, or a family that does not fit the space.
    """
    if is_custom(action_distribution):
        return _make_custom(space, action_distribution)
    names = ("auto", *BOX_FAMILIES)
    if action_distribution not in names:
        raise ConfigError(f"unknown action_distribution {action_distribution!r}: {nearest(action_distribution, names)}")
    match space:
        case Box(low, high):
            return BOX_FAMILIES["gaussian" if action_distribution == "auto" else action_distribution](low, high)
        case Discrete() | MultiDiscrete() if action_distribution != "auto":
            raise ConfigError(
                f"action_distribution={action_distribution!r} is over real numbers, but the actions are {space}; "
                "use 'auto'"
            )
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

"""What a baseline is, and how a function becomes one."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from grpo_jax.objectives.slots import function_name
from grpo_jax.types import PyTree, Trajectory


class Baseline(NamedTuple):
    """Values of states, estimated from the returns of other rollouts: two pure functions, as in optax.

    The state is what the baseline keeps from rollout to rollout, a pytree of arrays of constant shapes and dtypes.
    """

    # (trajectory, policy, params) -> the state before the first rollout; of the trajectory only shapes and dtypes exist
    init: Callable
    # (trajectory, state, policy, params, hyperparams, group_size) -> values [T, B] of the observations, [F, B] of the
    # final ones, and the next state; `params` are those that acted
    apply: Callable

    def __repr__(self) -> str:
        return function_name(self.apply)


def no_state(trajectory: Trajectory, policy: Any, params: PyTree) -> tuple[()]:
    """`init` of a baseline without a state."""
    return ()


@dataclasses.dataclass(frozen=True, repr=False)
class _With:
    """A function with keyword arguments, as `functools.partial` makes it, but equal to others with the same ones."""

    function: Callable
    options: tuple[tuple[str, Any], ...]

    def __call__(self, *arguments: Any, **others: Any) -> Any:
        return self.function(*arguments, **others, **dict(self.options))

    def __repr__(self) -> str:
        options = (f"{name}={function_name(value)}" for name, value in self.options)
        return f"{function_name(self.function).lstrip('_')}({', '.join(options)})"


def with_options(function: Callable, **options: Any) -> Callable:
    """The function with these keyword arguments."""
    return _With(function, tuple(options.items()))


def stateless(values: Callable) -> Baseline:
    """A baseline that keeps nothing from rollout to rollout.

    Args:
      values: `(trajectory, policy, params, hyperparams, group_size) -> values [T, B], final values [F, B]`.
    """
    return Baseline(no_state, with_options(_stateless, values=values))


def _stateless(trajectory: Trajectory, state: PyTree, *others: Any, values: Callable) -> tuple:
    return *values(trajectory, *others), state

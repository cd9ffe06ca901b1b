"""From a formula to a slot of an `Algorithm`: formulas take arrays and numbers, slots trajectories and hyperparameters.

GRPO._replace(advantage=outcome(group_centered), surrogate=with_hyperparams(clipped_surrogate, "clip_low", "clip_high"))
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.errors import function_name
from grpo_jax.hyperparams import Hyperparams, advice_on
from grpo_jax.objectives.whitening import whiten
from grpo_jax.precision import above_rounding
from grpo_jax.types import Trajectory

__all__ = ["episode_scores", "greedy_scores", "outcome", "reward_part_scores"]
__all__ += ["rewarded_parts", "reward_part_weights", "with_hyperparams", "whitened"]


def episode_scores(trajectory: Trajectory, group_size: int) -> jax.Array:
    """`[num_groups, group_size]`: the undiscounted return of each rollout; equal in a group where rounding differs.

    One that diverged gets the mean of the group's others, which it thus does not move; 0 if all of them diverged.
    """
    scores = jnp.sum(trajectory.reward, axis=0, where=trajectory.valid).reshape(-1, group_size)
    scores = _equal_up_to_rounding(scores, score_sizes(trajectory.reward, trajectory, group_size))
    if trajectory.diverged is None:
        return scores
    whole = ~jnp.any(trajectory.diverged, axis=0).reshape(-1, group_size)
    first = jnp.take_along_axis(scores, jnp.argmax(whole, axis=1)[:, None], axis=1)
    excess = jnp.sum(scores - first, axis=1, where=whole, keepdims=True)  # exactly 0 for equal scores
    mean = first + excess / jnp.maximum(jnp.sum(whole, axis=1, keepdims=True, dtype=float), 1)
    return jnp.where(whole, scores, jnp.where(jnp.any(whole, axis=1, keepdims=True), mean, 0.0))


def score_sizes(rewards: jax.Array, trajectory: Trajectory, group_size: int) -> jax.Array:
    """`[num_groups, 1, ...]`: the largest sum of absolute rewards `[T, B, ...]` of a member, which bounds rounding."""
    valid = trajectory.valid.reshape(trajectory.valid.shape + (1,) * (rewards.ndim - 2))
    sizes = jnp.sum(jnp.abs(rewards), axis=0, where=valid)
    return jnp.max(sizes.reshape(-1, group_size, *rewards.shape[2:]), axis=1, keepdims=True)


def _equal_up_to_rounding(scores: jax.Array, sizes: jax.Array) -> jax.Array:
    """The scores `[num_groups, group_size, ...]`; those of a group whose differences are rounding are its first one."""
    differs = above_rounding(jnp.max(scores, 1, keepdims=True) - jnp.min(scores, 1, keepdims=True), sizes) != 0
    return jnp.where(differs, scores, scores[:, :1])


def greedy_scores(trajectory: Trajectory, group_size: int) -> jax.Array:
    """`[num_groups]`: the return of each group's first member, which acts greedily.

    Raises:
      ValueError: no member acts greedily.
    """
    if trajectory.greedy is None:
        raise ValueError("greedy_scores needs a greedy first member, but all members sample; set greedy_member=True")
    return episode_scores(trajectory, group_size)[:, 0]


def reward_part_scores(trajectory: Trajectory, group_size: int) -> jax.Array:
    """`[num_parts, num_groups, group_size]`: each part of the reward, summed over each rollout.

    Raises:
      ValueError: the environment does not report parts of its reward.
    """
    _check_reward_parts(trajectory)
    values = trajectory.reward_parts.values
    scores = jnp.sum(values, axis=0, where=trajectory.valid[..., None]).reshape(-1, group_size, values.shape[-1])
    return jnp.moveaxis(_equal_up_to_rounding(scores, score_sizes(values, trajectory, group_size)), -1, 0)


def reward_part_weights(trajectory: Trajectory, group_size: int) -> jax.Array:
    """`[num_parts, num_groups]`: the weight of each part of the reward, which may differ between groups.

    Raises:
      ValueError: the environment does not report parts of its reward.
    """
    _check_reward_parts(trajectory)
    weights = trajectory.reward_parts.weights[0].T
    return weights.reshape(weights.shape[0], -1, group_size)[..., 0]


def rewarded_parts(trajectory: Trajectory, group_size: int) -> jax.Array | None:
    """Bool `[num_parts, num_groups, group_size]`: whether a part of the reward applied to a rollout; None: all did."""
    _check_reward_parts(trajectory)
    if (rewarded := trajectory.reward_parts.rewarded) is None:
        return None
    return jnp.any(rewarded & trajectory.valid[..., None], axis=0).T.reshape(rewarded.shape[-1], -1, group_size)


def _check_reward_parts(trajectory: Trajectory) -> None:
    if trajectory.reward_parts is None:
        raise ValueError("the advantage compares the parts of the reward, which only token tasks report; use another")


# Dataclasses rather than closures: two with the same parts are equal, as `name_of` and a hashable `Config` need.


@dataclasses.dataclass(frozen=True, repr=False)
class _Outcome:
    formula: Callable
    measures: tuple[Callable, ...]

    def __call__(self, trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
        formula = bound(self.formula, hyperparams)
        measures = [bound(measure, hyperparams)(trajectory, group_size) for measure in self.measures]
        num_groups = trajectory.valid.shape[1] // group_size
        if self.measures == (episode_scores,) and num_groups == group_size:  # a mean without keepdims would fit too
            more = jax.ShapeDtypeStruct((num_groups + 1, group_size), measures[0].dtype)
            try:
                self._check(jax.eval_shape(formula, more), num_groups + 1, group_size)
            except (TypeError, ValueError) as error:
                shown = f"as scores of shape {more.shape} show"
                raise ValueError(f"{self} mixes up groups and members, {shown}: {error}") from error
        # The barriers stop XLA from computing scores and advantages again wherever they are read.
        advantage = jax.lax.optimization_barrier(formula(*jax.lax.optimization_barrier(measures)))
        self._check(advantage, num_groups, group_size)
        return jnp.where(trajectory.valid, advantage.reshape(1, -1), 0.0)

    def _check(self, advantage: jax.Array, *groups: int) -> None:
        if jnp.shape(advantage) != groups:
            raise ValueError(f"{self} returned shape {jnp.shape(advantage)}, and should return {groups}")

    def __repr__(self) -> str:
        measures = () if self.measures == (episode_scores,) else self.measures
        return f"outcome({', '.join(map(function_name, (self.formula, *measures)))})"


def outcome(formula: Callable, *measures: Callable) -> _Outcome:
    """Outcome supervision: one advantage for each rollout, given to all of its steps.

        outcome(formula, measure, ...): A_t = formula(measure(trajectory), ...)  on every valid step t

    Args:
      formula: from one or more measures to `[num_groups, group_size]`, such as `group_normalized`, or one with
        hyperparameters, `with_hyperparams(formula, "power")`.
      measures: functions of `(trajectory, group_size)`, whose results the formula takes; by default `episode_scores`.

    Returns:
      A function for the slot `advantage`; it raises ValueError if the formula returns another shape.
    """
    return _Outcome(formula, measures or (episode_scores,))


@dataclasses.dataclass(frozen=True, repr=False)
class _Whitened:
    advantage: Callable

    def __call__(self, trajectory: Trajectory, hyperparams: Hyperparams, group_size: int) -> jax.Array:
        return whiten(self.advantage(trajectory, hyperparams, group_size), trajectory.acted)

    def __repr__(self) -> str:
        return f"whitened({function_name(self.advantage)})"


def whitened(advantage: Callable) -> _Whitened:
    """An advantage in standard deviations from its mean over all steps of the batch in which the policy acted.

        A_t = (a_t - mean(a)) / (std(a) + eps)

    REINFORCE++ is `whitened(returns_to_go)`, its variant with a baseline `whitened(outcome(group_centered))`
    (https://arxiv.org/abs/2501.03262). A long rollout weighs more in mean and std than a short one.
    """
    return _Whitened(advantage)


@dataclasses.dataclass(frozen=True, repr=False)
class _WithHyperparams:
    function: Callable
    tunables: tuple[tuple[str, str], ...]  # keyword of the function, name of the hyperparameter

    def __call__(self, *arguments: Any) -> Any:
        hyperparams = [argument for argument in arguments if isinstance(argument, Hyperparams)]
        if len(hyperparams) != 1:
            raise TypeError(f"{self} needs the hyperparameters as one of its arguments")
        others = (argument for argument in arguments if not isinstance(argument, Hyperparams))
        return self.bind(hyperparams[0])(*others)

    def bind(self, hyperparams: Hyperparams) -> Callable:
        """The function with these hyperparameters as keyword arguments."""
        for _, name in self.tunables:
            if not hasattr(hyperparams, name):
                raise ValueError(
                    f"{self} needs the hyperparameter {name!r}, which {type(hyperparams).__name__} lacks: "
                    f"{advice_on(name, hyperparams)}"
                )
        return functools.partial(self.function, **{key: getattr(hyperparams, name) for key, name in self.tunables})

    def __repr__(self) -> str:
        tunables = (f'"{name}"' if key == name else f'{key}="{name}"' for key, name in self.tunables)
        return f"with_hyperparams({', '.join([function_name(self.function), *tunables])})"


def with_hyperparams(function: Callable, *names: str, **renamed: str) -> _WithHyperparams:
    """A function whose keyword arguments are hyperparameters, for any slot, and for the formula of `outcome`.

        with_hyperparams(f, "clip_low", tau="sapo_tau")(x, hyperparams)
            = f(x, clip_low=hyperparams.clip_low, tau=hyperparams.sapo_tau)

    Args:
      function: a function of the slot's other arguments, without `hyperparams`, and of keyword arguments, such as
        `clipped_surrogate`.
      names: keyword arguments that are hyperparameters of the same name.
      renamed: keyword arguments that are hyperparameters of another name.

    Raises:
      TypeError: the function has no such keyword argument.
    """
    tunables = {name: name for name in names} | renamed
    inspect.signature(function).bind_partial(**tunables)
    return _WithHyperparams(function, tuple(tunables.items()))


def bound(function: Callable, hyperparams: Hyperparams) -> Callable:
    """The function of a slot without its last argument, `hyperparams`: `with_hyperparams` knows which to pass."""
    return function.bind(hyperparams) if isinstance(function, _WithHyperparams) else function

"""The metrics of a rollout, and those of the slot `metrics`."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from grpo_jax.config import Config
from grpo_jax.errors import ConfigError, describe_arrays, function_name
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives.losses import explained_variance
from grpo_jax.objectives.reductions import mean_or_missing, missing
from grpo_jax.objectives.slots import episode_scores
from grpo_jax.types import Batch, Metrics, Trajectory


def rollout_metrics(config: Config, trajectory: Trajectory, batch: Batch) -> Metrics:
    """Scalars that summarise a rollout. An episode counts in the iteration in which it ends; NaN where none did."""
    episodes = jnp.stack([trajectory.episode_return, trajectory.episode_length.astype(jnp.float32)])
    ended = trajectory.ended
    count = jnp.sum(ended, dtype=jnp.float32)

    totals = jnp.sum(episodes, axis=(1, 2), where=ended)
    extremes = jnp.max(jnp.concatenate([episodes, -episodes]), axis=(1, 2), where=ended, initial=-jnp.inf)

    made = trajectory.valid
    if trajectory.diverged is not None:
        made = made | trajectory.diverged | config.algorithm.start.auto_reset
    metrics = {
        "environment/steps": config.trunk_steps + jnp.sum(made, dtype=jnp.int32),
        "episode/count": count,
        "advantage/abs_mean": mean_or_missing(jnp.abs(batch.advantage), batch.mask),
    }
    for i, name in enumerate(("episode/return", "episode/length")):
        values = {"mean": totals[i] / jnp.maximum(count, 1), "min": -extremes[2 + i], "max": extremes[i]}
        metrics |= {f"{name}_{key}": jnp.where(count > 0, value, missing()) for key, value in values.items()}
    if config.env.limit_terminates:
        metrics["episode/cut_fraction"] = mean_or_missing(trajectory.truncated.astype(jnp.float32), ended)
    if config.env.reward_names:
        parts = jnp.sum(trajectory.reward_parts.values, axis=0)  # [B, K]
        rewarded = trajectory.reward_parts.rewarded
        rewarded = jnp.ones(parts.shape, bool) if rewarded is None else jnp.any(rewarded, axis=0)
        for i, name in enumerate(config.env.reward_names):
            is_known = jnp.any(rewarded[:, i])
            counted = rewarded[:, i] | ~is_known  # no mean over nothing, for jax_debug_nans
            for word, mean in (("mean", jnp.mean), ("std", jnp.std)):
                metrics[f"reward/{name}_{word}"] = jnp.where(is_known, mean(parts[:, i], where=counted), missing())
    if config.env.host is not None and config.env.host.again is not None:
        valid, forced = trajectory.valid, trajectory.forced & trajectory.valid
        metrics["episode/turns_mean"] = 1 + jnp.mean(jnp.sum(forced[:-1] & ~forced[1:] & valid[1:], axis=0))
        metrics["episode/answers_fraction"] = mean_or_missing(forced.astype(jnp.float32), valid)
    if trajectory.diverged is not None:
        metrics["environment/invalid_resets"] = jnp.sum(trajectory.diverged).astype(jnp.float32)
    if config.group_size > 1:
        scores = episode_scores(trajectory, config.group_size)
        metrics["group/zero_variance_fraction"] = jnp.mean(jnp.all(scores == scores[:, :1], axis=1))
        metrics["group/score_std_mean"] = jnp.mean(jnp.std(scores, axis=1))
    if batch.value is not None:
        metrics["value/explained_variance"] = explained_variance(batch.value, batch.target, batch.mask)
    return metrics


def own_metrics(
    config: Config, trajectory: Trajectory, batch: Batch, hyperparams: Hyperparams, others: Metrics
) -> Metrics:
    """The metrics of the functions in the algorithm's slot `metrics`, in float32; `others` have their names already.

    Raises ConfigError for a function that gives no dict, or a name or a value that cannot be recorded.
    """
    metrics: Metrics = {}
    for function in config.algorithm.metrics:
        what = f"metrics={function_name(function)}"
        given = function(trajectory, batch, hyperparams)
        if not isinstance(given, Mapping):
            raise ConfigError(f'{what} gives {type(given).__name__}; return a dict such as {{"mine/name": scalar}}')
        for name, value in given.items():
            if not isinstance(name, str) or "/" not in name or name.startswith(("setting/", "evaluation/")):
                raise ConfigError(f'{what} gives the name {name!r}; use a prefix of your own, such as "mine/name"')
            if name in others or name in metrics:
                raise ConfigError(f'{what} gives {name!r}, but another metric has this name; use "mine/name"')
            if not _is_number(value):
                shown = describe_arrays(value) if hasattr(value, "dtype") else repr(value)
                raise ConfigError(f"{what} gives {name!r} as {shown}; return a scalar, such as jnp.mean(...)")
            metrics[name] = jnp.asarray(value, jnp.float32)
    return metrics


def _is_number(value: Any) -> bool:
    """Whether this is a real scalar, of Python or an array."""
    if isinstance(value, int | float):
        return True
    kinds = jnp.bool_, jnp.integer, jnp.floating
    return getattr(value, "shape", None) == () and any(jnp.issubdtype(value.dtype, kind) for kind in kinds)

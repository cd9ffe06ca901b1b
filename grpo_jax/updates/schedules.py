"""Schedules: the learning rate as a function of the fraction of training that is done."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.errors import ConfigError, function_name, nearest, user_code
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.importing import import_custom

DECAYS = {
    "constant": jnp.ones_like,
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + jnp.cos(jnp.pi * progress)) / 2,
}
"""The schedules with a name: from 1 at `learning_rate` to 0 at `final_learning_rate`, as functions of progress."""


def find_schedule(schedule: str | Callable) -> Callable:
    """The function of progress: by its name in `DECAYS` or its import path "package.module:name", or as it is given."""
    found = import_custom(schedule, "schedule")
    if isinstance(found, str) and found not in DECAYS:
        raise ConfigError(f"unknown schedule {found!r}: {nearest(found, DECAYS)}")
    found = DECAYS[found] if isinstance(found, str) else found
    if callable(found):
        return found
    raise ConfigError(f"schedule={found!r} is not a function of progress; use one, or {', '.join(map(repr, DECAYS))}")


def check_schedule(schedule: str | Callable) -> None:
    """Raises ConfigError for a function that is not a factor of at least 0 where training starts and ends."""
    if isinstance(schedule, str) and schedule in DECAYS:
        return
    function, what = find_schedule(schedule), f"schedule={function_name(schedule)}"
    advice = "; use a function such as optax.cosine_decay_schedule(1.0, 1)"
    with user_code(f"{what} fails for a traced progress", advice), jax.ensure_compile_time_eval():
        factors = np.asarray(jax.vmap(function)(jnp.array([0.0, 1.0])))
    is_real = factors.dtype.kind in "biuf" and factors.shape == (2,)
    if not is_real or not np.isfinite(factors).all() or not (factors >= 0).all():
        raise ConfigError(
            f"{what} must give a factor of learning_rate, a number of at least 0 for each progress in [0, 1], but for "
            f"0 and 1 it gives {factors.tolist()}"
        )


def scheduled_rate(schedule: str | Callable, hyperparams: Hyperparams, progress: jax.Array | float) -> jax.Array:
    """The learning rate at a progress, constant from progress 1 on.

    With `start` and `end` for `learning_rate` and `final_learning_rate`, and p for the progress after warm-up:

        end + (start - end) f(p),  where f(p) is  constant: 1,  linear: 1 - p,  cosine: (1 + cos(pi p)) / 2

    or a function, which is thus a factor of `learning_rate` as long as `final_learning_rate` is 0. During warm-up the
    rate rises linearly from 0 to `start`; p is then the fraction of the rest, (progress - warmup) / (1 - warmup).

    Args:
      schedule: as in `find_schedule`.
      hyperparams: `learning_rate`, `final_learning_rate` and `warmup`.
      progress: fraction of training that is done.
    """
    schedule, warmup = find_schedule(schedule), hyperparams.warmup
    start, end = hyperparams.learning_rate, hyperparams.final_learning_rate
    progress = warmed = jnp.minimum(progress, 1.0)
    if warmup is not None:
        warmed = jnp.maximum(progress - warmup, 0.0) / (1.0 - warmup)
    rate = end + (start - end) * jnp.asarray(schedule(warmed), jnp.float32)
    return rate if warmup is None else jnp.where(progress < warmup, start * progress / warmup, rate)

"""The hyperparameters: every number that training depends on, as one pytree of traced floats."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from grpo_jax.errors import ConfigError, KnownFields, nearest

_FLOAT32 = np.finfo(np.float32)


class Range(NamedTuple):
    """The numbers that a hyperparameter may be."""

    holds: Callable[[float, float], bool]  # (the least of all rows, the largest)
    otherwise: str  # what is wrong with another number


ANY = Range(lambda low, high: True, "")
SHARE = Range(lambda low, high: low >= 0 and high <= 1, "must be between 0 and 1")
BELOW_1 = Range(lambda low, high: low >= 0 and high < 1, "must be at least 0 and less than 1")
NOT_NEGATIVE = Range(lambda low, high: low >= 0, "is negative; use 0 or more")
# Divisors, and the limit of the gradient's norm: if it were 0, a gradient of 0 would be scaled by 0 / 0.
POSITIVE = Range(lambda low, high: low > 0, "must be more than 0; the default is {default}")


def at_least_1(otherwise: str) -> Range:
    """1 and more; `otherwise` says what is wrong with less."""
    return Range(lambda low, high: low >= 1, otherwise)


def number(default: float | None, allowed: Range = ANY, *, limit: bool = False) -> Any:
    """A hyperparameter.

    Args:
      default, allowed: the default, and the range.
      limit: it may be inf, for no limit; fields of a subclass that are not made by this function may be inf too.
    """
    return struct.field(default=default, metadata={"range": allowed, "limit": limit})


class Hyperparams(KnownFields, struct.PyTreeNode):
    """The float settings of an algorithm, each a traced leaf: sweep any of them under `vmap` without recompiling.

    Numbers of a single method are in a subclass beside its formula, such as `objectives.SapoHyperparams`, which the
    algorithm names in its field `hyperparams`. `Hyperparams(...)` can be given to every algorithm: the others then have
    their defaults. `run` refuses a number that is not the default although nothing reads it (`value_coef` without a
    critic, for example). A field left at None is not in the program at all. For a custom coefficient, subclass this and
    add a field with a default.
    """

    learning_rate: float = number(2.5e-3, NOT_NEGATIVE)
    """The optimiser's step size at the start of training, or after `warmup`."""
    final_learning_rate: float = number(0.0, NOT_NEGATIVE)
    """The optimiser's step size at the end of training; the schedule is in between."""
    warmup: float | None = number(None, BELOW_1)
    """Share of training over which the step size first rises from 0; None: no warm-up."""
    total_steps: float = number(500_000.0, NOT_NEGATIVE, limit=True)
    """The budget of environment steps: the learning rate decays over them, and `run` ends before the iteration that
    would exceed them, if it took as many as the last one; inf beside max_episodes: no limit."""
    num_iterations: float | None = number(None)
    """The budget in iterations, in place of total_steps, whatever their lengths; None: it is total_steps."""
    max_episodes: float | None = number(
        None, at_least_1("does not allow one iteration; leave it out for no limit"), limit=True
    )
    """A run also ends once this many episodes are complete, and the learning rate has decayed by then; None: no limit.
    """
    discount: float = number(0.99, SHARE)
    """Discount per step in GAE and returns-to-go. Outcome scores are not discounted."""
    gae_lambda: float = number(0.95, SHARE)
    """Trace of generalised advantage estimation: 0 is the one-step error, 1 is return minus value."""
    critic_lambda: float | None = number(None, SHARE)
    """Lambda of the critic's targets, as gae_lambda is of advantages (VAPO, https://arxiv.org/abs/2504.05118); None:
    targets are advantages plus values."""
    score_ddof: float = number(0.0, SHARE)
    """Scores are divided by their standard deviation: the population's for 0, the sample's, as in TRL, for 1."""
    score_eps: float = number(1e-6, POSITIVE)
    """Added to that deviation, in the units of the scores."""
    clip_low: float = number(0.2, NOT_NEGATIVE, limit=True)
    """The probability ratio is clipped from below at 1 - clip_low, so not at all with 1 or more."""
    clip_high: float = number(0.2, NOT_NEGATIVE, limit=True)
    """The probability ratio is clipped from above at 1 + clip_high."""
    value_clip: float = number(10.0, NOT_NEGATIVE, limit=True)
    """Largest change of a value prediction from the behaviour critic's, in units of return. Values below the scale of
    the returns slow the critic down."""
    value_coef: float = number(0.5)
    """Weight of the value loss."""
    entropy_coef: float = number(0.0)
    """Weight of the entropy bonus."""
    kl_coef: float = number(0.01)
    """Weight of the KL penalty, to the behaviour or the reference policy depending on the algorithm."""
    kl_target: float = number(0.01, POSITIVE)
    """KL in nats that an adaptive KL coefficient aims at; with off_policy_mask the limit of a sequence's mean."""
    kl_limit: float = number(math.inf, NOT_NEGATIVE, limit=True)
    """Once the mean KL to the behaviour policy exceeds this, the remaining updates of the iteration are skipped."""
    temperature: float = number(1.0, NOT_NEGATIVE)
    """Divides a transformer's logits, in rollouts and in updates; 0 takes the most probable token."""
    reward_clip: float = number(math.inf, NOT_NEGATIVE, limit=True)
    """Largest magnitude of a reward in training, after any normalisation; reported returns are never clipped."""
    max_grad_norm: float = number(0.5, POSITIVE, limit=True)
    """Gradients with a larger global norm are scaled down to it before any optimiser; inf: no limit."""
    adam_eps: float = number(1e-5, POSITIVE)
    """Floor added to the denominator of Adam and AdamW, and to Muon's."""
    beta1: float | None = number(None, BELOW_1)
    """Decay of the average of gradients, sgd's momentum; None: 0.9, with muon 0.95 for matrices, with sgd none."""
    beta2: float | None = number(None, BELOW_1)
    """Decay of the average of squared gradients; None: 0.999."""
    weight_decay: float | None = number(None, NOT_NEGATIVE)
    """A step subtracts this times the learning rate from each weight (adamw, muon; no biases); None: 1e-4, muon 0."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises ConfigError for a number without an annotation, of which no field would be made."""
        for name, value in vars(cls).items():
            if isinstance(value, int | float) and name not in cls.__annotations__ and name[:2] != "__":
                raise ConfigError(f"{cls.__name__}.{name} has no type, so is no field; write {name}: float = {value}")
        super().__init_subclass__(**options)

    def __post_init__(self):
        """Makes arrays of lists of numbers."""
        for name, value in vars(self).items():
            if isinstance(value, list) and value and all(isinstance(each, int | float) for each in value):
                object.__setattr__(self, name, np.array(value))

    def broadcast(self, num_rows: int) -> "Hyperparams":
        """Every leaf as a float32 array `[num_rows]`, for `vmap`; a scalar is repeated, an array `[num_rows]` stays."""
        return jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.asarray(leaf, jnp.float32), (num_rows,)), self)

    def check(self) -> None:
        """Raises ConfigError if a value of any row is invalid. Runs on the host; values that are traced are skipped."""
        values = {}
        for name, value in vars(self).items():
            default = self.__dataclass_fields__[name].default
            if value is None and default is not None:
                raise ConfigError(f"{name}=None is not a number; the default is {default}")
            if value is not None and not isinstance(value, jax.core.Tracer):
                values[name] = _numbers(name, value)
                self._check_range(name, np.min(values[name]), np.max(values[name]))
        endless = np.isinf(values.get("total_steps", 0)) & (self.num_iterations is None and self.max_episodes is None)
        if np.any((values.get("warmup", 0) > 0) & endless):
            raise ConfigError("warmup is a fraction of training, but total_steps=inf: it would not end; leave it out")

    def _check_range(self, name: str, low: float, high: float) -> None:
        field = self.__dataclass_fields__[name]
        if not field.metadata.get("limit", True) and np.isinf([low, high]).any():
            raise ConfigError(f"{name}={low if np.isinf(low) else high} must be finite")
        allowed = field.metadata.get("range", ANY)
        if not allowed.holds(low, high):
            wrong = high if allowed.holds(low, low) else low
            raise ConfigError(f"{name}={wrong} {allowed.otherwise.format(default=field.default)}")


def completed(hyperparams: Hyperparams, kind: type[Hyperparams]) -> Hyperparams:
    """The hyperparameters in a class with the fields of `kind` too; those that they lack have their defaults."""
    found = joined(type(hyperparams), kind)
    return hyperparams if found is type(hyperparams) else found(**vars(hyperparams))


@functools.cache
def joined(first: type[Hyperparams], second: type[Hyperparams]) -> type[Hyperparams]:
    """A class of hyperparameters with the fields of both; where one is derived from the other, that one."""
    if issubclass(first, second):
        return first
    if issubclass(second, first):
        return second
    return type(first.__name__, (first, second), {"__module__": first.__module__})


def advice_on(name: str, hyperparams: Hyperparams) -> str:
    """What to write where hyperparameters lack one that a slot reads."""
    if owner := KnownFields.owner(name):
        return f"it is of {owner.__name__}: algorithm._replace(hyperparams={owner.__name__})"
    return (
        f"{nearest(name, vars(hyperparams))}; for a number of your own write class Mine(Hyperparams): {name}: float = "
        "0.1, and algorithm._replace(hyperparams=Mine)"
    )


def _numbers(name: str, value: Any) -> np.ndarray:
    """The value of a field as float64; raises ConfigError unless float32, in which training computes, can hold it."""
    if isinstance(value, list | tuple):
        raise ConfigError(f"{name}={value!r} is not an array; for one value a row write jnp.array({list(value)})")
    numbers = np.asarray(value)
    if not (jnp.issubdtype(numbers.dtype, jnp.floating) or numbers.dtype.kind in "biu") or not numbers.size:
        raise ConfigError(f"{name}={value!r} is not a number or an array of numbers")
    numbers = numbers.astype(np.float64)
    if np.isnan(numbers).any():
        raise ConfigError(f"{name}=nan is not a number")
    size = np.abs(numbers)
    wrong = numbers[np.isfinite(size) & (size != 0) & ((size < _FLOAT32.tiny) | (size > _FLOAT32.max))]
    if wrong.size:
        near = "0" if abs(wrong[0]) < 1 else "inf"
        raise ConfigError(f"{name}={wrong[0]:g} is outside float32, in which training computes; it would become {near}")
    return numbers

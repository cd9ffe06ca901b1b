"""The hyperparameters: every number that training depends on, as one pytree of traced floats."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from grpo_jax.errors import ConfigError, KnownFields

_FLOAT32 = np.finfo(np.float32)


class _Range(NamedTuple):
    """The numbers that a hyperparameter may be."""

    holds: Callable[[float, float], bool]  # (the least of all rows, the largest)
    otherwise: str  # what is wrong with another number


_ANY = _Range(lambda low, high: True, "")
_SHARE = _Range(lambda low, high: low >= 0 and high <= 1, "must be between 0 and 1")
_BELOW_1 = _Range(lambda low, high: low >= 0 and high < 1, "must be at least 0 and less than 1")
_NOT_NEGATIVE = _Range(lambda low, high: low >= 0, "is negative; use 0 or more")
# Divisors, and the limit of the gradient's norm: if it were 0, a gradient of 0 would be scaled by 0 / 0.
_POSITIVE = _Range(lambda low, high: low > 0, "must be more than 0; the default is {default}")


def _at_least_1(otherwise: str) -> _Range:
    return _Range(lambda low, high: low >= 1, otherwise)


_EPISODES = _at_least_1("does not allow one iteration; leave it out for no limit")
_TOKENS = _at_least_1("leaves no token to sample; use 1 or more, or inf for all")
_DUAL_CLIP = _at_least_1(
    "would bound the surrogate where the policy has not changed; use more than 1 + clip_high, such as 3"
)


def _number(default: float | None, allowed: _Range = _ANY, *, limit: bool = False, reader: str = "") -> Any:
    """A hyperparameter.

    Args:
      default, allowed: the default, and the range.
      limit: it may be inf, which is none; so may fields of a subclass without a range.
      reader: what reads it, if few configs do: see `training.checks`.
    """
    return struct.field(default=default, metadata={"range": allowed, "limit": limit, "reader": reader})


@struct.dataclass
class Hyperparams(KnownFields):
    """The float settings of an algorithm, each a traced leaf: sweep any of them under `vmap` without recompiling.

    A hyperparameter that nothing in a config reads has no effect (`value_coef` without a critic, for example). `run`
    refuses to change a target, or a number of a single method such as `kernel_bandwidth`, where nothing reads it.
    A field left at None is not in the program at all. For a custom coefficient, subclass this and add a field with a
    default.
    """

    learning_rate: float = _number(2.5e-3, _NOT_NEGATIVE)
    """The optimiser's step size at the start of training, or after `warmup`."""
    final_learning_rate: float = _number(0.0, _NOT_NEGATIVE)
    """The optimiser's step size at the end of training; the schedule is in between."""
    critic_learning_rate: float | None = _number(None, _NOT_NEGATIVE)
    """Step size of the critic's parameters, on the same schedule; None: learning_rate."""
    desired_kl: float = _number(0.01, _POSITIVE, reader='Config(schedule="adaptive_kl")')
    """KL in nats to the behaviour policy that the learning rate follows with schedule="adaptive_kl"."""
    warmup: float | None = _number(None, _BELOW_1)
    """Share of training over which the step sizes first rise from 0; None: no warm-up."""
    total_steps: float = _number(500_000.0, _NOT_NEGATIVE, limit=True)
    """The budget of environment steps: the learning rate decays over them, and `run` ends before the iteration that
    would exceed them, if it took as many as the last one; inf beside max_episodes: no limit."""
    num_iterations: float | None = _number(None)
    """The budget in iterations, in place of total_steps, whatever their lengths; None: it is total_steps."""
    max_episodes: float | None = _number(None, _EPISODES, limit=True)
    """A run also ends once this many episodes are complete, and the learning rate has decayed by then; None: no limit.
    """
    discount: float = _number(0.99, _SHARE)
    """Discount per step in GAE and returns-to-go. Outcome scores are not discounted."""
    gae_lambda: float = _number(0.95, _SHARE)
    """Trace of generalised advantage estimation: 0 is the one-step error, 1 is return minus value."""
    kernel_bandwidth: float = _number(0.2, _NOT_NEGATIVE, reader="an algorithm with kernel_baseline()")
    """Squared distance of two states, relative to the mean one, at which a kernel baseline's weight falls to 1/e."""
    clip_low: float = _number(0.2, _NOT_NEGATIVE, limit=True)
    """The probability ratio is clipped from below at 1 - clip_low, so not at all with 1 or more; by gmpo at
    exp(-clip_low)."""
    clip_high: float = _number(0.2, _NOT_NEGATIVE, limit=True)
    """The probability ratio is clipped from above at 1 + clip_high."""
    value_clip: float = _number(10.0, _NOT_NEGATIVE, limit=True)
    """Largest change of a value prediction from the behaviour critic's, in units of return. Values below the scale of
    the returns slow the critic down."""
    value_coef: float = _number(0.5)
    """Weight of the value loss."""
    entropy_coef: float = _number(0.0)
    """Weight of the entropy bonus."""
    entropy_target: float = _number(0.2, reader="an algorithm with an entropy_controller")
    """Entropy in nats that an adaptive entropy bonus holds; above it there is no bonus."""
    kl_coef: float = _number(0.01)
    """Weight of the KL penalty, to the behaviour or the reference policy depending on the algorithm."""
    kl_target: float = _number(0.01, _POSITIVE, reader="an algorithm with a kl_controller, or off_policy_mask")
    """KL in nats that an adaptive KL coefficient aims at; with off_policy_mask the limit of a sequence's mean."""
    kl_limit: float = _number(math.inf, _NOT_NEGATIVE, limit=True)
    """Once the mean KL to the behaviour policy exceeds this, the remaining updates of the iteration are skipped."""
    reference_interval: float = _number(10.0, _POSITIVE, reader="with_reference(algorithm, refreshed_reference)")
    """Iterations between two refreshes of a refreshed reference policy."""
    reference_decay: float = _number(0.99, _SHARE, reader="with_reference(algorithm, averaged_reference)")
    """Decay per iteration of an averaged reference policy."""
    dual_clip: float = _number(3.0, _DUAL_CLIP, reader="two_sided_clip")
    """Bound of a dual-clipped surrogate, in units of a negative advantage."""
    sapo_tau_positive: float = _number(1.0, _POSITIVE, reader="sapo")
    """Temperature of SAPO's sigmoid where the advantage is positive."""
    sapo_tau_negative: float = _number(1.05, _POSITIVE, reader="sapo")
    """Temperature of SAPO's sigmoid where the advantage is negative."""
    covariance_fraction: float = _number(0.002, _SHARE, reader="clip_cov or kl_cov")
    """Share of the steps that Clip-Cov and KL-Cov select."""
    covariance_kl_coef: float = _number(1.0, reader="kl_cov")
    """Weight of KL-Cov's penalty on the steps it selects."""
    step_advantage_coef: float = _number(1.0, reader="gigpo")
    """Weight of GiGPO's comparison of steps in the same state, beside that of whole rollouts."""
    temperature: float = _number(1.0, _NOT_NEGATIVE, reader="a transformer")
    """Divides a transformer's logits, in rollouts and in updates; 0 takes the most probable token."""
    top_k: float = _number(math.inf, _TOKENS, limit=True)
    """Number of most probable tokens that may be sampled (with `truncate_sampling`)."""
    top_p: float = _number(1.0, _SHARE)
    """Least total probability of the most probable tokens that may be sampled (with `truncate_sampling`)."""
    min_p: float = _number(0.0, _SHARE)
    """Least probability of a sampled token, relative to the most probable one (with `truncate_sampling`)."""
    observation_clip: float = _number(10.0, _NOT_NEGATIVE, limit=True, reader="Config(normalize_observations=True)")
    """Largest magnitude of a normalised observation."""
    reward_clip: float = _number(math.inf, _NOT_NEGATIVE, limit=True)
    """Largest magnitude of a reward in training, after any normalisation; reported returns are never clipped."""
    max_grad_norm: float = _number(0.5, _POSITIVE, limit=True)
    """Gradients with a larger global norm are scaled down to it before any optimiser; inf: no limit."""
    adam_eps: float = _number(1e-5, _POSITIVE)
    """Floor added to the denominator of Adam, AdamW and RMSprop, and to Muon's."""
    beta1: float | None = _number(None, _BELOW_1)
    """Decay of the average of gradients, sgd's momentum; None: 0.9, with muon 0.95 for matrices, with sgd none."""
    beta2: float | None = _number(None, _BELOW_1)
    """Decay of the average of squared gradients; None: 0.999, with rmsprop 0.9."""
    weight_decay: float | None = _number(None, _NOT_NEGATIVE)
    """A step subtracts this times the learning rate from each weight (adamw, muon; no biases); None: 1e-4, muon 0."""

    def __post_init__(self):
        """Makes arrays of lists of numbers."""
        for name, value in vars(self).items():
            if isinstance(value, list) and value and all(isinstance(each, int | float) for each in value):
                object.__setattr__(self, name, np.array(value))

    if TYPE_CHECKING:  # flax's decorator defines it, which type checkers do not see

        def replace(self, **changes: Any) -> Self:
            """A copy with other values of these fields."""

    @property
    def truncates_sampling(self) -> bool:
        """Whether top_k, top_p or min_p of any row leave out tokens."""
        return bool(np.min(self.top_k) < math.inf or np.min(self.top_p) < 1 or np.max(self.min_p) > 0)

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
        allowed = field.metadata.get("range", _ANY)
        if not allowed.holds(low, high):
            wrong = high if allowed.holds(low, low) else low
            raise ConfigError(f"{name}={wrong} {allowed.otherwise.format(default=field.default)}")


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
        raise ConfigError(
            f"{name}={wrong[0]:g} is outside of float32, in which training computes; it would become {near}"
        )
    return numbers

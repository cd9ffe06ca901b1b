"""Every number an update depends on, as one pytree of traced floats."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from grpo_jax.errors import ConfigError

_SHARES = ("discount", "gae_lambda", "reference_decay", "covariance_fraction", "top_p")
_NOT_NEGATIVE = (
    *("learning_rate", "final_learning_rate", "clip_low", "clip_high", "value_clip", "kl_limit"),
    *("observation_clip", "reward_clip", "temperature", "kernel_bandwidth"),
)
# What something is divided by, and what limits a norm that may itself be 0.
_POSITIVE = (
    *("kl_target", "reference_interval", "sapo_tau_positive", "sapo_tau_negative", "adam_eps", "max_grad_norm"),
)


@struct.dataclass
class Hyperparams:
    """Floats of an algorithm. Each is a traced leaf: sweep any of them under `vmap`, none triggers a compile.

    What a slot of the algorithm does not read has no effect (`value_coef` without a critic, say). A variant with a
    coefficient of its own subclasses this, adding a field with a default.
    """

    learning_rate: float = 2.5e-3
    """Adam's step size at the start of training."""
    final_learning_rate: float = 0.0
    """Adam's step size when `total_steps` are spent, linear in between."""
    total_steps: float = 500_000.0
    """Environment steps that training may take: the horizon of the decay, and where `run` stops; inf has no decay."""
    discount: float = 0.99
    """Discount per step, of GAE and of returns-to-go. Outcome scores are not discounted."""
    gae_lambda: float = 0.95
    """Trace of generalised advantage estimation: 0 is the one-step error, 1 is return minus value."""
    kernel_bandwidth: float = 0.2
    """Squared distance of two states, in units of the mean one, at which a kernel baseline's weight falls to 1/e."""
    clip_low: float = 0.2
    """The probability ratio is clipped from below at 1 - clip_low."""
    clip_high: float = 0.2
    """The probability ratio is clipped from above at 1 + clip_high."""
    value_clip: float = 10.0
    """Largest move of a value prediction away from the behaviour critic's, in units of return: below the scale of the
    returns it slows the critic down."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    kl_coef: float = 0.01
    """Weight of the KL penalty (to the behaviour or to the reference policy: the algorithm says which)."""
    kl_target: float = 0.01
    """KL that an adaptive coefficient holds, in nats."""
    kl_limit: float = math.inf
    """Once the mean KL to the behaviour policy exceeds it, the remaining updates of an iteration are left out."""
    reference_interval: float = 10.0
    """Iterations between two refreshes of a reference policy that is refreshed."""
    reference_decay: float = 0.99
    """Share of itself that an averaged reference policy keeps per iteration."""
    dual_clip: float = 3.0
    """Bound of a dual-clipped surrogate, in units of a negative advantage."""
    sapo_tau_positive: float = 1.0
    """Temperature of SAPO's sigmoid where the advantage is positive."""
    sapo_tau_negative: float = 1.05
    """Temperature of SAPO's sigmoid where the advantage is negative."""
    covariance_fraction: float = 0.002
    """Share of the steps that Clip-Cov and KL-Cov select."""
    covariance_kl_coef: float = 1.0
    """Weight of KL-Cov's penalty on the steps it selects."""
    temperature: float = 1.0
    """A transformer's logits are divided by it, in rollouts and in updates; 0 takes the most probable token."""
    top_k: float = math.inf
    """Tokens that may be sampled, at most, of the most probable ones (with `truncate_sampling`)."""
    top_p: float = 1.0
    """Probability that the tokens that may be sampled have between them, at least (with `truncate_sampling`)."""
    observation_clip: float = 10.0
    """Largest magnitude of a normalised observation."""
    reward_clip: float = math.inf
    """Largest magnitude of a reward that is learnt from, after any scaling; reported returns are never clipped."""
    max_grad_norm: float = 0.5
    """Gradients with a larger global norm are scaled down to it."""
    adam_eps: float = 1e-5
    """Floor added to Adam's denominator."""

    def broadcast(self, num_rows: int) -> "Hyperparams":
        """Each leaf as a float32 array `[num_rows]`, ready for `vmap`; leaves that already are `[num_rows]` stay."""
        return jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.asarray(leaf, jnp.float32), (num_rows,)), self)

    def check(self) -> None:
        """On the host. Raises ConfigError for a value, of any row, that no run can mean."""
        for name, value in vars(self).items():
            low, high = np.min(value), np.max(value)
            if np.isnan(low):
                raise ConfigError(f"{name}={low} is not a number")
            if name in _SHARES and not 0 <= low <= high <= 1:
                raise ConfigError(f"{name}={low if low < 0 else high} must be between 0 and 1")
            if name in _NOT_NEGATIVE and low < 0:
                raise ConfigError(f"{name}={low} is negative; use 0 or more")
            if name in _POSITIVE and low <= 0:
                raise ConfigError(f"{name}={low} must be more than 0; the default is {getattr(type(self), name)}")
            if name == "top_k" and low < 1:
                raise ConfigError(f"top_k={low} leaves no token to sample; use 1 or more, or inf for all")

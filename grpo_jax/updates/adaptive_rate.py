"""A learning rate that follows the KL to the behaviour policy, from update to update."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.config import Config
from grpo_jax.errors import ConfigError
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.types import Metrics, PyTree
from grpo_jax.updates.optimizers import make_optimizer
from grpo_jax.updates.schedules import ADAPTIVE_KL, LearningRates, learning_rates


class AdaptiveState(NamedTuple):
    """The state of an optimiser whose learning rates follow the KL."""

    rates: LearningRates
    state: Any  # of the optimiser


def rate_for_kl(
    rate: jax.Array, kl: jax.Array, *, target: float, low: float = 1e-5, high: float = 1e-2, factor: float = 1.5
) -> jax.Array:
    """The next learning rate: lower where the KL is above twice its target, higher where it is below half of it.

        max(rate / factor, low)  if kl > 2 target;   min(rate factor, high)  if 0 < kl < target / 2

    rsl_rl's and brax's rule (https://arxiv.org/abs/2109.11978). A rate that is outside of the bounds moves only
    towards them, so that 0 stays 0.

    Args:
      rate: scalar, at least 0.
      kl: scalar, in nats; one that is 0, negative by rounding or not finite leaves the rate unchanged.
      target: the KL to hold, in nats, > 0.
      low, high: bounds of the rate.
      factor: of the change, > 1.
    """
    lower = jnp.maximum(rate / factor, jnp.minimum(low, rate))
    higher = jnp.minimum(rate * factor, jnp.maximum(high, rate))
    new = jnp.where(kl > 2 * target, lower, jnp.where((kl > 0) & (kl < target / 2), higher, rate))
    return jnp.where(jnp.isfinite(kl), new, rate)


def scheduled_optimizer(
    config: Config, hyperparams: Hyperparams, progress: jax.Array | float
) -> tuple[optax.GradientTransformation, LearningRates]:
    """The optimiser of an iteration and its learning rates, with `schedule="adaptive_kl"` those of the first iteration.

    Raises:
      ConfigError: as `make_optimizer` does, and for a learning rate that follows the KL with a warm-up, or with one
        update in an iteration, whose KL is 0.
    """
    rates = learning_rates(config.schedule, hyperparams, progress)

    def make(rates: LearningRates) -> optax.GradientTransformation:
        return make_optimizer(config.optimizer, hyperparams, rates, config.moments_dtype)

    if config.schedule != ADAPTIVE_KL:
        return make(rates), rates
    if hyperparams.warmup is not None:
        raise ConfigError(f"warmup has no effect with schedule={ADAPTIVE_KL!r}; leave it out, or use another schedule")
    if config.num_epochs * config.num_minibatches == 1:
        raise ConfigError(
            f"schedule={ADAPTIVE_KL!r} has no effect with num_epochs=1 and num_minibatches=1, as the one update of an "
            "iteration starts from the behaviour policy; raise one of them, or use another schedule"
        )
    return _adaptive(make, rates), rates


def _adaptive(
    make: Callable[[LearningRates], optax.GradientTransformation], start: LearningRates
) -> optax.GradientTransformation:
    """The optimiser with the learning rates of its state."""
    optimizer = make(start)

    def update(gradient: PyTree, state: AdaptiveState, params: PyTree = None) -> tuple[PyTree, AdaptiveState]:
        steps, inner = make(state.rates).update(gradient, state.state, params)
        return steps, AdaptiveState(state.rates, inner)

    # Of the same class: one that works on one vector says so by it (`make_flattening`).
    return type(optimizer)(lambda params: AdaptiveState(start, optimizer.init(params)), update)


def follow_kl(opt_state: Any, kl: jax.Array, hyperparams: Hyperparams) -> Any:
    """The state of the optimiser after a KL was measured; one whose rates are fixed is unchanged.

    The critic's rate keeps its ratio to the default one.
    """
    if not isinstance(opt_state, AdaptiveState):
        return opt_state
    old = opt_state.rates
    new = rate_for_kl(old.default, kl, target=hyperparams.kl_target)
    change = jnp.where(old.default > 0, new / jnp.where(old.default > 0, old.default, 1.0), 1.0)
    critic = None if old.critic is None else old.critic * change
    return opt_state._replace(rates=LearningRates(new, critic))


def rate_metrics(opt_state: Any) -> Metrics:
    """The learning rates of an update, if they follow the KL."""
    return opt_state.rates.metrics() if isinstance(opt_state, AdaptiveState) else {}

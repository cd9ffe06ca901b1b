"""The optimiser and the schedule on shapes only: what cannot train the policy is an error before training."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.descriptions import are_alike, describe_arrays, describe_function
from grpo_jax.config.dry_run import AnyHyperparams
from grpo_jax.config.fields import Fields
from grpo_jax.errors import ConfigError
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.policies import partition
from grpo_jax.policies.architecture import DTYPES
from grpo_jax.types import PyTree
from grpo_jax.updates.optimizers import OPTIMIZERS, find_optimizer, make_optimizer
from grpo_jax.updates.schedules import DECAYS, LearningRates, find_schedule


def check_optimizer(config: Fields) -> None:
    """Raises ConfigError for an optimiser that cannot update the policy, or a schedule that gives no learning rate."""
    if config.schedule not in DECAYS:
        _check_schedule(config.schedule)
    if config.moments_dtype not in DTYPES:
        raise ConfigError(f"moments_dtype={config.moments_dtype!r}; use one of {', '.join(DTYPES)}")
    make = find_optimizer(config.optimizer)
    if make is OPTIMIZERS["muon"]:
        shapes = [leaf.shape for leaf in jax.tree.leaves(_params(config))]
        if not any(len(shape) == 2 for shape in shapes):
            raise ConfigError(
                f"optimizer='muon' is for matrices, but the policy's parameters have the shapes {shapes}; use 'adam'"
            )
    elif make not in OPTIMIZERS.values():
        numbers = [name for name in Hyperparams.__dataclass_fields__ if name != "critic_learning_rate"]
        _check_update(config, lambda number: AnyHyperparams(**dict.fromkeys(numbers, number)))


def check_hyperparams(config: Fields, hyperparams: Hyperparams) -> None:
    """Raises ConfigError if hyperparameters are set, or left out, that do not fit the optimiser or the policy."""
    _check_update(config, lambda number: jax.tree.map(lambda _: number, hyperparams))


def _params(config: Fields) -> PyTree:
    """Shapes of the parameters that are trained."""
    return partition(config.policy, jax.eval_shape(config.policy.init, jax.random.key(0)))[0]


def _check_schedule(schedule: str | Callable) -> None:
    function, what = find_schedule(schedule), describe_function("schedule", schedule)
    try:
        factors = np.asarray(jax.vmap(function)(jnp.array([0.0, 1.0])))
    except Exception as error:  # the user's own code
        raise ConfigError(
            f"{what} fails for a traced progress: {_first_line(error)}; use a function such as "
            "optax.cosine_decay_schedule(1.0, 1)"
        ) from error
    is_real = factors.dtype.kind in "biuf" and factors.shape == (2,)
    if not is_real or not np.isfinite(factors).all() or not (factors >= 0).all():
        raise ConfigError(
            f"{what} must give a factor of learning_rate, a number of at least 0 for each progress in [0, 1], but for "
            f"0 and 1 it gives {factors.tolist()}"
        )


def _check_update(config: Fields, make_hyperparams: Callable[[jax.Array], Hyperparams]) -> None:
    """Makes the optimiser and an update, as a train step does."""
    what = describe_function("optimizer", config.optimizer)

    def update(params, number):
        hyperparams = make_hyperparams(number)
        rates = LearningRates(number, hyperparams.critic_learning_rate)
        optimizer = make_optimizer(config.optimizer, hyperparams, rates, config.moments_dtype)
        state = optimizer.init(params)
        for leaf in jax.tree.leaves(state):
            if not isinstance(leaf, jax.Array | np.ndarray):
                raise ConfigError(
                    f"{what} has {leaf!r} of type {type(leaf).__name__} in its state, but only arrays can be saved and "
                    "vmapped; use one, such as jnp.zeros(())"
                )
        return state, *optimizer.update(params, state, params)

    params = _params(config)
    try:
        state, steps, after = jax.eval_shape(update, params, jnp.zeros((), jnp.float32))
    except ConfigError:
        raise
    except Exception as error:  # the user's own code
        raise ConfigError(
            f"{what} cannot update the policy's parameters: {_first_line(error)}. It gets traced (hyperparams, "
            "learning_rate), where hyperparameters that are not set may be None, and its update gets (gradient, state, "
            "parameters), without the loss that a line search needs; write for example "
            "lambda hyperparams, learning_rate: optax.lion(learning_rate)"
        ) from error
    for part, before, result in (("steps", params, steps), ("a state", state, after)):
        if not are_alike(before, result):
            raise ConfigError(
                f"{what} gives {part} of {describe_arrays(result)}, but an update must keep the structure, shapes and "
                f"dtypes {describe_arrays(before)}"
            )


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")

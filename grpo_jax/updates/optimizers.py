"""Optimisers: functions `(hyperparams, learning_rate) -> optax.GradientTransformation`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from grpo_jax.config_checks import check_name
from grpo_jax.errors import ConfigError, are_alike, describe_arrays, describe_function, first_line
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.importing import import_custom, is_custom
from grpo_jax.types import PyTree, by_path
from grpo_jax.updates.flattening import Elementwise
from grpo_jax.updates.half_precision import half_precision
from grpo_jax.updates.schedules import LearningRates

CRITIC = "critic"
"""The key of the critic's parameters: a top-level one, or one at any depth in a custom network."""


def adam(hyperparams: Hyperparams, learning_rate: jax.Array) -> optax.GradientTransformation:
    """Adam (https://arxiv.org/abs/1412.6980)."""
    return optax.adam(learning_rate, eps=hyperparams.adam_eps, **_adam_betas(hyperparams))


def adamw(hyperparams: Hyperparams, learning_rate: jax.Array) -> optax.GradientTransformation:
    """Adam with decoupled weight decay of matrices (https://arxiv.org/abs/1711.05101)."""
    options = _adam_betas(hyperparams) | _set(weight_decay=hyperparams.weight_decay)
    return optax.adamw(learning_rate, eps=hyperparams.adam_eps, mask=_matrices, **options)


def sgd(hyperparams: Hyperparams, learning_rate: jax.Array) -> optax.GradientTransformation:
    """Gradient descent, with momentum if `beta1` is set: m = g + beta1 m."""
    return optax.sgd(learning_rate, momentum=hyperparams.beta1)


def rmsprop(hyperparams: Hyperparams, learning_rate: jax.Array) -> optax.GradientTransformation:
    """RMSprop: g / (sqrt(v) + adam_eps), where v = beta2 v + (1 - beta2) g^2 starts from 0."""
    options = _set(decay=hyperparams.beta2)
    return optax.rmsprop(learning_rate, eps=hyperparams.adam_eps, eps_in_sqrt=False, **options)


def muon(hyperparams: Hyperparams, learning_rate: jax.Array) -> optax.GradientTransformation:
    """Momentum orthogonalised by Newton-Schulz for matrices (https://arxiv.org/abs/2502.16982), Adam for the rest."""
    options = _set(beta=hyperparams.beta1, weight_decay=hyperparams.weight_decay)
    options |= {f"adam_{name}": value for name, value in _adam_betas(hyperparams).items()}
    transformation = optax.contrib.muon(learning_rate, eps=hyperparams.adam_eps, **options)

    def init(params):
        shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
        if not any(len(shape) == 2 for shape in shapes):
            raise ConfigError(
                f"optimizer='muon' is for matrices, but the policy's parameters have the shapes {shapes}; use 'adam'"
            )
        return transformation.init(params)

    return transformation._replace(init=init)


class _Named(NamedTuple):
    make: Callable
    reads: tuple[str, ...]  # of `_OPTIONAL`
    is_elementwise: bool = True


_OPTIONAL = ("weight_decay", "beta1", "beta2")
_NAMED = {
    "adam": _Named(adam, ("beta1", "beta2")),
    "adamw": _Named(adamw, _OPTIONAL, is_elementwise=False),  # its decay depends on the number of dimensions
    "sgd": _Named(sgd, ("beta1",)),
    "rmsprop": _Named(rmsprop, ("beta2",)),
    "muon": _Named(muon, _OPTIONAL, is_elementwise=False),
}
OPTIMIZERS = {name: named.make for name, named in _NAMED.items()}
"""The optimisers by name."""


def find_optimizer(optimizer: str | Callable) -> Callable:
    """A function `(hyperparams, learning_rate) -> optax.GradientTransformation`.

    Args:
      optimizer: a name in `OPTIMIZERS`, an import path "package.module:name" of such a function, or the function.

    Raises:
      ConfigError: for an unknown name, or a value that is not a function.
    """
    check_name("optimizer", optimizer)
    found = import_custom(optimizer, "optimizer") if is_custom(optimizer) else OPTIMIZERS[optimizer]
    if not callable(found):
        raise ConfigError(
            f"optimizer is a {type(found).__name__}, but the learning rate changes during training; use a function "
            "such as lambda hyperparams, learning_rate: optax.adam(learning_rate)"
        )
    return found


def make_optimizer(
    optimizer: str | Callable, hyperparams: Hyperparams, rates: LearningRates, moments_dtype: str = "float32"
) -> optax.GradientTransformation:
    """An optimiser behind a limit on the gradient's global norm. Rebuilt in each step, as its settings are traced.

    Args:
      optimizer: as in `find_optimizer`.
      hyperparams: `max_grad_norm`, where inf is no limit, and what the optimiser reads.
      rates: with a critic's rate, the parameters under a key "critic" have a separate optimiser.
      moments_dtype: "float32", or "bfloat16" as in `half_precision`.

    Raises:
      ConfigError: a hyperparameter is set that the optimiser of this name does not read, or a function gives something
        else. In `init`, if the critic has a rate, but the parameters have no such key. In `init` and `update` of a
        custom optimiser, if it fails, or changes structures, shapes or dtypes.
    """
    make, named = find_optimizer(optimizer), _NAMED.get(optimizer) if isinstance(optimizer, str) else None
    if named is not None:
        _check_reads(optimizer, named, hyperparams)
    else:
        make = functools.partial(_make_own, make, describe_function("optimizer", optimizer))
    transformation = make(hyperparams, rates.default)
    if rates.critic is not None:
        parts = {CRITIC: make(hyperparams, rates.critic), "others": transformation}
        transformation = optax.partition(parts, _label_critic)
    clipped = optax.chain(_clip_by_global_norm(hyperparams.max_grad_norm), transformation)
    if moments_dtype == "bfloat16":
        return half_precision(clipped)
    is_elementwise = named is not None and named.is_elementwise and rates.critic is None
    return Elementwise(*clipped) if is_elementwise else clipped


def _clip_by_global_norm(max_norm: jax.Array) -> optax.GradientTransformation:
    """As optax's, without its 0 / 0 for a gradient of 0, at which `jax_debug_nans` would stop."""

    def update(gradient, state, params=None):
        norm = optax.global_norm(gradient)
        is_small = norm < max_norm
        divisor, factor = jnp.where(is_small, 1.0, norm), jnp.where(is_small, 1.0, max_norm)

        def clipped(leaf):
            return jnp.where(is_small, leaf, leaf / divisor.astype(leaf.dtype) * factor.astype(leaf.dtype))

        return jax.tree.map(clipped, gradient), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _make_own(
    make: Callable, what: str, hyperparams: Hyperparams, learning_rate: jax.Array
) -> optax.GradientTransformation:
    """A custom transformation that raises ConfigError wherever it does not fit the parameters."""
    transformation = _call(what, make, hyperparams, learning_rate)
    if not isinstance(transformation, optax.GradientTransformation):
        raise ConfigError(
            f"optimizer gives a {type(transformation).__name__}, but it must give an optax.GradientTransformation, "
            "such as optax.adam(learning_rate)"
        )

    def init(params):
        state = _call(what, transformation.init, params)
        for leaf in jax.tree.leaves(state):
            if not isinstance(leaf, jax.Array | np.ndarray):
                raise ConfigError(
                    f"{what} has {leaf!r} of type {type(leaf).__name__} in its state, but only arrays can be saved and "
                    "vmapped; use one, such as jnp.zeros(())"
                )
        return state

    def update(gradient, state, params=None):
        steps, after = _call(what, transformation.update, gradient, state, params)
        for part, before, result in (("steps", gradient, steps), ("a state", state, after)):
            if not are_alike(before, result):
                raise ConfigError(
                    f"{what} gives {part} of {describe_arrays(result)}, but an update must keep the structure, shapes "
                    f"and dtypes {describe_arrays(before)}"
                )
        return steps, after

    return optax.GradientTransformation(init, update)


def _call(what: str, function: Callable, *arguments: PyTree) -> Any:
    """The result of custom code; any error in it is a ConfigError."""
    try:
        return function(*arguments)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what} cannot update the policy's parameters: {first_line(error)}. It gets traced (hyperparams, "
            "learning_rate), where hyperparameters that are not set may be None, and its update gets (gradient, state, "
            "parameters), without the loss that a line search needs; write for example "
            "lambda hyperparams, learning_rate: optax.lion(learning_rate)"
        ) from error


def _check_reads(name: str, named: _Named, hyperparams: Hyperparams) -> None:
    for field in _OPTIONAL:
        if getattr(hyperparams, field) is not None and field not in named.reads:
            readers = " or ".join(repr(other) for other, (_, reads, _) in _NAMED.items() if field in reads)
            raise ConfigError(f"{field} has no effect with optimizer={name!r}; leave it out, or use {readers}")


def _label_critic(params: PyTree) -> PyTree:
    """ "critic" for each parameter under that key, and "others" for the rest."""

    def label(path, _):
        return CRITIC if CRITIC in _keys(path) else "others"

    labels = jax.tree_util.tree_map_with_path(label, params)
    if CRITIC not in jax.tree.leaves(labels):
        paths = list(by_path(params))
        shown = ", ".join(paths[:3]) + ", ..." * (len(paths) > 3)
        raise ConfigError(
            f"critic_learning_rate is for parameters under a key {CRITIC!r}, but the policy's parameters are {shown}; "
            "leave it out, or use an algorithm with a critic and shared_critic=False, or in a custom network give "
            f"the critic's part the name {CRITIC!r}"
        )
    return labels


def _keys(path: tuple) -> list[str]:
    return [jax.tree_util.keystr((key,), simple=True) for key in path]


def _matrices(params: PyTree) -> PyTree:
    """Which parameters have weight decay: matrices and larger ones, so no biases, scales or free parameters."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def _adam_betas(hyperparams: Hyperparams) -> dict[str, jax.Array]:
    return _set(b1=hyperparams.beta1, b2=hyperparams.beta2)


def _set(**options) -> dict[str, jax.Array]:
    """The options that are not None; for the others, optax has defaults."""
    return {name: value for name, value in options.items() if value is not None}

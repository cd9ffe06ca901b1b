"""Optimisers: functions `(hyperparams, learning_rate) -> optax.GradientTransformation`, and that of a config."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.flatten_util import ravel_pytree

from grpo_jax.config import Config
from grpo_jax.errors import ConfigError, are_alike, describe_arrays, function_name, nearest, user_code
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.importing import import_custom, is_custom
from grpo_jax.types import PyTree


def adam(hyperparams: Hyperparams, learning_rate: jax.Array) -> optax.GradientTransformation:
    """Adam (https://arxiv.org/abs/1412.6980)."""
    return optax.adam(learning_rate, eps=hyperparams.adam_eps, **_adam_betas(hyperparams))


def adamw(hyperparams: Hyperparams, learning_rate: jax.Array) -> optax.GradientTransformation:
    """Adam with decoupled weight decay of matrices (https://arxiv.org/abs/1711.05101)."""
    options = _adam_betas(hyperparams) | _set(weight_decay=hyperparams.weight_decay)

    def decays(params):  # no biases, scales or free parameters
        return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)

    return optax.adamw(learning_rate, eps=hyperparams.adam_eps, mask=decays, **options)


def sgd(hyperparams: Hyperparams, learning_rate: jax.Array) -> optax.GradientTransformation:
    """Gradient descent, with momentum if `beta1` is set: m = g + beta1 m."""
    return optax.sgd(learning_rate, momentum=hyperparams.beta1)


def muon(hyperparams: Hyperparams, learning_rate: jax.Array) -> optax.GradientTransformation:
    """Momentum orthogonalised by Newton-Schulz for matrices (https://arxiv.org/abs/2502.16982), Adam for the rest."""
    options = _set(beta=hyperparams.beta1, weight_decay=hyperparams.weight_decay)
    options |= {f"adam_{name}": value for name, value in _adam_betas(hyperparams).items()}
    return optax.contrib.muon(learning_rate, eps=hyperparams.adam_eps, **options)


OPTIMIZERS = {"adam": adam, "adamw": adamw, "sgd": sgd, "muon": muon}
"""The optimisers by name."""
_ELEMENTWISE = ("adam", "sgd")  # the decay of adamw depends on the number of dimensions

MAX_FLAT_PARAMETERS = 2**20
"""The most parameters of one dtype that are copied into one vector.

A vector is quick to compile: PPO in 7.0 s, as a tree of twelve arrays in 8.0 (one CPU core). With many seeds it costs
time on a GPU: 2,048 of them trained 1.15 times as fast without it on an H200, which was equal at other sizes.
"""


def make_flattening(config: Config, params: PyTree) -> tuple[Callable, Callable]:
    """`flatten` makes the tree that the optimiser of a config works on of parameters; `unflatten` is its inverse.

    One vector, if the optimiser is the same function of each element and of norms of all: fewer kernels. Otherwise, or
    for many parameters or several dtypes, the tree itself.
    """
    leaves = jax.tree.leaves(params)
    is_small = sum(leaf.size for leaf in leaves) <= MAX_FLAT_PARAMETERS and len({leaf.dtype for leaf in leaves}) == 1
    if config.optimizer in _ELEMENTWISE and is_small:
        return lambda tree: ravel_pytree(tree)[0], ravel_pytree(params)[1]
    return (lambda tree: tree), (lambda tree: tree)


def make_optimizer(
    optimizer: str | Callable, hyperparams: Hyperparams, learning_rate: jax.Array
) -> optax.GradientTransformation:
    """An optimiser behind a limit on the gradient's global norm. Rebuilt in each step, as its settings are traced.

    Args:
      optimizer: a name in `OPTIMIZERS`, an import path "package.module:name" of such a function, or the function.
      hyperparams: `max_grad_norm`, where inf is no limit, and what the optimiser reads.
      learning_rate: traced, and already scheduled.

    Raises:
      ConfigError: an unknown name or no function, or a function gives something else. In `init` and `update` of a
        custom one, if it fails or changes structures, shapes or dtypes.
    """
    if is_custom(optimizer):
        what = f"optimizer={function_name(optimizer)}"
        make = functools.partial(_make_custom, import_custom(optimizer, "optimizer"), what)
    elif optimizer not in OPTIMIZERS:
        raise ConfigError(f"unknown optimizer {optimizer!r}: {nearest(optimizer, OPTIMIZERS)}")
    else:
        make = OPTIMIZERS[optimizer]
    return optax.chain(_clip_by_global_norm(hyperparams.max_grad_norm), make(hyperparams, learning_rate))


def _clip_by_global_norm(max_norm: jax.Array) -> optax.GradientTransformation:
    """As optax's, without its 0 / 0 for a gradient of 0, at which `jax_debug_nans` would stop."""

    def update(gradient, state, params=None):
        norm = optax.tree.norm(gradient)
        is_small = norm < max_norm
        divisor, factor = jnp.where(is_small, 1.0, norm), jnp.where(is_small, 1.0, max_norm)

        def clipped(leaf):
            return jnp.where(is_small, leaf, leaf / divisor.astype(leaf.dtype) * factor.astype(leaf.dtype))

        return jax.tree.map(clipped, gradient), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _make_custom(
    make: Callable, what: str, hyperparams: Hyperparams, learning_rate: jax.Array
) -> optax.GradientTransformation:
    """A custom transformation that raises ConfigError wherever it does not fit the parameters."""
    if not callable(make):
        raise ConfigError(
            f"optimizer is a {type(make).__name__}, but the learning rate changes during training; use a function "
            "such as lambda hyperparams, learning_rate: optax.adam(learning_rate)"
        )
    transformation = _call(what, lambda: optax.with_extra_args_support(make(hyperparams, learning_rate)))

    def arrays(function, *arguments):  # numbers in a state become arrays, which can be saved and vmapped
        return _call(what, lambda: jax.tree.map(jnp.asarray, function(*arguments)))

    def update(gradient, state, params=None):
        results = arrays(transformation.update, gradient, state, params)
        if not are_alike((gradient, state), results):
            raise ConfigError(
                f"{what} gives {describe_arrays(results)} as steps and state, but an update must keep the structure, "
                f"shapes and dtypes {describe_arrays((gradient, state))}"
            )
        return results

    return optax.GradientTransformation(functools.partial(arrays, transformation.init), update)


def _call(what: str, function: Callable, *arguments: PyTree) -> Any:
    """The result of custom code; any error in it is a ConfigError."""
    advice = (
        ". It gets traced (hyperparams, learning_rate), where hyperparameters that are not set may be None, and its "
        "update gets (gradient, state, parameters), without the loss that a line search needs; write for example "
        "lambda hyperparams, learning_rate: optax.lion(learning_rate)"
    )
    with user_code(f"{what} cannot update the policy's parameters: it fails", advice):
        return function(*arguments)


def _adam_betas(hyperparams: Hyperparams) -> dict[str, jax.Array]:
    return _set(b1=hyperparams.beta1, b2=hyperparams.beta2)


def _set(**options) -> dict[str, jax.Array]:
    """The options that are not None; for the others, optax has defaults."""
    return {name: value for name, value in options.items() if value is not None}

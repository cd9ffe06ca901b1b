"""One or two dense networks of the same observations as one differentiable function."""

import functools
import importlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from grpo_jax.errors import ConfigError
from grpo_jax.kernels.layout import HALF, LARGEST, SAMPLES, Shape, packed, round_up

ACTIVATIONS = ("tanh", "relu", "silu", "swish", "gelu")
MOST_UNITS = {1: 128, 2: 64}  # by the number of hidden layers: gradients of more weights exceed a thread's registers
MOST_OUTPUTS = 31  # of a network
MOST_REGISTERS = 80  # of a thread for the weights' gradients: XLA computes the first product of more
TARGET = 32.0  # for the largest scaled gradient of an output, far from both ends of float16

Layers = tuple[tuple[jax.Array, jax.Array], ...]  # of a network: kernel [inputs, outputs] and bias [outputs]


def unserved(layer_sizes: Sequence[Sequence[int]], activation: str) -> str | None:
    """Why `dense_networks` cannot compute these networks; None if it can.

    Args:
      layer_sizes: of each network, the number of inputs, the widths of the hidden layers, and the number of outputs.
      activation: the name of the function after each hidden layer.
    """
    if jax.__version_info__ < (0, 11):
        return f"the kernel needs jax 0.11, and this is {jax.__version__}"
    if activation not in ACTIVATIONS:
        return f"the activation {activation} is none of {', '.join(ACTIVATIONS)}"
    if not 1 <= len(layer_sizes) <= 2 or len({tuple(sizes[:-1]) for sizes in layer_sizes}) > 1:
        return "the kernel takes one network, or two of the same inputs and hidden layers"
    hidden = tuple(layer_sizes[0][1:-1])
    if len(set(hidden)) != 1 or hidden[0] not in range(16, MOST_UNITS.get(len(hidden), 0) + 1, 16):
        return f"hidden layers {hidden} are not one of 16, 32, ... 128 units, nor two of 16, 32, 48 or 64 units each"
    most = max(sizes[-1] for sizes in layer_sizes)
    return f"{most} outputs of a network are more than {MOST_OUTPUTS}" if most > MOST_OUTPUTS else None


def dense_networks(params: tuple[Layers, ...], observations: jax.Array, activation: str) -> tuple[jax.Array, ...]:
    """The outputs of one or two dense networks, each `[N, O]`.

        h_0 = observations,  h_i = activation(h_{i-1} @ kernel_i + bias_i),  output = h_L @ kernel_{L+1} + bias_{L+1}

    Operands are float16, sums float32. Gradients compute the hidden layers again.

    Args:
      params: of each network its layers, each `(kernel [inputs, outputs], bias [outputs])`, float32.
      observations: `[N, D]` float32. One beyond 4e6 makes the outputs of its sample NaN (not with tanh, if finite), as
        hidden units beyond 1e6 do; for one of 512 or more, weights of the first layer count as at most 1,023.
      activation: one of `ACTIVATIONS`; GELU is the approximation by tanh.
    """
    inputs, hidden = params[0][0][0].shape
    outputs = tuple(layers[-1][0].shape[1] for layers in params)
    shape = _shape(inputs, hidden, len(params[0]) - 1, outputs, activation)
    return (_networks if shape.registers <= MOST_REGISTERS else _first_by_xla)(params, observations, shape)


_shape = functools.lru_cache(None)(Shape)  # equal sizes are one object: kernels are kept by it


def _first_by_xla(params, observations, shape):
    kernel, bias = (jnp.stack([layers[0][i] for layers in params], -2) for i in (0, 1))
    before = jnp.einsum("nd,dkh->nkh", observations, kernel) + bias
    before = jnp.pad(before, ((0, 0), (0, 0), (0, shape.width - shape.hidden)))
    later = tuple(layers[1:] for layers in params)
    return _networks(later, before, _shape(None, shape.hidden, shape.depth, shape.outputs, shape.activation))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _networks(params, x, shape):
    """Outputs of what the kernels read: observations, or `[N, networks, width]` from XLA's first product."""
    (result,) = _run("forward", shape, len(x), _tiles(x), packed(shape, params)[0])
    return tuple(y[: len(x), : len(layers[-1][1])] + layers[-1][1] for y, layers in zip(result, params, strict=True))


def _forward(params, x, shape):
    params = jax.tree.map(lambda each: each.value, params, is_leaf=lambda each: hasattr(each, "perturbed"))
    return _networks(params, x.value, shape), (params, x.value, () if x.perturbed and shape.inputs else None)


def _backward(shape, kept, gradients):
    params, x, of_observations = kept
    is_zero = jax.custom_derivatives.SymbolicZero
    gradients = tuple(jnp.zeros(each.shape, each.dtype) if isinstance(each, is_zero) else each for each in gradients)
    if of_observations is not None:  # which the kernels do not give
        return jax.vjp(lambda params, x: _first_by_xla(params, x, shape), params, x)[1](gradients)
    together = jnp.concatenate(gradients, axis=1)  # in one pass over it its maxima, and sums: gradients of last biases
    largest = jnp.split(jnp.max(jnp.abs(together), axis=0), shape.outputs[:-1])
    scales = jnp.exp2(jnp.round(jnp.log2(TARGET / jnp.clip(jnp.stack([*map(jnp.max, largest)]), 1e-30, 1e30))))
    (weights, _), transpose = jax.vjp(lambda params: packed(shape, params), params)
    sums, *into_x = _run("backward", shape, len(x), _tiles(x), weights, scales, *map(_tiles, gradients))
    into_weights = sums.sum(1).swapaxes(2, 3).reshape(weights.shape) / scales[:, None, None]
    into_params = transpose((into_weights, together.sum(0)))
    return *into_params, into_x[0][: len(x)] / scales[:, None] if into_x else jnp.zeros_like(x)


_networks.defvjp(_forward, _backward, symbolic_zeros=True)


def _tiles(x):
    """Whole tiles of samples, those of observations and gradients side by side: XLA writes them so from the start."""
    x = jnp.pad(x, ((0, -len(x) % SAMPLES), *((0, 0),) * (x.ndim - 1)))
    return x.T if x.ndim == 2 else x


def _run(name, shape, samples, *arguments):
    """The results of a kernel. Its arrays have a leading axis of seeds, which vmap makes longer."""
    make = getattr(importlib.import_module("grpo_jax.kernels.passes"), name)  # not in older versions of JAX

    @jax.custom_batching.custom_vmap
    def call(x, weights, *others):
        kernel = make(shape, len(x), round_up(samples, SAMPLES))
        return kernel(x, jnp.clip(weights, -LARGEST, LARGEST).astype(HALF), *others)

    @call.def_vmap
    def _(size, mapped, *arguments):
        pairs = zip(arguments, mapped, strict=True)
        arguments = (each if is_mapped else jnp.broadcast_to(each, (size, *each.shape)) for each, is_mapped in pairs)
        result = call(*(each.reshape(-1, *each.shape[2:]) for each in arguments))
        split = jax.tree.map(lambda each: each.reshape(size, -1, *each.shape[1:]), result)
        return split, jax.tree.map(lambda _: True, split)

    differentiable = jax.custom_jvp(call)

    @differentiable.defjvp
    def _(primals, tangents):
        raise ConfigError("the kernels have no second derivatives: use execution_plan='gpu'")

    return jax.tree.map(lambda each: each[0], differentiable(*(each[None] for each in arguments)))

"""One or two dense networks of the same observations as one differentiable function."""

import functools
import importlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from grpo_jax.errors import ConfigError
from grpo_jax.kernels.layout import SAMPLES, Shape, packed, round_up, unpacked

ACTIVATIONS = ("tanh", "relu", "silu", "swish", "gelu")
MOST_HIDDEN_LAYERS = 3
WIDTHS = range(16, 129, 16)
MOST_OUTPUTS = 31  # of a network
MOST_INPUTS = 50  # of the kernels: XLA computes the first product of more
TARGET = 32.0  # for the largest scaled gradient of an output, far from both ends of float16

Layers = tuple[tuple[jax.Array, jax.Array], ...]  # of a network: kernel [inputs, outputs] and bias [outputs]


def unserved(layer_sizes: Sequence[Sequence[int]], activation: str) -> str | None:
    """Why `dense_networks` cannot compute these networks; None if it can.

    Args:
      layer_sizes: of each network, the number of inputs, the widths of the hidden layers, and the number of outputs.
      activation: the name of the function after each hidden layer.
    """
    hidden = {tuple(sizes[1:-1]) for sizes in layer_sizes}
    widths = {width for sizes in hidden for width in sizes}
    if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11):
        return f"they need jax 0.11, and this is {jax.__version__}"
    if activation not in ACTIVATIONS:
        return f"the activation {activation} is none of {', '.join(ACTIVATIONS)}"
    if not 1 <= len(layer_sizes) <= 2 or len({sizes[0] for sizes in layer_sizes}) > 1 or len(hidden) > 1:
        return "they take one network, or two of the same inputs and hidden layers"
    if not 1 <= len(*hidden) <= MOST_HIDDEN_LAYERS:
        return f"they take 1 to {MOST_HIDDEN_LAYERS} hidden layers"
    if len(widths) > 1 or not widths <= set(WIDTHS):
        return f"hidden layers {next(iter(hidden))} are not of one width of {WIDTHS[0]}, {WIDTHS[1]}, ... {WIDTHS[-1]}"
    if max(sizes[-1] for sizes in layer_sizes) > MOST_OUTPUTS:
        return f"they take up to {MOST_OUTPUTS} outputs of a network"
    return None


def dense_networks(params: tuple[Layers, ...], observations: jax.Array, activation: str) -> tuple[jax.Array, ...]:
    """The outputs of one or two dense networks, each `[N, O]`.

        h_0 = observations,  h_i = activation(h_{i-1} @ kernel_i + bias_i),  output = h_L @ kernel_{L+1} + bias_{L+1}

    Operands are float16, sums float32: the digits of XLA's default products on a GPU. Gradients compute the hidden
    layers again; nothing but the arguments is kept for them.

    Args:
      params: of each network its layers, each `(kernel [inputs, outputs], bias [outputs])`, float32; `unserved` says
        which sizes there may be.
      observations: `[N, D]` float32. An infinite one makes the outputs of its sample NaN.
      activation: one of `ACTIVATIONS`; GELU is the approximation by tanh.

    Raises:
      ConfigError: in forward mode, `jax.jvp`.
    """
    try:
        return _networks(params, observations, activation)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise ConfigError(
            "the kernels of dense networks have no forward-mode derivative; use jax.grad or jax.vjp, or "
            "execution_plan='gpu' for jax.jvp"
        ) from error


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _networks(params, observations, activation):
    return _outputs(_shape(params, activation, observations.shape[1] > MOST_INPUTS), params, observations)


def _forward(params, observations, activation):
    params = jax.tree.map(lambda each: each.value, params, is_leaf=lambda each: hasattr(each, "perturbed"))
    # The kernels give no gradient of observations: where it is needed, XLA computes the first layer.
    first_by_xla = observations.perturbed or observations.value.shape[1] > MOST_INPUTS
    outputs = _networks(params, observations.value, activation)
    return outputs, (params, observations.value, () if first_by_xla else None, () if observations.perturbed else None)


def _backward(activation, residuals, gradients):
    params, observations, first_by_xla, perturbed = residuals
    gradients = [
        jnp.zeros(each.shape, each.dtype) if isinstance(each, jax.custom_derivatives.SymbolicZero) else each
        for each in gradients
    ]
    shape = _shape(params, activation, first_by_xla is not None)
    largest = jnp.stack([jnp.max(jnp.abs(each)) for each in gradients])
    scales = jnp.exp2(jnp.round(jnp.log2(TARGET / jnp.clip(largest, 1e-30, 1e30))))
    inputs, first = _inputs(shape, params, observations)
    kernels = [_batched(functools.partial(_call_backward, shape, part), rows=False) for part in range(len(shape.parts))]
    arguments = inputs[None], packed(shape, params)[None], scales[None], *(each[None] for each in gradients)
    sums, into_first = zip(*(kernel(*arguments) for kernel in kernels), strict=True)
    layers = unpacked(shape, tuple(each[0] for each in sums), scales)
    into_observations = jnp.zeros_like(observations)
    if shape.inputs is None:
        into_first = into_first[0][0] / scales[:, None]
        into_kernel = jnp.einsum("nd,nkw->kdw", observations, into_first)[..., : shape.hidden]
        into_bias = into_first.sum(0)[:, : shape.hidden]
        layers = [[(into_kernel[i], into_bias[i]), *each] for i, each in enumerate(layers)]
        if perturbed is not None:
            into_observations = into_first.reshape(len(observations), -1) @ first.T
    into_params = tuple(
        (*each[:-1], (each[-1][0], gradient.sum(0))) for each, gradient in zip(layers, gradients, strict=True)
    )
    return into_params, into_observations


_networks.defvjp(_forward, _backward, symbolic_zeros=True)


def _shape(params, activation: str, first_by_xla: bool) -> Shape:
    inputs, hidden = params[0][0][0].shape
    outputs = tuple(layers[-1][0].shape[1] for layers in params)
    activation = "silu" if activation == "swish" else activation
    return Shape(None if first_by_xla else inputs, hidden, len(params[0]) - 1, outputs, activation)


def _inputs(shape: Shape, params, observations) -> tuple[jax.Array, jax.Array | None]:
    """What the kernels read: observations, or what XLA makes of them, `[N, networks, width]`, and its kernel."""
    if shape.inputs is not None:
        return observations, None
    firsts = [layers[0] for layers in params]
    pad = shape.width - shape.hidden
    kernel = jnp.concatenate([jnp.pad(kernel, ((0, 0), (0, pad))) for kernel, _ in firsts], 1)
    bias = jnp.concatenate([jnp.pad(bias, (0, pad)) for _, bias in firsts])
    return (observations @ kernel + bias).reshape(len(observations), len(params), shape.width), kernel


def _outputs(shape: Shape, params, observations) -> tuple[jax.Array, ...]:
    inputs, _ = _inputs(shape, params, observations)
    result = _batched(functools.partial(_call_forward, shape), rows=True)(inputs[None], packed(shape, params)[None])[0]
    return tuple(
        result[:, network, :number] + layers[-1][1]
        for network, (number, layers) in enumerate(zip(shape.outputs, params, strict=True))
    )


def _call_forward(shape: Shape, inputs: jax.Array, weights: jax.Array) -> jax.Array:
    """`[seeds, N, networks, O rounded up]` of inputs `[seeds, N, ...]` and weights `[seeds, ...]`."""
    kernel = _module("forward").make_forward(shape, inputs.shape[0], _padded(shape, inputs.shape[1]))
    return kernel(_read(shape, inputs), weights).swapaxes(1, 2)[:, : inputs.shape[1]]


def _call_backward(shape: Shape, part: int, inputs, weights, scales, *gradients) -> tuple:
    """The sums, and gradients with respect to `[seeds, N, networks, width]`, where the kernel gives them, or None."""
    seeds, number = inputs.shape[:2]
    kernel = _module("backward").make_backward(shape, part, seeds, _padded(shape, number))
    gradients = (_columns(each, _padded(shape, number)) for each in gradients)
    sums, *into_first = kernel(_read(shape, inputs), weights, scales, *gradients)
    return sums, into_first[0][:, :number] if into_first else None


def _padded(shape: Shape, number: int) -> int:
    return round_up(number, SAMPLES if shape.inputs is None else 4)


def _read(shape: Shape, inputs: jax.Array) -> jax.Array:
    number = _padded(shape, inputs.shape[1])
    if shape.inputs is not None:
        return _columns(inputs, number)
    return jnp.pad(inputs, ((0, 0), (0, number - inputs.shape[1]), (0, 0), (0, 0)))


def _columns(x: jax.Array, number: int) -> jax.Array:
    """`[seeds, N, D]` as `[seeds, D, number]`: samples side by side, which XLA writes so from the start."""
    return jnp.pad(x, ((0, 0), (0, number - x.shape[1]), (0, 0))).swapaxes(1, 2)


def _module(name: str):
    """A module that imports Mosaic GPU, which older versions of JAX have in another form."""
    return importlib.import_module(f"grpo_jax.kernels.{name}")


def _batched(function: Callable, rows: bool) -> Callable:
    """`function` of arrays with a leading axis of seeds, which becomes longer under vmap.

    With `rows` the results are of samples, `[seeds, N, ...]`, and if samples alone are mapped there are more of them.
    """
    wrapped = jax.custom_batching.custom_vmap(function)

    @wrapped.def_vmap
    def _(size, batched, *arguments):
        if rows and not batched[1]:
            inputs, weights = arguments
            seeds, number = inputs.shape[1:3]
            result = wrapped(inputs.swapaxes(0, 1).reshape(seeds, size * number, *inputs.shape[3:]), weights)
            return result.reshape(seeds, size, number, *result.shape[2:]).swapaxes(0, 1), True
        arguments = [
            each if is_batched else jnp.broadcast_to(each, (size, *each.shape))
            for each, is_batched in zip(arguments, batched, strict=True)
        ]
        result = wrapped(*(each.reshape(-1, *each.shape[2:]) for each in arguments))
        split = jax.tree.map(lambda each: each.reshape(size, -1, *each.shape[1:]), result)
        return split, jax.tree.map(lambda _: True, split)

    return wrapped

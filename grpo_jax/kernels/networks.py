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
MOST_READ = 64  # rows that a kernel reads, of outputs and inputs: XLA computes the first product of more
TARGET = 32.0  # for the largest scaled gradient of an output, far from both ends of float16

Layers = tuple[tuple[jax.Array, jax.Array], ...]  # of a network: kernel [inputs, outputs] and bias [outputs]


def unserved(layer_sizes: Sequence[Sequence[int]], activation: str) -> str | None:
    """Why `dense_networks` cannot compute these networks; None if it can.

    Args:
      layer_sizes: of each network, the number of inputs, the widths of the hidden layers, and the number of outputs.
      activation: the name of the function after each hidden layer.
    """
    hidden = {tuple(sizes[1:-1]) for sizes in layer_sizes}
    widths = set().union(*hidden)
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
    if len(*hidden) == 3 and max(widths) > 64:
        return "three hidden layers have up to 64 units"
    most = max(sizes[-1] for sizes in layer_sizes)
    return f"{most} outputs of a network are more than {MOST_OUTPUTS}" if most > MOST_OUTPUTS else None


def dense_networks(params: tuple[Layers, ...], observations: jax.Array, activation: str) -> tuple[jax.Array, ...]:
    """The outputs of one or two dense networks, each `[N, O]`.

        h_0 = observations,  h_i = activation(h_{i-1} @ kernel_i + bias_i),  output = h_L @ kernel_{L+1} + bias_{L+1}

    Operands are float16, sums float32. Gradients compute the hidden layers again; only the arguments are kept for them.

    Args:
      params: of each network its layers, each `(kernel [inputs, outputs], bias [outputs])`, float32.
      observations: `[N, D]` float32. An infinite one makes the outputs of its sample NaN.
      activation: one of `ACTIVATIONS`; GELU is the approximation by tanh.

    Raises:
      ConfigError: for `jax.jvp`.
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
    shape = _shape(params, activation, False)
    inputs, _ = _inputs(shape, params, observations)
    result = _kernel("forward", shape)(inputs[None], packed(shape, params)[None])[0]
    return tuple(
        result[network, : len(observations), :number] + layers[-1][1]
        for network, (number, layers) in enumerate(zip(shape.outputs, params, strict=True))
    )


def _forward(params, observations, activation):
    params = jax.tree.map(lambda each: each.value, params, is_leaf=lambda each: hasattr(each, "perturbed"))
    # The kernels give no gradient of observations: where it is needed, XLA computes the first layer.
    kept = params, observations.value, () if observations.perturbed else None
    return _networks(params, observations.value, activation), kept


def _backward(activation, kept, gradients):
    params, observations, perturbed = kept
    is_zero = jax.custom_derivatives.SymbolicZero
    gradients = [jnp.zeros(each.shape, each.dtype) if isinstance(each, is_zero) else each for each in gradients]
    shape = _shape(params, activation, perturbed is not None)
    largest = jnp.stack([jnp.max(jnp.abs(each)) for each in gradients])
    scales = jnp.exp2(jnp.round(jnp.log2(TARGET / jnp.clip(largest, 1e-30, 1e30))))
    inputs, kernel = _inputs(shape, params, observations)
    arguments = [each[None] for each in (inputs, packed(shape, params), scales, *gradients)]
    results = [_kernel("backward", shape, part)(*arguments) for part in range(len(shape.parts))]
    layers = unpacked(shape, [sums[0] for sums, *_ in results], scales)
    into_observations = jnp.zeros_like(observations)
    if shape.inputs is None:
        into_first = results[0][1][0, : len(observations)] / scales[:, None]
        into_kernel = jnp.einsum("nd,nkw->kdw", observations, into_first)[..., : shape.hidden]
        into_bias = into_first.sum(0)[:, : shape.hidden]
        layers = [
            [first, *later] for first, later in zip(zip(into_kernel, into_bias, strict=True), layers, strict=True)
        ]
        if perturbed is not None:
            into_observations = into_first.reshape(len(observations), -1) @ kernel.T
    pairs = zip(layers, gradients, strict=True)
    return tuple((*each[:-1], (each[-1][0], gradient.sum(0))) for each, gradient in pairs), into_observations


_networks.defvjp(_forward, _backward, symbolic_zeros=True)


_make_shape = functools.lru_cache(None)(Shape)  # equal sizes are one object: kernels are kept by it


def _shape(params, activation: str, first_by_xla: bool) -> Shape:
    inputs, hidden = params[0][0][0].shape
    outputs = tuple(layers[-1][0].shape[1] for layers in params)
    activation = "silu" if activation == "swish" else activation
    first_by_xla |= round_up(max(outputs) + 1 + inputs, 8) > MOST_READ
    return _make_shape(None if first_by_xla else inputs, hidden, len(params[0]) - 1, outputs, activation)


def _inputs(shape: Shape, params, observations) -> tuple[jax.Array, jax.Array | None]:
    """What the kernels read: observations, or what XLA makes of them, `[N, networks, width]`, and its kernel."""
    if shape.inputs is not None:
        return observations, None
    pad = (0, shape.width - shape.hidden)
    kernel = jnp.concatenate([jnp.pad(layers[0][0], ((0, 0), pad)) for layers in params], 1)
    bias = jnp.concatenate([jnp.pad(layers[0][1], pad) for layers in params])
    return (observations @ kernel + bias).reshape(len(observations), len(params), shape.width), kernel


def _kernel(name: str, shape: Shape, *options: int) -> Callable:
    """A kernel as a function of arrays with a leading axis of seeds, which becomes longer under vmap."""
    # Older versions of JAX have Mosaic GPU in another form.
    make = importlib.import_module(f"grpo_jax.kernels.{name}").make

    @jax.custom_batching.custom_vmap
    def call(inputs, weights, *scales_and_gradients):
        seeds, number = inputs.shape[:2]
        even = round_up(number, SAMPLES)

        def padded(x):
            return jnp.pad(x, ((0, 0), (0, even - number), *((0, 0),) * (x.ndim - 2)))

        def columns(x):  # samples side by side: XLA writes them so from the start
            return padded(x).swapaxes(1, 2)

        read = padded(inputs) if shape.inputs is None else columns(inputs)
        gradients = map(columns, scales_and_gradients[1:])
        return make(shape, *options, seeds, even)(read, weights, *scales_and_gradients[:1], *gradients)

    @call.def_vmap
    def _(size, mapped, *arguments):
        arguments = [
            each if is_mapped else jnp.broadcast_to(each, (size, *each.shape))
            for each, is_mapped in zip(arguments, mapped, strict=True)
        ]
        result = call(*(each.reshape(-1, *each.shape[2:]) for each in arguments))
        split = jax.tree.map(lambda each: each.reshape(size, -1, *each.shape[1:]), result)
        return split, jax.tree.map(lambda _: True, split)

    return call

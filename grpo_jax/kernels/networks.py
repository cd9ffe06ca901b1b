"""One or two dense networks of the same observations as one differentiable function."""

import functools
from collections.abc import Sequence

import jax

ACTIVATIONS = ("tanh", "relu", "silu", "gelu")
MOST_HIDDEN_LAYERS = 3
WIDTHS = range(16, 129, 16)
MOST_OUTPUTS = 32

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
    if sum(sizes[-1] for sizes in layer_sizes) > MOST_OUTPUTS:
        return f"they take {MOST_OUTPUTS} outputs in all"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dense_networks(params: tuple[Layers, ...], observations: jax.Array, activation: str) -> tuple[jax.Array, ...]:
    """The outputs of one or two dense networks, each `[N, O]`.

        h_0 = observations,  h_i = activation(h_{i-1} @ kernel_i + bias_i),  output = h_L @ kernel_{L+1} + bias_{L+1}

    Args:
      params: of each network its layers, each `(kernel [inputs, outputs], bias [outputs])`, float32; `unserved` says
        which sizes there may be.
      observations: `[N, D]` float32.
      activation: one of `ACTIVATIONS`.
    """
    return _by_xla(params, observations, activation)


def _by_xla(params, observations, activation):
    function, outputs = getattr(jax.nn, activation), []
    for *hidden, (kernel, bias) in params:
        x = observations
        for hidden_kernel, hidden_bias in hidden:
            x = function(x @ hidden_kernel + hidden_bias)
        outputs.append(x @ kernel + bias)
    return tuple(outputs)


def _forward(params, observations, activation):
    return _by_xla(params, observations, activation), (params, observations)


def _backward(activation, residuals, gradients):
    return jax.vjp(lambda *arguments: _by_xla(*arguments, activation), *residuals)[1](gradients)


dense_networks.defvjp(_forward, _backward)

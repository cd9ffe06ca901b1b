"""How networks and samples lie in the memory of the kernels.

A tile of 64 samples is one operand of the products, `[rows, 64]` float16, a sample in each column:

| rows | what |
|---|---|
| 0 ... `ones` - 1 | gradients of the outputs, scaled; 0 in the forward kernel |
| `ones` | 1: its weights are biases, its gradients those of biases |
| then, one for each input | 2^6 x where |x| < 512, else 0 |
| then half of all, in the same order | 0 for gradients and ones; 2^-6 x where |x| >= 512, else 0 |

float16 has the digits of TF32, which XLA's products have by default, and not its range. Two rows an input, whose
weights are W / 2^6 and 2^6 W, keep 1e-6 ... 4e6 with all digits. The first `few` rows are the operand for biases of
later layers, and for gradients of outputs. Weights end at float16's largest number: infinity times 0 would be NaN.
"""

import jax
import jax.numpy as jnp

SAMPLES = 64  # of a tile
HALF, LARGEST = jnp.float16, 65504.0  # the type of operands, and its largest number
SMALL, BIG, LARGEST_SMALL = 2.0**6, 2.0**-6, 512.0


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below the number."""
    return -(-number // multiple) * multiple


class Shape:
    """The sizes of one or two networks, static."""

    def __init__(self, inputs: int | None, hidden: int, depth: int, outputs: tuple[int, ...], activation: str):
        """Without `inputs`, kernels begin with what XLA's first product gives to the first activation."""
        self.inputs, self.hidden, self.depth, self.outputs, self.activation = inputs, hidden, depth, outputs, activation
        self.width = round_up(hidden, 64)  # products have 64 rows; units beyond `hidden` are 0
        # Inputs are read into rows from an odd one, as Mosaic reads 2, 4 or 8 rows at once into rows from an even one.
        self.ones = max(outputs) if inputs is None else round_up(max(outputs), 2)
        self.few = round_up(self.ones + 1, 16)
        self.read = self.few if inputs is None else round_up(self.ones + 1 + inputs, 8)  # rows that a kernel reads
        self.rows = self.few if inputs is None else 2 * self.read
        self.stored = 1.0 if activation == "tanh" else 2.0**-4  # factor of hidden outputs, which could exceed float16
        # Rows of a network's weights: the first layer, kernel and bias of each later one, the transposed head.
        self.sections = (*[self.rows] * (inputs is not None), *(self.width, self.few) * (depth - 1), self.few)
        self.registers = sum(self.sections) * self.width // 128  # of each thread, for the weights' gradients


def packed(shape: Shape, params: tuple) -> tuple[jax.Array, jax.Array]:
    """The weights that a kernel reads, `[networks, rows, width]` by `Shape.sections`, and all last biases; linear."""

    def at(row, rows, kernel):  # as the given row of a section
        return jnp.pad(kernel, ((row, rows - row - kernel.shape[0]), (0, shape.width - kernel.shape[1])))

    def sections(layers):
        *later, (head, _) = layers
        if shape.inputs is not None:
            (first, bias), *later = later
            yield at(shape.ones, shape.read, jnp.concatenate([bias[None], first / SMALL]))
            yield at(shape.ones + 1, shape.read, first / BIG)
        for kernel, bias in later:
            yield from (at(0, shape.width, kernel / shape.stored), at(shape.ones, shape.few, bias[None]))
        yield at(0, shape.few, head.T / shape.stored)

    weights = jnp.stack([jnp.concatenate(list(sections(layers))) for layers in params])
    return weights, jnp.concatenate([layers[-1][1] for layers in params])

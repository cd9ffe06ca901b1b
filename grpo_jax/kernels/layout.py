"""How networks and samples lie in the memory of the kernels.

A tile of 64 samples is one operand of the products, `[rows, 64]` float16, a sample in each column:

| rows | what |
|---|---|
| 0 ... `ones` - 1 | gradients of the outputs, scaled; 0 in the forward kernel |
| `ones` | 1: its weights are biases, its gradients those of biases |
| then, one for each input | 2^6 x where |x| < 512, else 0 |
| the second half, in the same order | 0 for gradients and ones; 2^-10 x where |x| >= 512, else 0 |

float16 has the digits of TF32, which XLA's products have by default, and not its range. Two rows an input, whose
weights are W / 2^6 and 2^10 W, keep 1e-6 ... 1e7 with all digits. The first `few` rows, which are no inputs, are the
operand for biases of later layers and for gradients of outputs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

SAMPLES = 64  # of a tile
HALF = jnp.float16
SMALL, BIG, LARGEST_SMALL = 2.0**6, 2.0**-10, 512.0
REGISTERS = 128  # of a thread, for the sums of a backward kernel


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below the number."""
    return -(-number // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of one or two networks, static."""

    inputs: int | None  # None: the kernels begin with what XLA's first product gives to the first activation
    hidden: int  # units of a layer, as the user has them
    depth: int  # hidden layers
    outputs: tuple[int, ...]  # of each network
    activation: str

    @property
    def width(self) -> int:
        """Units of a layer in the kernels, whose products have 64 rows: those beyond `hidden` are 0."""
        return round_up(self.hidden, 64)

    @property
    def ones(self) -> int:
        """The row of ones."""
        return max(self.outputs)

    @property
    def few(self) -> int:
        """Rows of gradients and ones, rounded up to what products take."""
        return round_up(self.ones + 1, 16)

    @property
    def read(self) -> int:
        """Rows that a kernel reads."""
        return self.few if self.inputs is None else round_up(self.ones + 1 + self.inputs, 8)

    @property
    def rows(self) -> int:
        """Rows of the operand."""
        return self.few if self.inputs is None else 2 * self.read

    @property
    def stored(self) -> float:
        """Outputs of hidden layers are stored times this: unbounded ones could exceed float16."""
        return 1.0 if self.activation == "tanh" else 2.0**-4

    @functools.cached_property
    def sections(self) -> tuple[int, ...]:
        """Rows of each part of a network's packed weights.

        The first layer (not if XLA computes it), kernel and biases of each later one, the transposed head.
        """
        first = () if self.inputs is None else (self.rows,)
        return *first, *(self.width, self.few) * (self.depth - 1), self.few

    @functools.cached_property
    def sums(self) -> tuple[tuple[str, int, int], ...]:
        """Each sum over samples that the gradient consists of: what it is of, the layer, columns.

        "head": outputs of the last layer by the few rows; "kernel": outputs of the layer before by gradients of this
        one; "bias": gradients of this layer by the few rows; "first": those of the first layer by all rows.
        """
        last = self.depth - 1
        later = (((("kernel", layer, self.width), ("bias", layer, self.few))) for layer in range(last, 0, -1))
        first = () if self.inputs is None else (("first", 0, self.rows),)
        return ("head", last, self.few), *(each for pair in later for each in pair), *first

    @functools.cached_property
    def parts(self) -> tuple[tuple[tuple[str, int, int], ...], ...]:
        """The sums of each backward kernel: as many as a thread has registers for."""
        parts, free = [], 0
        for each in self.sums:
            needed = each[2] * self.width // 128
            if needed > free:
                parts.append([])
                free = REGISTERS
            parts[-1].append(each)
            free -= needed
        return tuple(map(tuple, parts))


def packed(shape: Shape, params: tuple) -> jax.Array:
    """The weights of all networks, `[networks, rows, width]` float16, in the order of `Shape.sections`."""
    return jnp.stack([jnp.concatenate(_sections(shape, layers)) for layers in params]).astype(HALF)


def _sections(shape: Shape, layers: tuple) -> list[jax.Array]:
    def at(row, rows, kernel):  # as the given row of a part
        return jnp.pad(kernel, ((row, rows - row - kernel.shape[0]), (0, shape.width - kernel.shape[1])))

    (first, bias), *later, (head, _) = layers
    parts = []
    if shape.inputs is not None:
        small = at(shape.ones, shape.read, jnp.concatenate([bias[None], first / SMALL]))
        parts = [small, at(shape.ones + 1, shape.read, first / BIG)]
    for kernel, bias in later:
        parts += [at(0, shape.width, kernel / shape.stored), at(shape.ones, shape.few, bias[None])]
    return [*parts, at(0, shape.few, head.T / shape.stored)]


def unpacked(shape: Shape, sums: tuple[jax.Array, ...], scales: jax.Array) -> list[list[tuple]]:
    """The gradients of each network's layers but the head's bias, from the sums of the backward kernels.

    Args:
      shape: the sizes.
      sums: of each of `Shape.parts`, `[networks, blocks, columns / 16, width, 16]`.
      scales: `[networks]`: what the gradients of the outputs were multiplied by.

    Returns:
      For each network, pairs of kernel and bias; the first one is absent if XLA computes that layer.
    """
    wide = [jnp.moveaxis(part.sum(1), 1, 2).reshape(part.shape[0], shape.width, -1) for part in sums]
    named = {}
    for part, total in zip(shape.parts, wide, strict=True):
        start = 0
        for name, layer, columns in part:
            named[name, layer] = total[:, : shape.hidden, start : start + columns] / scales[:, None, None]
            start += columns
    gradients, ones = [], shape.ones
    for network, outputs in enumerate(shape.outputs):
        layers = []
        if shape.inputs is not None:
            first = named["first", 0][network]
            small, big = (first[:, start + ones + 1 :][:, : shape.inputs] for start in (0, shape.read))
            layers = [((small / SMALL + big / BIG).T, first[:, ones])]
        for layer in range(1, shape.depth):
            kernel = named["kernel", layer][network, :, : shape.hidden] / shape.stored
            layers.append((kernel, named["bias", layer][network, :, ones]))
        head = named["head", shape.depth - 1][network, :, :outputs] / shape.stored
        gradients.append([*layers, (head, None)])
    return gradients

"""The operations of JAX on tiles: see `tiles`.

Elementwise operations are unchanged. Sums, maxima and products mask the entries of a tile that lie outside its array.
Slices and concatenations are sums over masks, since Triton moves no data between the entries of an array.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SMALLEST_SIDE = 16
"""The smallest side of a tile that is not 1: tensor cores take no less."""

_UNCHANGED = {"copy", "copy_p", "stop_gradient", "optimization_barrier"}
_ELEMENTWISE = {
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil"),
    *("clamp", "convert_element_type", "cos", "cosh", "div", "eq", "erf", "erf_inv", "exp", "exp2", "expm1", "floor"),
    *("ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne"),
    *("neg", "nextafter", "not", "or", "pow", "rem", "round", "rsqrt", "select_n", "shift_left", "sign", "sin"),
    *("shift_right_arithmetic", "shift_right_logical", "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor"),
}


class NotOnTiles(ValueError):
    """An operation that kernels lack."""

    def __init__(self, operation: str):
        """`operation`: its name, with shapes where they matter."""
        super().__init__(f"kernels lack {operation}")


def tile_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the smallest tile that holds an array of this shape."""
    return tuple(1 if side == 1 else max(SMALLEST_SIDE, 1 << (int(side) - 1).bit_length()) for side in shape)


def apply(equation: Any, tiles: list) -> list:
    """The tiles of the results of an equation of a jaxpr, from those of its inputs; scalar constants are NumPy's.

    Raises:
      NotOnTiles: for an operation that has no form on tiles.
    """
    name, params = equation.primitive.name, equation.params
    shapes = [atom.aval.shape for atom in equation.invars]
    if name in _UNCHANGED:
        return tiles
    if name in _ELEMENTWISE and all(isinstance(tile, np.generic) for tile in tiles):
        with jax.ensure_compile_time_eval():  # Triton has no operations on constants alone
            return [np.asarray(equation.primitive.bind(*tiles, **params))[()]]
    if name in _ELEMENTWISE:
        return [equation.primitive.bind(*tiles, **params)]
    if name not in _RULES:
        raise NotOnTiles(name)
    outputs = _RULES[name](equation, *tiles, shapes=shapes, **params)
    return outputs if equation.primitive.multiple_results else [outputs]


def along(shape: Sequence[int], axis: int) -> jax.Array:
    """int32 of a shape: the index along an axis."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _masked(tile: jax.Array, shape: Sequence[int], axis: int, neutral: Any) -> jax.Array:
    """The tile with `neutral` beyond the end of its array along an axis."""
    if tile.shape[axis] == shape[axis]:
        return tile
    return jnp.where(along(tile.shape, axis) < shape[axis], tile, jnp.asarray(neutral, tile.dtype))


def _broadcast_in_dim(equation, tile, *, shapes, shape, broadcast_dimensions, sharding):
    return jax.lax.broadcast_in_dim(tile, tile_shape(shape), broadcast_dimensions)


def _reshape(equation, tile, *, shapes, new_sizes=None, **params):
    new = equation.outvars[0].aval.shape
    if [side for side in shapes[0] if side != 1] != [side for side in new if side != 1]:
        raise NotOnTiles(f"{equation.primitive.name} of {shapes[0]} to {new}")
    return tile.reshape(tile_shape(new))


def _one_minus_square(equation, tile, *, shapes):
    return 1 - tile * tile  # of the gradient of tanh from jax 0.11 on


def _iota(equation, *, shapes, dtype, shape, dimension, sharding):
    return jax.lax.broadcasted_iota(dtype, tile_shape(shape), dimension)


def _transpose(equation, tile, *, shapes, permutation):
    return jnp.transpose(tile, permutation)


def _reduction(reduce: Callable, neutral: Callable, equation, tile, *, shapes, axes, **params):
    is_truth = jnp.issubdtype(tile.dtype, bool)
    if is_truth:  # Triton reduces numbers
        tile = tile.astype(jnp.int32)
    for axis in sorted(axes, reverse=True):
        masked = _masked(tile, shapes[0], axis, neutral(tile.dtype))
        tile = jnp.squeeze(masked, axis) if tile.shape[axis] == 1 else reduce(masked, axis=axis)
    return tile != 0 if is_truth else tile


def _lowest(dtype):
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _highest(dtype):
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def _argument(extreme: Callable, neutral: Callable, equation, tile, *, shapes, axes, index_dtype):
    return extreme(_masked(tile, shapes[0], axes[0], neutral(tile.dtype)), axes[0], index_dtype)


def _taken(tile: jax.Array, condition: jax.Array, axis: int) -> jax.Array:
    """The sum along an axis of the entries where a condition holds."""
    number = jnp.int32 if jnp.issubdtype(tile.dtype, bool) else tile.dtype  # Triton adds numbers
    entries = jnp.where(condition, tile.astype(number), jnp.zeros((), number))
    return jnp.sum(entries, axis=axis).astype(tile.dtype)


def _pairs(tile: jax.Array, axis: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A tile with a new axis of this size before `axis`, and the indices along the new axis and along the old one."""
    shape = (*tile.shape[:axis], size, *tile.shape[axis:])
    return jnp.expand_dims(tile, axis), along(shape, axis), along(shape, axis + 1)


def _cumsum(equation, tile, *, shapes, axis, reverse):
    """A sum for each entry: Triton has no cumulative sum from the end."""
    tile, target, source = _pairs(_masked(tile, shapes[0], axis, 0), axis, tile.shape[axis])
    return _taken(tile, source >= target if reverse else source <= target, axis + 1)


def _dot_general(equation, a, b, *, shapes, dimension_numbers, precision, preferred_element_type, out_sharding):
    ((contract_a,), (contract_b,)), batch = dimension_numbers
    if a.ndim != 2 or b.ndim != 2 or batch != ((), ()):
        raise NotOnTiles(f"dot_general of {shapes[0]} and {shapes[1]}")
    a, b = _masked(a, shapes[0], contract_a, 0), _masked(b, shapes[1], contract_b, 0)
    if min(*a.shape, *b.shape) >= SMALLEST_SIDE:
        return jax.lax.dot_general(a, b, dimension_numbers, precision, preferred_element_type)
    a, b = (a if contract_a == 1 else a.T), (b if contract_b == 0 else b.T)  # [M, K], [K, N]
    if a.shape[1] == 1:
        return a * b
    if b.shape[1] == 1:
        return jnp.sum(a * b.T, axis=1)[:, None]
    if a.shape[0] == 1:
        return jnp.sum(a.T * b, axis=0)[None]
    raise NotOnTiles(f"dot_general of {shapes[0]} and {shapes[1]}")


def _moved(tile: jax.Array, size: int, axis: int, offset: int, to: int, fill: jax.Array) -> jax.Array:
    """A tile of `to` entries along an axis. Entry i is entry i - offset of the array, which has `size`; else `fill`."""
    index = along((*tile.shape[:axis], to, *tile.shape[axis + 1 :]), axis) - offset
    if tile.shape[axis] > 1 and (offset, to) != (0, tile.shape[axis]):
        tile, target, source = _pairs(tile, axis, to)
        tile = _taken(tile, (source == target - offset) & (source < size), axis + 1)
    return jnp.where((index >= 0) & (index < size), tile, jnp.asarray(fill, tile.dtype))


def _concatenate(equation, *tiles, shapes, dimension):
    out = tile_shape(equation.outvars[0].aval.shape)
    offset, result = 0, jnp.zeros(out, tiles[0].dtype)
    for tile, shape in zip(tiles, shapes, strict=True):
        moved = _moved(tile, shape[dimension], dimension, offset, out[dimension], 0)
        result = jnp.where(along(out, dimension) >= offset, moved, result)
        offset += shape[dimension]
    return result


def _stack(equation, *tiles, shapes, axis):
    tiles = [jnp.expand_dims(tile, axis) for tile in tiles]
    shapes = [(*shape[:axis], 1, *shape[axis:]) for shape in shapes]
    return _concatenate(equation, *tiles, shapes=shapes, dimension=axis)


def _unstack(equation, tile, *, shapes, axis):
    return [_taken(tile, along(tile.shape, axis) == i, axis) for i in range(shapes[0][axis])]


def _slice(equation, tile, *, shapes, start_indices, limit_indices, strides):
    if strides is not None and any(stride != 1 for stride in strides):
        raise NotOnTiles("slice with strides")
    for axis, (start, limit) in enumerate(zip(start_indices, limit_indices, strict=True)):
        if (start, limit) != (0, shapes[0][axis]):
            tile = _moved(tile, shapes[0][axis], axis, -start, tile_shape((limit - start,))[0], 0)
    return tile


def _split(equation, tile, *, shapes, sizes, axis):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    sides = [tile_shape((size,))[0] for size in sizes]
    return [_moved(tile, shapes[0][axis], axis, -start, side, 0) for start, side in zip(starts, sides, strict=True)]


def _pad(equation, tile, fill, *, shapes, padding_config):
    out = equation.outvars[0].aval.shape
    for axis, (low, high, interior) in enumerate(padding_config):
        if interior or low < 0 or high < 0:
            raise NotOnTiles("pad inside or by less than 0")
        if low or high:
            tile = _moved(tile, shapes[0][axis], axis, low, tile_shape((out[axis],))[0], fill)
    return tile


_RULES = {
    "one_minus_square": _one_minus_square,
    "argmax": functools.partial(_argument, jax.lax.argmax, _lowest),
    "argmin": functools.partial(_argument, jax.lax.argmin, _highest),
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "cumsum": _cumsum,
    "dot_general": _dot_general,
    "expand_dims": _reshape,
    "iota": _iota,
    "pad": _pad,
    "reduce_and": functools.partial(_reduction, jnp.min, lambda dtype: 1),
    "reduce_max": functools.partial(_reduction, jnp.max, _lowest),
    "reduce_min": functools.partial(_reduction, jnp.min, _highest),
    "reduce_or": functools.partial(_reduction, jnp.max, lambda dtype: 0),
    "reduce_sum": functools.partial(_reduction, jnp.sum, lambda dtype: 0),
    "reshape": _reshape,
    "slice": _slice,
    "split": _split,
    "squeeze": _reshape,
    "stack": _stack,
    "transpose": _transpose,
    "unstack": _unstack,
}

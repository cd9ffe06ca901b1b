"""Any function of arrays as a function of *tiles*, for kernels written with Pallas and compiled by Triton.

A tile is an array whose sides are powers of two, and 16 or more where they are not 1: Triton has no others, and tensor
cores take no smaller ones. `on_tiles` traces a function and replays its operations on tiles. An array occupies the first
entries of its tile along each axis; the rest of the tile has no meaning and is masked in sums, maxima and products.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from grpo_jax.types import PyTree

SMALLEST_SIDE = 16

_INLINED = {"jit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
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
    return tuple(1 if side == 1 else max(SMALLEST_SIDE, 1 << (side - 1).bit_length()) for side in shape)


class Traced:
    """A function traced for given shapes, free of calls within calls and of operations whose results are not used.

        traced = Traced(function, *arguments)
        traced.on_tiles(*tiles)  # in a kernel: tiles of `traced.inputs`, then the tiles of the results

    Arrays that the function captures, such as statistics of a normaliser, are inputs too: `traced.captured`.
    """

    def __init__(self, function: Callable, *arguments: PyTree):
        """Traces `function(*arguments)`; the arguments may be shapes."""
        closed, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
        inlined = jax.make_jaxpr(functools.partial(_inline, closed.jaxpr))(closed.consts, *closed.in_avals)
        self.captured: list[jax.Array] = [*inlined.consts, *closed.consts]
        self.results: PyTree = results  # shapes
        self.uses_argument: PyTree = None  # for each leaf of the arguments: whether a result depends on it
        self._outputs = inlined.jaxpr.outvars
        self._inputs = [*inlined.jaxpr.constvars, *inlined.jaxpr.invars]
        self._equations, used = _used(inlined.jaxpr)
        leaves, structure = jax.tree.flatten(arguments)
        flags = [variable in used for variable in self._inputs]
        self.uses_argument = structure.unflatten(flags[len(flags) - len(leaves) :])

    def on_tiles(self, *tiles: jax.Array) -> PyTree:
        """The tiles of the results, from those of the captured arrays and of the leaves of the arguments.

        Raises:
          NotOnTiles: for an operation that has no form on tiles.
        """
        known = dict(zip(self._inputs, tiles, strict=True))

        def read(atom):
            return np.asarray(atom.val, atom.aval.dtype)[()] if isinstance(atom, Literal) else known[atom]

        for equation in self._equations:
            outputs = _apply(equation, [read(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, outputs, strict=True))
        outputs = [jnp.broadcast_to(read(atom), tile_shape(atom.aval.shape)) for atom in self._outputs]
        return jax.tree.unflatten(jax.tree.structure(self.results), outputs)


def _inline(jaxpr: Any, captured: list, *arguments: jax.Array) -> list:
    """Evaluates a jaxpr with the bodies of its calls in their place."""
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*captured, *arguments), strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        body, is_choice = _body(equation)
        if body is not None:
            captured = list(getattr(body, "consts", ()))
            outputs = _inline(getattr(body, "jaxpr", body), captured, *inputs[is_choice:])
        else:
            outputs = equation.primitive.bind(*inputs, **equation.params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        known.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _body(equation: Any) -> tuple[Any, bool]:
    """The jaxpr that a call consists of, or None, and whether it is a choice: of a GPU's branch among platforms."""
    params = equation.params
    if equation.primitive.name in _INLINED:
        return next(params[name] for name in ("jaxpr", "call_jaxpr") if name in params), False
    if equation.primitive.name == "cond" and params.get("branches_platforms"):
        branches = zip(params["branches"], params["branches_platforms"], strict=True)
        return next(body for body, platforms in branches if platforms is None or "cuda" in platforms), True
    return None, False


def _used(jaxpr: Any) -> tuple[list, set]:
    """The equations that the results depend on, and all variables that these read."""
    used = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    equations = []
    for equation in reversed(jaxpr.eqns):
        if used.intersection(equation.outvars):
            equations.append(equation)
            used.update(atom for atom in equation.invars if not isinstance(atom, Literal))
    return equations[::-1], used


def _apply(equation: Any, tiles: list) -> list:
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


def _iota(equation, *, shapes, dtype, shape, dimension, sharding):
    return jax.lax.broadcasted_iota(dtype, tile_shape(shape), dimension)


def _transpose(equation, tile, *, shapes, permutation):
    return jnp.transpose(tile, permutation)


def _reduction(reduce: Callable, neutral: Callable, equation, tile, *, shapes, axes, **params):
    dtype = tile.dtype
    if dtype == bool:  # Triton reduces numbers
        tile = tile.astype(jnp.int32)
    for axis in sorted(axes, reverse=True):
        masked = _masked(tile, shapes[0], axis, neutral(tile.dtype))
        tile = jnp.squeeze(masked, axis) if tile.shape[axis] == 1 else reduce(masked, axis=axis)
    return tile != 0 if dtype == bool else tile


def _lowest(dtype):
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _highest(dtype):
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def _argument(extreme: Callable, neutral: Callable, equation, tile, *, shapes, axes, index_dtype):
    return extreme(_masked(tile, shapes[0], axes[0], neutral(tile.dtype)), axes[0], index_dtype)


def _cumsum(equation, tile, *, shapes, axis, reverse):
    """A sum for each entry: Triton has no cumulative sum from the end."""
    size, ndim = tile.shape[axis], tile.ndim
    tile = jnp.expand_dims(_masked(tile, shapes[0], axis, 0), axis)  # [..., 1 (to), from, ...]
    shape = tuple(size if i == axis else side for i, side in enumerate(tile.shape))
    source, target = along(shape, axis + 1), along(shape, axis)
    counted = source >= target if reverse else source <= target
    assert len(shape) == ndim + 1
    return jnp.sum(jnp.where(counted, tile, jnp.zeros((), tile.dtype)), axis=axis + 1)


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
    """A tile of `to` entries along an axis: entry i is entry i - offset of the array, of `size` entries; else `fill`."""
    shape = tuple(to if i == axis else side for i, side in enumerate(tile.shape))
    fill = jnp.asarray(fill, tile.dtype)
    if tile.shape[axis] == 1:
        return jnp.where(along(shape, axis) == offset, tile, fill)
    if offset == 0 and to == tile.shape[axis]:
        return jnp.where(along(shape, axis) < size, tile, fill)
    both = (*shape[: axis + 1], tile.shape[axis], *shape[axis + 1 :])
    source, target = along(both, axis + 1), along(both, axis)
    taken = (source == target - offset) & (source < size)
    kind = jnp.int32 if tile.dtype == bool else tile.dtype
    values = jnp.where(taken, jnp.expand_dims(tile, axis).astype(kind), jnp.zeros((), kind))
    values = jnp.sum(values, axis=axis + 1).astype(tile.dtype)
    index = along(shape, axis) - offset
    return jnp.where((index >= 0) & (index < size), values, fill)


def _concatenate(equation, *tiles, shapes, dimension):
    out = tile_shape(equation.outvars[0].aval.shape)
    offset, result = 0, jnp.zeros(out, tiles[0].dtype)
    for tile, shape in zip(tiles, shapes, strict=True):
        size = shape[dimension]
        index = along(out, dimension)
        here = (index >= offset) & (index < offset + size)
        result = jnp.where(here, _moved(tile, size, dimension, offset, out[dimension], 0), result)
        offset += size
    return result


def _stack(equation, *tiles, shapes, axis):
    tiles = [jnp.expand_dims(tile, axis) for tile in tiles]
    shapes = [(*shape[:axis], 1, *shape[axis:]) for shape in shapes]
    return _concatenate(equation, *tiles, shapes=shapes, dimension=axis)


def _unstack(equation, tile, *, shapes, axis):
    kind = jnp.int32 if tile.dtype == bool else tile.dtype
    return [
        jnp.sum(
            jnp.where(along(tile.shape, axis) == i, tile, jnp.zeros((), tile.dtype)).astype(kind), axis=axis
        ).astype(tile.dtype)
        for i in range(shapes[0][axis])
    ]


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

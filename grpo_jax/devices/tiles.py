"""Functions of arrays as functions of *tiles*, for kernels written with Pallas and compiled by Triton.

A tile is an array whose sides are powers of two, and 16 or more where they are not 1: Triton has no other arrays, and
tensor cores take no smaller ones. An array lies in the first entries of its tile along each axis. The other entries
have no meaning.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from grpo_jax.devices.tile_operations import apply, tile_shape
from grpo_jax.types import PyTree

_INLINED = {"jit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}


class Traced:
    """A function traced for given shapes, free of calls within calls and of operations whose results are not used.

        traced = Traced(function, *arguments)
        results = traced.on_tiles(*tiles)  # in a kernel: of the captured arrays, then of the leaves of the arguments

    Attributes:
      captured: arrays that the function closes over, such as hyperparameters or statistics of a normaliser.
      results: shapes of the results.
      uses_argument: for each leaf of the arguments, whether a result depends on it.
    """

    def __init__(self, function: Callable, *arguments: PyTree):
        """Traces `function(*arguments)`; the arguments may be shapes."""
        closed, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
        inlined = jax.make_jaxpr(functools.partial(_inline, closed.jaxpr))(closed.consts, *closed.in_avals)
        self.captured = [*inlined.consts, *closed.consts]
        self.results = results
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
            outputs = apply(equation, [read(atom) for atom in equation.invars])
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

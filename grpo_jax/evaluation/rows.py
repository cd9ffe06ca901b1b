"""Functions of each row, split over devices, with results on the host."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from grpo_jax.devices.mesh import over_rows, pad_rows, replicated


def make_rows_function(function: Callable, mesh: Mesh) -> Callable[..., Any]:
    """`rows_function(*rows) -> results`: each leaf of `rows` and, in NumPy, of the results is `[R, ...]`.

    Args:
      function: of one row's arguments, such as (state, key) -> array.
      mesh: the devices; rows are padded to a number that it divides. All but the last argument may be padded already.
    """
    mapped = over_rows(lambda row: function(*row), mesh)
    program = jax.jit(
        lambda *rows: mapped(tuple(pad_rows(each, mesh) for each in rows)), out_shardings=replicated(mesh)
    )

    def rows_function(*rows):
        num_rows = len(jax.tree.leaves(rows[-1])[0])
        return jax.tree.map(lambda leaf: np.asarray(leaf)[:num_rows], program(*rows))

    return rows_function

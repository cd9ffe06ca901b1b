"""Scores of the policies of many rows, split over devices."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from grpo_jax.devices.mesh import over_rows, pad_rows, replicated
from grpo_jax.types import TrainState


def make_row_scores(
    score: Callable[[TrainState, jax.Array], jax.Array], mesh: Mesh
) -> Callable[[TrainState, jax.Array], np.ndarray]:
    """`scores(states, keys) -> [R, ...]` on the host, with one key for each row.

    Args:
      score: (state, key) -> array, of one row.
      mesh: the devices; rows are padded to a number that it divides.
    """
    score_rows = over_rows(lambda row: score(*row), mesh)

    def padded_scores(*rows):  # the states of a run of several processes are padded already
        return score_rows(tuple(pad_rows(each, mesh) for each in rows))

    padded_scores = jax.jit(padded_scores, out_shardings=replicated(mesh))
    return lambda states, keys: np.asarray(padded_scores(states, keys), np.float64)[: len(keys)]

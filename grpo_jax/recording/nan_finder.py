"""Finds the operation that a loss or a gradient with a NaN or an infinity comes from."""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import Config
from grpo_jax.training.progress import Chunk, Progress
from grpo_jax.training.train_step import make_train_step
from grpo_jax.types import TrainState


class NonFiniteFinder:
    """Repeats the first iteration in which an update was skipped, operation by operation.

    For a run in chunks of one iteration: `check` each chunk, then `remember` the states after it.
    """

    def __init__(self, config: Config):
        self._config = config
        self._before: TrainState | None = None

    def remember(self, progress: Progress) -> None:
        """Keeps a copy of the states that the next chunk starts from."""
        self._before = jax.tree.map(jnp.copy, progress.states)

    def check(self, chunk: Chunk) -> None:
        """Raises FloatingPointError, from the operation at fault, if an update of the chunk was skipped."""
        skipped = np.nan_to_num(chunk.metrics["optim/skipped_updates"][0])
        if not skipped.any():
            return
        row = int(np.argmax(skipped > 0))
        problem = f"an update was not finite at iteration {chunk.iteration} of row {row}"
        try:
            repeat(self._config, jax.tree.map(lambda leaf: leaf[row], self._before))
        except FloatingPointError as error:
            raise FloatingPointError(f"{problem}: {error}") from error
        raise FloatingPointError(f"{problem}; no single operation makes a NaN or an infinity of finite numbers")


def repeat(config: Config, state: TrainState) -> None:
    """One train step, not compiled: raises FloatingPointError at the first operation that makes a NaN."""
    with jax.disable_jit(), jax.debug_nans(True):
        make_train_step(config)(state)

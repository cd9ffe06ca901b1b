"""Host: what the processes of one run tell each other; every process makes these calls, in the same order."""

import pickle
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

from grpo_jax.errors import ConfigError

T = TypeVar("T")

_PIECE = 2**28  # bytes that are sent at once, of which each device holds some copies meanwhile


def is_process_zero() -> bool:
    """Whether this is process 0, which alone reads, writes and prints."""
    return jax.process_index() == 0


def from_process_zero(call: Callable[[], T]) -> T:
    """What `call()` gives in process 0, which alone calls it; in every process.

    The value goes as bytes, so its arrays (NumPy's) arrive bit by bit, and nobody else needs to see the files.

    Raises:
      ConfigError: where the call raises an exception, with its message; process 0 raises the exception itself.
    """
    if jax.process_count() == 1:
        return call()
    if not is_process_zero():
        value, problem = pickle.loads(_broadcast(b""))
        if problem is not None:
            raise ConfigError(problem)
        return value
    try:
        value = call()
    except Exception as error:  # whatever it is, the others must not wait for a value
        _broadcast(pickle.dumps((None, str(error))))
        raise
    _broadcast(pickle.dumps((value, None)))
    return value


def of_every_process(number: float) -> np.ndarray:
    """`[num_processes]`, the number that each of them has; a float in float32."""
    return np.ravel(process_allgather(np.asarray(number)))


def whole_array(array: jax.Array) -> np.ndarray:
    """A copy of all of an array, whichever processes have the parts of it."""
    # On a CPU np.asarray shows the very buffer, which may be donated later.
    return np.array(array if array.is_fully_addressable else process_allgather(array, tiled=True))


def _broadcast(message: bytes) -> bytes:
    """Process 0's message."""
    sent = np.frombuffer(message, np.uint8)
    size = int(broadcast_one_to_all(np.array([len(sent)], np.uint64).view(np.uint8)).view(np.uint64)[0])
    pieces = []
    for begin in range(0, size, _PIECE):
        piece = sent[begin : begin + _PIECE] if is_process_zero() else np.zeros(min(_PIECE, size - begin), np.uint8)
        pieces.append(broadcast_one_to_all(piece).tobytes())
    return b"".join(pieces)

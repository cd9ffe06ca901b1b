"""Communication between the processes of one run, on the host. All must make these calls in the same order."""

import pickle
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

from grpo_jax.errors import ConfigError

T = TypeVar("T")


def is_process_zero() -> bool:
    """Whether this is process 0, the only one that reads, writes and prints."""
    return jax.process_index() == 0


def from_process_zero(call: Callable[[], T]) -> T:
    """Calls `call()` in process 0 alone and returns its value in every process, pickled: only process 0 needs files.

    Raises:
      ConfigError: in the other processes if the call raises an exception, with its message; process 0 raises the
        exception itself.
    """
    if jax.process_count() == 1:
        return call()
    if is_process_zero():
        try:
            value = call()
        except Exception as error:  # any exception: the other processes must not wait forever
            _broadcast(pickle.dumps((None, str(error))))
            raise
        _broadcast(pickle.dumps((value, None)))
        return value
    value, error = pickle.loads(_broadcast(b""))
    if error is not None:
        raise ConfigError(error)
    return value


def from_every_process(number: float) -> np.ndarray:
    """Gathers one number from each process: `[num_processes]`, the same in all of them; floats become float32."""
    return np.ravel(process_allgather(np.asarray(number)))


def whole_array(array: jax.Array) -> np.ndarray:
    """A copy of a whole array, whose parts may be on several processes."""
    # A copy, as on a CPU np.asarray is a view of the buffer, which may be donated later.
    return np.array(array if array.is_fully_addressable else process_allgather(array, tiled=True))


def _broadcast(message: bytes) -> bytes:
    """The message of process 0, in every process."""
    sent = np.frombuffer(message, np.uint8)
    size = int(broadcast_one_to_all(np.array([len(sent)], np.uint64).view(np.uint8)).view(np.uint64)[0])
    return broadcast_one_to_all(sent if is_process_zero() else np.zeros(size, np.uint8)).tobytes()

"""Explains out-of-memory errors: how much memory a program needs, and how many rows would fit."""

import contextlib
import ctypes
import os
from collections.abc import Iterator

import jax


class Memory:
    """The memory that a program of `num_rows` rows needs: `needed` bytes on each device, 0 before it is measured."""

    def __init__(self, num_rows: int):
        self.num_rows, self.needed = num_rows, 0

    def measure(self, program: jax.stages.Compiled) -> jax.stages.Compiled:
        """Sets `needed` to the program's arguments, results and temporary arrays, and returns the program."""
        if sizes := program.memory_analysis():
            self.needed = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
            self.needed -= sizes.alias_size_in_bytes
        return program

    def advice(self) -> str:
        """What to lower; after `measure`, also about how many rows would fit."""
        text = f"not enough memory for {self.num_rows} rows (seeds × hyperparameters) at once"
        available = device_memory()
        if self.needed and available:
            fit = min(self.num_rows - 1, int(0.9 * available / self.needed * self.num_rows))
            text += f": they need {self.needed / 2**30:.1f} GiB of {available / 2**30:.1f} GiB; about {fit} would fit"
        return text + ". Lower num_seeds, num_envs or num_steps, or raise num_minibatches or num_microbatches"


def device_memory() -> int:
    """Bytes of an accelerator's memory, or of a CPU device's share of the host's memory; 0 if unknown."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    is_known = hasattr(os, "sysconf") and all(name in os.sysconf_names for name in names)
    return os.sysconf(names[0]) * os.sysconf(names[1]) // jax.local_device_count() if is_known else 0


def return_free_memory() -> None:
    """Gives the operating system what the process has freed, where the C library can (glibc).

    It keeps freed blocks for later, but XLA's large ones are never taken from them: after the weights of a language
    model are loaded and its program compiled, those are hundreds of megabytes.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # other C libraries; on Windows None is no library
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def explain_out_of_memory(num_rows: int) -> Iterator[Memory]:
    """Turns XLA's out-of-memory error into a MemoryError that says what to lower."""
    memory = Memory(num_rows)
    try:
        yield memory
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "Out of memory" not in str(error):
            raise
        raise MemoryError(memory.advice()) from error

"""What a program of many rows takes of a device's memory, said when there is not enough of it."""

import contextlib
import os
from collections.abc import Iterator

import jax


class Memory:
    """Of the program of `num_rows` rows; `needed` is in bytes on each device, 0 before the program is known."""

    def __init__(self, num_rows: int):
        self.num_rows, self.needed = num_rows, 0

    def of(self, program: jax.stages.Compiled) -> jax.stages.Compiled:
        """The program, once it is known how much it needs: arguments, results and temporary arrays."""
        analysis = program.memory_analysis()
        if analysis is not None:
            sizes = analysis.argument_size_in_bytes + analysis.output_size_in_bytes + analysis.temp_size_in_bytes
            self.needed = sizes - analysis.alias_size_in_bytes
        return program

    def advice(self) -> str:
        """What to lower; with the number of rows that would fit, as far as a row's share of the whole tells."""
        text = f"not enough memory for {self.num_rows} rows (seeds × hyperparameters) at once"
        available = memory_of_a_device()
        if self.needed and available:
            fit = min(self.num_rows - 1, int(0.9 * available / self.needed * self.num_rows))
            text += f": they need {self.needed / 2**30:.1f} GiB of {available / 2**30:.1f} GiB; about {fit} would fit"
        return text + ". Lower num_seeds, num_envs or num_steps, or raise num_minibatches or num_microbatches"


def memory_of_a_device() -> int:
    """In bytes: an accelerator's own, or a CPU device's share of the host's; 0 if that is not known."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    known = hasattr(os, "sysconf") and all(name in os.sysconf_names for name in names)
    return os.sysconf(names[0]) * os.sysconf(names[1]) // jax.local_device_count() if known else 0


@contextlib.contextmanager
def explain_out_of_memory(num_rows: int) -> Iterator[Memory]:
    """Turns XLA's exhausted memory into a MemoryError that says what to lower."""
    memory = Memory(num_rows)
    try:
        yield memory
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "Out of memory" not in str(error):
            raise
        raise MemoryError(memory.advice()) from error

"""Explains out-of-memory errors: how much memory a program needs, and how many rows would fit."""

import contextlib
import os
from collections.abc import Callable, Iterator

import jax


def bytes_needed(program: jax.stages.Compiled | None) -> int:
    """Bytes of a program's arguments, results and temporary arrays on each device; 0 if unknown."""
    if program is None or not (sizes := program.memory_analysis()):
        return 0
    needed = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return needed - sizes.alias_size_in_bytes


def device_memory() -> int:
    """Bytes of an accelerator's memory, or of a CPU device's share of the host's memory; 0 if unknown."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    is_known = hasattr(os, "sysconf") and all(name in os.sysconf_names for name in names)
    return os.sysconf(names[0]) * os.sysconf(names[1]) // jax.local_device_count() if is_known else 0


@contextlib.contextmanager
def explain_out_of_memory(num_rows: int, needed: Callable[[], int]) -> Iterator[None]:
    """Turns XLA's out-of-memory error into a MemoryError that says what to lower; `needed()` is as `bytes_needed`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "Out of memory" not in str(error):
            raise
        raise MemoryError(advice(num_rows, needed())) from error


def advice(num_rows: int, needed: int) -> str:
    """What to lower; where the memory that is needed is known, also how many rows would fit."""
    text = f"not enough memory for {num_rows} rows (seeds × hyperparameters) at once"
    if needed and (available := device_memory()):
        fit = min(num_rows - 1, int(0.9 * available / needed * num_rows))
        text += f": they need {needed / 2**30:.1f} GiB of {available / 2**30:.1f} GiB; "
        text += f"about {fit} would fit" if fit else "not even one would fit"
    lower = "Lower num_seeds, num_envs or num_steps, raise num_minibatches or num_microbatches"
    return f"{text}. {lower}; a sweep can train its rows in parts, with rows_at_once"

"""Compiled programs: where they are kept for the next process, and what to lower where memory lacks."""

import contextlib
import hashlib
import os
import platform
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from grpo_jax.errors import first_line

compiling = threading.Event()
"""Set while a run of this process alone has begun, but trains nothing yet: Ctrl-C may end it at once."""

_SHORTEST = "jax_persistent_cache_min_compile_time_secs"


def cache_folder() -> Path:
    """`~/.cache/grpo_jax/xla/<type of CPU>`: a program compiled for one type of CPU may not run on another."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    cpu = "\n".join([platform.machine(), platform.processor(), *sorted(set(features))])
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "grpo_jax" / "xla" / f"{platform.machine()}-{hashlib.sha256(cpu.encode()).hexdigest()[:12]}"


def keep_programs() -> bool:
    """Keeps what this process compiles from now on in `cache_folder()`; returns whether that changed anything.

    A folder that is set already, such as by JAX_COMPILATION_CACHE_DIR, stays, and so does a cache that is switched off
    (JAX_ENABLE_COMPILATION_CACHE=0). A program that calls the host, as to step an environment there, is left out by jax
    0.10 and kept by jax 0.11, which gives it the functions of the process that loads it. Without a home that can be
    written to, nothing is kept.
    """
    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return False
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # there may be no home at all
        return False
    jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
    jax.config.update(_SHORTEST, 0.0)  # a start has a hundred programs of less than JAX's second
    return True


@contextlib.contextmanager
def kept_programs() -> Iterator[None]:
    """In the block, programs are kept as `keep_programs` says; after it, JAX's settings are what they were."""
    shortest = getattr(jax.config, _SHORTEST)
    changed = keep_programs()
    try:
        yield
    finally:
        if changed:
            jax.config.update("jax_compilation_cache_dir", None)
            jax.config.update(_SHORTEST, shortest)
            reset_cache()  # else JAX goes on with the folder, also where the user then sets another


@contextlib.contextmanager
def explain_out_of_memory(num_rows: int) -> Iterator[None]:
    """Turns XLA's out-of-memory error into a MemoryError that says what to lower."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "Out of memory" not in str(error):
            raise
        raise MemoryError(
            f"not enough memory for {num_rows} row(s) (seeds × hyperparameters) ({first_line(error)[:200]}). "
            "Lower num_seeds, num_envs or num_steps, raise num_minibatches or num_microbatches; a sweep can train its "
            "rows in parts, with rows_at_once"
        ) from error

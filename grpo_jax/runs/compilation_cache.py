"""Host: where compiled programs are kept, so that the second process with the same program need not compile it."""

import contextlib
import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache


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
    (JAX_ENABLE_COMPILATION_CACHE=0). A program that calls the host is left out by jax 0.10 and kept by jax 0.11, which
    gives it the functions of the process that loads it. Without a home that can be written to, nothing is kept.
    """
    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return False
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # there may be no home at all
        return False
    jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
    return True


@contextlib.contextmanager
def kept_programs(enabled: bool = True) -> Iterator[None]:
    """In the block, programs are kept as `keep_programs` says; after it, JAX's settings are what they were."""
    changed = enabled and keep_programs()
    try:
        yield
    finally:
        if changed:
            jax.config.update("jax_compilation_cache_dir", None)
            reset_cache()  # else JAX goes on with the folder, also where the user then sets another

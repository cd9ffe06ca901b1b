"""Where a measurement comes from: hardware, settings of XLA and JAX, versions of packages, commit."""

import os
import subprocess
from pathlib import Path
from typing import Any

from grpo_jax.commands.harness.command import PATIENT
from grpo_jax.runs.run_spec import hardware, versions

# What XLA and JAX read from the environment, and docs/accelerators.md describes.
VARIABLES = ("XLA_FLAGS", "JAX_DEFAULT_MATMUL_PRECISION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")


def commit() -> str | None:
    """The commit of the working tree, with a mark if it holds changes; None outside of a repository."""
    arguments = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(arguments, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def provenance() -> dict[str, Any]:
    """What a file of results says of where it was measured."""
    values = {name: os.environ.get(name, "").removeprefix(PATIENT).strip() for name in VARIABLES}
    settings = {name: value for name, value in values.items() if value}
    return {"hardware": hardware(), "settings": settings, "versions": versions(), "commit": commit()}

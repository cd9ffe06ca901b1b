"""Environments named "suite:name": token tasks, and suites of other packages, each an extra."""

import contextlib
import io
import subprocess
import warnings
from importlib import import_module
from typing import Any

from grpo_jax.environments.host import Gymnasium
from grpo_jax.environments.suites.grids import Craftax, Navix, XLand
from grpo_jax.environments.suites.jumanji import Jumanji
from grpo_jax.environments.suites.pgx import Pgx
from grpo_jax.environments.suites.physics import Brax, Playground
from grpo_jax.environments.tokens import make_task
from grpo_jax.errors import ConfigError, nearest
from grpo_jax.importing import pip_install

SUITES = {
    "brax": Brax,
    "craftax": Craftax,
    "gymnasium": Gymnasium,
    "jumanji": Jumanji,
    "navix": Navix,
    "pgx": Pgx,
    "playground": Playground,
    "xland": XLand,
    "tokens": make_task,
}
"""Functions from the name after the colon to an environment, by the suite before the colon.

A few names raise a ConfigError that says why.
"""

NAMES = {
    "brax": lambda: import_module("brax.envs")._envs,
    "craftax": lambda: [f"Craftax-{each}-v1" for each in ("Symbolic", "Pixels", "Classic-Symbolic", "Classic-Pixels")],
    "jumanji": lambda: import_module("jumanji").registered_environments(),
    "navix": lambda: import_module("navix").registry(),
    "pgx": lambda: import_module("pgx").available_envs(),
    "playground": lambda: import_module("mujoco_playground").registry.ALL_ENVS,
    "xland": lambda: import_module("xminigrid").registered_environments(),
}
"""All names of each suite in JAX: `NAMES["navix"]()`."""


def from_suite(suite: str, name: str) -> Any:
    """An object with gymnax's interface, or a token task.

    Raises:
      ConfigError: if the suite is not installed, has no such environment, or cannot download what it needs.
    """
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # MJX prints that it has no warp
            if suite in NAMES:
                warnings.simplefilter("ignore")  # brax recommends MJX's own suites
                known = NAMES[suite]()
                if name not in known:
                    raise ConfigError(f"{suite} has no environment {name!r}: {nearest(name, known)}")
            return SUITES[suite](name)
    except ImportError as error:
        raise ConfigError(f"'{suite}:{name}' needs {suite}: {pip_install(suite)} ({error})") from error
    except (OSError, LookupError, subprocess.CalledProcessError) as error:  # robots, levels
        raise ConfigError(f"'{suite}:{name}' needs data that could not be downloaded: {error}") from error

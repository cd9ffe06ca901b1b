"""Environments named "suite:name": token tasks, and suites of other packages, each an extra."""

import subprocess
import warnings
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

The class of a suite in JAX lists the names: `SUITES["navix"].names()`. A few of them raise a ConfigError that says why.
"""


def from_suite(suite: str, name: str) -> Any:
    """An object with gymnax's interface, or a token task.

    Raises:
      ConfigError: if the suite is not installed, has no such environment, or cannot download what it needs.
    """
    make = SUITES[suite]
    try:
        if not hasattr(make, "names"):
            return make(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # brax recommends MJX's own suites
            known, world = make.names(), name.partition("/")[0]
            if world not in known:
                raise ConfigError(f"{suite} has no environment {name!r}: {nearest(world, known)}")
            return make(name)
    except ImportError as error:
        raise ConfigError(f"'{suite}:{name}' needs {suite}: {pip_install(suite)} ({error})") from error
    except (OSError, LookupError, subprocess.CalledProcessError) as error:  # robots, levels, rulesets
        raise ConfigError(f"'{suite}:{name}' needs data that could not be downloaded: {error}") from error

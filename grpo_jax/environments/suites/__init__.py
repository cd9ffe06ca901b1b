"""Environments named "suite:name": token tasks, and those of other packages, each a file here and an extra."""

from typing import Any

from grpo_jax.environments.suites.brax import Brax
from grpo_jax.environments.suites.craftax import Craftax
from grpo_jax.environments.suites.envpool import EnvPool
from grpo_jax.environments.suites.gymnasium import Gymnasium
from grpo_jax.environments.suites.jumanji import Jumanji
from grpo_jax.environments.suites.navix import Navix
from grpo_jax.environments.suites.pgx import Pgx
from grpo_jax.environments.suites.playground import Playground
from grpo_jax.environments.suites.xland import XLand
from grpo_jax.environments.tokens import make_task
from grpo_jax.errors import ConfigError

SUITES = {
    "brax": Brax,
    "craftax": Craftax,
    "envpool": EnvPool,
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
      ConfigError: if the suite is not installed or has no such environment.
    """
    try:
        return SUITES[suite](name)
    except ImportError as error:
        raise ConfigError(f"'{suite}:{name}' needs {suite}: pip install 'grpo-jax[{suite}]' ({error})") from error

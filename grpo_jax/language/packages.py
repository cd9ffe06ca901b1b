"""The packages of the extra `lm`, imported where they are used."""

import importlib
from types import ModuleType

from grpo_jax.errors import ConfigError


def need(package: str) -> ModuleType:
    """The package.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"language models need {package}: pip install 'grpo-jax[lm]' ({error})") from error

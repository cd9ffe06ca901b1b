"""Checks of the names of a suite's environments."""

from collections.abc import Iterable

from grpo_jax.errors import ConfigError, nearest


def check_known(suite: str, name: str, known: Iterable[str]) -> None:
    """Raises ConfigError, which names the nearest ones, if a suite has no environment of this name."""
    if name not in known:
        raise ConfigError(f"{suite} has no environment {name!r}: {nearest(name, known)}")

"""Environments that run on the host in Python, such as gymnasium's."""

from grpo_jax.environments.host.environment import HostEnvironment, HostState

__all__ = ["HostEnvironment", "HostState"]

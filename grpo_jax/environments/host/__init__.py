"""Environments that run on the host, in Python or C++, such as gymnasium's and envpool's."""

from grpo_jax.environments.host.environment import HostEnvironment, HostState
from grpo_jax.environments.host.gymnasium_interface import Simulators

__all__ = ["HostEnvironment", "HostState", "Simulators"]

"""Values of states without a critic, for the slot `baseline` of an `Algorithm`.

| baseline | a value is |
|---|---|
| `same_step_baseline()` | the mean return of the group's other members from the same step on |
| `state_hash_baseline()` | the mean return of others from exactly the same state on |
| `kernel_baseline()` | the mean return of all others, weighted by how similar their states are |
"""

from grpo_jax.baselines.baseline import Baseline, stateless
from grpo_jax.baselines.gigpo import GigpoHyperparams, gigpo_advantage, same_state_advantage, same_turn_advantage
from grpo_jax.baselines.kernel import (
    KernelHyperparams,
    Window,
    kernel_baseline,
    kernel_values,
    observed,
    policy_features,
)
from grpo_jax.baselines.same_state import same_step_baseline, state_hash_baseline, state_hash_values

__all__ = [
    "Baseline",
    "GigpoHyperparams",
    "KernelHyperparams",
    "Window",
    "gigpo_advantage",
    "kernel_baseline",
    "kernel_values",
    "observed",
    "policy_features",
    "same_state_advantage",
    "same_step_baseline",
    "same_turn_advantage",
    "state_hash_baseline",
    "state_hash_values",
    "stateless",
]

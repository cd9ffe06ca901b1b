"""Values of states without a critic, for the slot `baseline` of an `Algorithm`.

A value comes from the returns of other rollouts only, so that subtracting it leaves the policy gradient unbiased. Steps
that are not valid, and those whose return is not finite, have no part in the values of others.

| baseline | a value is |
|---|---|
| `same_step_baseline` | the mean return of the group's other members from the same step on |
| `kernel_baseline` | the mean return of all others, weighted by how similar their states are |
"""

from grpo_jax.baselines.baseline import same_step_baseline
from grpo_jax.baselines.gigpo import GigpoHyperparams, gigpo_advantage, same_state_advantage, same_turn_advantage
from grpo_jax.baselines.kernel import KernelHyperparams, Window, kernel_baseline, kernel_values

__all__ = ["GigpoHyperparams", "KernelHyperparams", "Window", "gigpo_advantage", "kernel_baseline"]
__all__ += ["kernel_values", "same_state_advantage", "same_step_baseline", "same_turn_advantage"]

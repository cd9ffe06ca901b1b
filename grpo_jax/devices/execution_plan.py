"""How a train step is laid out for a kind of device.

CPUs, GPUs and TPUs are fastest with different programs. A GPU waits for launches, so it gets few and large kernels. A
CPU waits for memory beyond its cache, so it gets small parts, and it may branch. All plans compute the same numbers up
to rounding, on every device.
"""

import dataclasses

import jax

from grpo_jax.errors import ConfigError, nearest


@dataclasses.dataclass(frozen=True)
class ExecutionPlan:
    """The layout of a train step, static."""

    value_passes: int
    """Passes over a rollout that compute values and log-probabilities; 0, or with a policy carry: in each step."""
    packed_steps: bool
    """The carry of the rollout's loop is one array, and so is the record of a step: fewer copies."""
    steps_per_loop: int
    """Steps in one iteration of the loops of rollouts and of recurrent layers (unrolling)."""
    num_reset_draws: int
    """Start states of each environment drawn at once, behind a branch, when none is left; 0: one at every step."""
    samples_per_part: int
    """The most samples of a minibatch whose gradient is computed at once."""
    skips_empty_parts: bool
    """Parts without a valid sample are skipped, by a loop of traced length."""
    steps_per_check: int = 0
    """Rollouts of one episode each stop when all have ended: the most steps between two checks; 0: they do not stop."""

    def __post_init__(self):
        """Checks types and ranges."""
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), int(field.name in ("steps_per_loop", "samples_per_part"))
            if type(value) is not field.type or value < least:
                allowed = "True or False" if field.type is bool else f"an integer of at least {least}"
                raise ConfigError(f"{field.name}={value!r} must be {allowed}")


CPU = ExecutionPlan(
    value_passes=0,
    packed_steps=False,
    steps_per_loop=1,
    num_reset_draws=8,
    samples_per_part=512,
    skips_empty_parts=True,
)

GPU = ExecutionPlan(
    value_passes=4,
    packed_steps=True,
    steps_per_loop=4,
    num_reset_draws=0,
    samples_per_part=2**21,
    skips_empty_parts=False,
)

TPU = GPU
"""A TPU waits for no launches, but its arrays are padded: the GPU's layout takes a fifth of the CPU's memory there."""

PLANS = {"cpu": CPU, "gpu": GPU, "tpu": TPU}


def resolve_plan(plan: str | ExecutionPlan) -> ExecutionPlan:
    """The plan of this name; "auto" stands for JAX's default backend. ConfigError for an unknown name."""
    if isinstance(plan, ExecutionPlan):
        return plan
    if plan == "auto":
        return PLANS.get(jax.default_backend(), GPU)
    if not isinstance(plan, str) or plan not in PLANS:
        raise ConfigError(f"unknown execution_plan {plan!r}: {nearest(str(plan), ('auto', *PLANS))}")
    return PLANS[plan]

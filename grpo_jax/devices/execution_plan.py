"""Which program a train step is, for a kind of device: all that depends on the device is named on this page.

CPUs, GPUs and TPUs are fastest with different programs. A GPU waits for launches, so it gets few and large kernels. A
CPU waits for memory beyond its cache, so it gets small parts, and it may branch. All plans compute the same numbers up
to rounding, on every device. A field stays as long as a timing speaks for it: the factors below are of whole train
steps, on an H200 at 2,048 environments / 65,536 / 2,048 seeds of 4, or on one CPU core at 64, CartPole.

What XLA chooses while it compiles for a platform, or what holds on all of them:

| where | what |
|---|---|
| `devices/mesh.py`, `over_rows` | rows one after another (`lax.map`) on a CPU, all at once (`vmap`) elsewhere |
| `policies/dense.py`, `product` | a kernel's gradient has its smaller operand transposed on a CPU, behind barriers |
| `policies/distributions.py` | few actions are sampled without reductions, but not on a CPU |
| `policies/hopper.py` | on the plan "hopper": the kernel for CUDA, XLA's products for other platforms |
| `objectives/returns.py` | the loop over returns is unrolled, but not on a CPU |
| `objectives/reductions.py` | the sums of a loss and its metrics: one stacked sum on a CPU, one pass elsewhere |
| `objectives/slots.py` | barriers, without which XLA computes scores and advantages several times |
| `rollouts/rollout.py` | with several steps in an iteration: a barrier, or XLA computes a step several times |
| `rollouts/scan.py` | with several steps in an iteration: records are packed (launches were counted, not timed) |
| `updates/loss.py`, `updates/minibatches.py` | barriers, without which XLA computes a gather or a loss several times |
| `updates/orders.py` | the rounds of a computed order are a loop on a CPU, and one kernel elsewhere |
| `updates/optimizers.py` | small parameters are one vector for the optimiser: less to compile |
| `updates/epochs.py` | where a kernel computes the networks, the loop over updates carries that vector |
| `rollouts/resets.py`, `updates/epochs.py` | environments that are split over devices: no branch, one gather |
"""

import dataclasses

import jax

from grpo_jax.errors import ConfigError, nearest


@dataclasses.dataclass(frozen=True)
class ExecutionPlan:
    """The layout of a train step, static."""

    value_passes: int
    """Passes over a rollout that compute values and log-probabilities; 0, or with a policy carry: in each step."""
    steps_per_loop: int
    """Steps in one iteration of the loops of rollouts (the most that divide it) and of recurrent layers (unrolling)."""
    num_reset_draws: int
    """Start states of each environment drawn at once, behind a branch, when none is left; 0: one for every step, and
    those of an iteration of the loop together, up to 256 MiB for each row."""
    samples_per_part: int
    """The most samples of a minibatch whose gradient is computed at once."""
    skips_empty_parts: bool
    """Parts without a valid sample are skipped, by a loop of traced length."""
    steps_per_check: int = 0
    """Rollouts of one episode each stop when all have ended: the most steps between two checks; 0: they do not stop."""
    minibatches_ahead: bool = True
    """All minibatches are made before the first update: a GPU then launches 28 kernels for each instead of 39."""
    hopper_kernels: bool = False
    """A kernel of `grpo_jax.kernels` computes the networks that it serves; `Config.networks_by` says whether."""


CPU = ExecutionPlan(
    value_passes=0,
    steps_per_loop=1,
    num_reset_draws=8,  # PPO is 1.04 times as fast as with 0
    samples_per_part=512,  # PPO is 1.17 times, GRPO 4.2 times as fast as in one part
    skips_empty_parts=True,  # GRPO's short episodes, in rollouts of 500 steps: 3.0 times as fast as with all parts
)

GPU = ExecutionPlan(
    value_passes=4,  # 1.14 / 1.03 / 1.12 times as fast as in each step
    steps_per_loop=4,  # 1.03 / 1.04 / 1.11 times as fast as 1, and 12 s of compiling instead of 15
    num_reset_draws=0,
    samples_per_part=2**21,  # bounds memory: minibatches of the three sizes are one part
    skips_empty_parts=False,
)

TPU = dataclasses.replace(GPU, samples_per_part=2**16, minibatches_ahead=False)
"""Compiled for a v5e, not timed: 38 MiB of temporary memory for PPO at 4,096 environments, 100 with the GPU's plan."""

HOPPER = dataclasses.replace(GPU, hopper_kernels=True)  # prototype of the kernel: 1.40 / 2.12 / 1.26 times as fast

PLANS = {"cpu": CPU, "gpu": GPU, "hopper": HOPPER, "tpu": TPU}


def resolve_plan(plan: str | ExecutionPlan) -> ExecutionPlan:
    """The plan of this name; "auto" stands for JAX's default backend, and on Hopper, such as an H100, for "hopper".

    Raises:
      ConfigError: for an unknown name, and for "hopper" on another GPU. Machines without a GPU compile it ahead of
        time, and run it by XLA.
    """
    if isinstance(plan, ExecutionPlan):
        return plan
    if not isinstance(plan, str) or plan not in ("auto", *PLANS):
        raise ConfigError(f"unknown execution_plan {plan!r}: {nearest(str(plan), ('auto', *PLANS))}")
    if plan not in ("auto", "hopper"):
        return PLANS[plan]
    backend = jax.default_backend()
    device, on_gpu = jax.devices()[0], backend == "gpu"
    is_hopper = on_gpu and getattr(device, "compute_capability", "") == "9.0"
    if plan == "hopper" and on_gpu and not is_hopper:
        others = f"as an H100 or H200 has, and this is {device.device_kind}; use 'auto'"
        raise ConfigError(f"execution_plan='hopper' is for compute capability 9.0, {others}")
    has_kernels = is_hopper and jax.__version_info__ >= (0, 11)
    return HOPPER if plan == "hopper" or has_kernels else PLANS.get(backend, GPU)

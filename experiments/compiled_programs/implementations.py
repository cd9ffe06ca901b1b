"""Every train step whose compiled program is compared, by name: ours and the reference implementations."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from grpo_jax import Config
from grpo_jax.algorithms import RECURSIVE_LSTD_GAE
from grpo_jax.commands.harness.settings import ON_RELATIVE_POSITIONS
from grpo_jax.policies import MLP, Transformer

from ..harness import reference_implementations as reference
from ..harness.reference_implementations import Implementation, Size
from ..harness.workloads import GROUP_SIZE, make_config, ours

TOKENS = "tokens:addition-2"
"""The environment of "GRPO, tokens"."""

REFERENCES: dict[str, Callable[[str, Size], Implementation]] = {
    "plain PPO": reference.plain_ppo,
    "rejax PPO": reference.rejax_ppo,
}


def ppo_with(**fields) -> Callable[[str, Size], Config]:
    return lambda environment, size: dataclasses.replace(make_config(environment, size, critic=True), **fields)


OURS: dict[str, Callable[[str, Size], Config]] = {
    "PPO": ppo_with(),
    "GRPO": lambda environment, size: make_config(environment, size, critic=False),
    "PPO, one network": ppo_with(network=MLP(Size(1).hidden_sizes, shared_critic=True)),
    "kernel_gae": ppo_with(algorithm="kernel_gae", group_size=GROUP_SIZE),
    "lstd_gae": ppo_with(algorithm="lstd_gae"),
    "recursive_lstd_gae": ppo_with(algorithm="recursive_lstd_gae"),
    "relative positions": ppo_with(algorithm=RECURSIVE_LSTD_GAE._replace(baseline=ON_RELATIVE_POSITIONS)),
    "PPO, GRU": ppo_with(network=MLP(Size(1).hidden_sizes, recurrent="gru")),
    "GRPO, tokens": lambda environment, size: Config(
        environment=environment,
        algorithm="grpo",
        num_envs=size.num_envs,
        group_size=GROUP_SIZE,
        num_epochs=size.num_epochs,
        num_minibatches=size.num_minibatches,
        network=Transformer(width=64, num_layers=2, num_heads=4),
    ),
}

NAMES = (*REFERENCES, *OURS)


class Workload(NamedTuple):
    implementation: Implementation
    num_steps: int
    num_gradient_steps: int


def make_workload(name: str, environment: str, num_envs: int, execution_plan: str, shuffle_blocks: int = 1) -> Workload:
    """The implementation of this name; the execution plan and the blocks are those of ours, the others have none."""
    size = Size(num_envs)
    if name in REFERENCES:
        implementation, num_steps = REFERENCES[name](environment, size), size.num_steps
    else:
        config = dataclasses.replace(
            OURS[name](environment, size), execution_plan=execution_plan, shuffle_blocks=shuffle_blocks
        )
        implementation, num_steps = ours(config), config.num_steps
    return Workload(implementation, num_steps, size.num_gradient_steps)


def by_environment(names: Sequence[str], environments: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """The environments with the implementations that run in each: token tasks are environments of their own."""
    tokens = tuple(name for name in names if name == "GRPO, tokens")
    others = tuple(name for name in names if name not in tokens)
    return [(environment, others) for environment in environments if others] + [(TOKENS, tokens)] * bool(tokens)

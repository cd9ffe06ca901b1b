"""Every train step whose compiled program is compared, by name: ours and the reference implementations."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from grpo_jax import Config
from grpo_jax.algorithms import RECURSIVE_LSTD_GAE
from grpo_jax.commands.harness.settings import ON_RELATIVE_POSITIONS
from grpo_jax.policies import MLP, Transformer

from ..harness import reference_implementations as reference
from ..harness.reference_implementations import Implementation
from ..harness.workloads import GROUP_SIZE, make_config, ours

TOKENS = "tokens:addition-2"
"""The environment of "GRPO, tokens"."""

REFERENCES: dict[str, Callable[[str, int], Implementation]] = {
    "plain PPO": reference.plain_ppo,
    "rejax PPO": reference.rejax_ppo,
}


def ppo_with(**fields) -> Callable[[str, int], Config]:
    return lambda environment, num_envs: dataclasses.replace(make_config(environment, num_envs, critic=True), **fields)


OURS: dict[str, Callable[[str, int], Config]] = {
    "PPO": ppo_with(),
    "GRPO": lambda environment, num_envs: make_config(environment, num_envs, critic=False),
    "PPO, one network": ppo_with(network=MLP(reference.HIDDEN_SIZES, shared_critic=True)),
    "kernel_gae": ppo_with(algorithm="kernel_gae", group_size=GROUP_SIZE),
    "lstd_gae": ppo_with(algorithm="lstd_gae"),
    "recursive_lstd_gae": ppo_with(algorithm="recursive_lstd_gae"),
    "relative positions": ppo_with(algorithm=RECURSIVE_LSTD_GAE._replace(baseline=ON_RELATIVE_POSITIONS)),
    "PPO, GRU": ppo_with(network=MLP(reference.HIDDEN_SIZES, recurrent="gru")),
    "GRPO, tokens": lambda environment, num_envs: Config(
        environment=environment,
        algorithm="grpo",
        num_envs=num_envs,
        group_size=GROUP_SIZE,
        num_epochs=reference.NUM_EPOCHS,
        num_minibatches=reference.NUM_MINIBATCHES,
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
    if name in REFERENCES:
        implementation, num_steps = REFERENCES[name](environment, num_envs), reference.NUM_STEPS
    else:
        config = dataclasses.replace(
            OURS[name](environment, num_envs), execution_plan=execution_plan, shuffle_blocks=shuffle_blocks
        )
        implementation, num_steps = ours(config), config.num_steps
    return Workload(implementation, num_steps, reference.NUM_EPOCHS * reference.NUM_MINIBATCHES)


def by_environment(names: Sequence[str], environments: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """The environments with the implementations that run in each: token tasks are environments of their own."""
    tokens = tuple(name for name in names if name == "GRPO, tokens")
    others = tuple(name for name in names if name not in tokens)
    return [(environment, others) for environment in environments if others] + [(TOKENS, tokens)] * bool(tokens)

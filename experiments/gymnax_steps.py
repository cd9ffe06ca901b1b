"""gymnax's environments with its own steps and with the lean ones: `python -m experiments.gymnax_steps`.

What an H100 would execute in a train step of PPO (as `experiments.accelerators` counts it, with the same extra), and
how many steps of random play a core of this machine makes in a second, with both steps in turns.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.limits import Count
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.environments import group_parameters, make_environment
from grpo_jax.environments.gymnax_names import names, registered
from grpo_jax.environments.lean import LEAN

from .compiled_programs.ahead_of_time import Case, choose_backend, compile_case
from .compiled_programs.program_tables import GPU
from .compiled_programs.targets import TARGETS
from .environments import random_play
from .harness.summaries import read_results, write_results

PARTS = ("programs", "speeds")


@dataclasses.dataclass
class Arguments:
    """Counts launches of train steps and measures steps per second, with gymnax's own steps and with ours.

    The results of an environment are written as soon as it is done, beside those that the folder has already.
    """

    environments: tuple[str, ...] = ()
    """Names of gymnax's environments; by default all but MNISTBandit-bsuite, which needs a download."""
    parts: tuple[Literal[PARTS], ...] = PARTS
    """What to find out: the launches of compiled programs, and the steps per core-second of random play."""
    num_envs: Count = 2048
    """Parallel environments of the train steps; random play has 64."""
    repeats: Count = 7
    """Rounds of random play."""
    out: Path = Path("runs/gymnax_steps")
    """Folder for the results. What it has is measured only if the environment is named."""


def main(arguments: Arguments) -> None:
    choose_backend()
    results = read_results(arguments.out)
    for name in arguments.environments or [name for name in names() if name != "MNISTBandit-bsuite"]:
        result = results.setdefault(name, {})
        steps = [registered(name), name] if name in LEAN else [name]  # gymnax's own, ours
        for part in arguments.parts:
            if arguments.environments or part not in result:
                find_out = {"programs": programs, "speeds": speeds}[part]
                result[part] = find_out(steps, arguments)
                write_results(results, arguments.out, HEADER, row)
        print(" | ".join(row(name, result)), flush=True)


def programs(steps: list[Any], arguments: Arguments) -> list[dict[str, Any]]:
    """What an H100 would execute in a train step of PPO, with each step of an environment."""
    cases = [Case("PPO", step, arguments.num_envs, 1, {}) for step in steps]
    return [compile_case(case, TARGETS["h100"], "gpu", {}) for case in cases]


def speeds(steps: list[Any], arguments: Arguments, num_envs: int = 64, num_steps: int = 1024) -> list[float]:
    """Steps per core-second of random play with each step of an environment, in turns: medians, without resets."""
    plays, key = [], jax.random.key(0)
    for step in steps:
        env = make_environment(step)
        params = group_parameters(env, None, num_envs, 1)
        play = jax.jit(lambda key, env=env, params=params: random_play(env, params, key, num_envs, num_steps))
        plays.append(play.lower(key).compile())

    def seconds(play):
        started = time.process_time()  # other programs do not count
        jax.block_until_ready(play(key))
        return time.process_time() - started

    rounds = [[seconds(play) for play in plays] for _ in range(1 + arguments.repeats)]
    return [num_envs * num_steps / median for median in np.median(rounds[1:], axis=0)]


HEADER = ["", "launches", "an environment step", "a gradient step", "waits", "model ms", "steps per core-second"]


def row(name: str, result: dict[str, Any]) -> list[str]:
    """The cells of an environment: with gymnax's own step → with the lean one, or one number where both are equal."""

    def cell(part, number):
        return " → ".join(dict.fromkeys(map(number, result.get(part, ()))))

    programs = (cell("programs", GPU[column]) for column in ("launches", "/step", "/gradient", "waits", "model ms"))
    return [name, *programs, cell("speeds", lambda rate: f"{float(f'{rate:.3g}'):,.0f}")]


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

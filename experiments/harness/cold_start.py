"""Seconds from a new process to the first metrics of training and to a solved task: `benchmark --cold`, `scoreboard`.

Every implementation is measured in processes of its own, in turns: with an empty compilation cache, then with what
that process left in it. Those of `SAME_WORK` train with 64 environments, 128 steps, 4 epochs of 4 minibatches and one
learning rate, those of `TUNED` with the settings of `grpo-jax train`.
"""

import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

STAGES = ("import", "build", "trace", "compile", "first metrics")
PROGRAMS = ("fusions", "HLO", "StableHLO")
SAME_WORK = ("rejax PPO", "plain PPO", "PPO")
TUNED = {"PPO, tuned": "ppo", "GRPO": "grpo"}
"""The algorithms of `grpo-jax train`."""
IMPORTS = {"rejax PPO": ("gymnax", "rejax"), "plain PPO": ("gymnax", "flax.linen", "optax")}
OURS = ("grpo_jax.training.train",)
"""What using `Config`, `make_init` and `make_train_step` imports; `import grpo_jax` alone imports nothing."""


class Task(NamedTuple):
    """A mean return of training to reach, and what it is trained with until then."""

    environment: str
    solved: float
    learning_rate: float = 1e-3  # of those that do the same work
    total_steps: float = 500_000.0  # of `grpo-jax train`; all give up after 4 times as many
    program_steps: int = 80_000  # a program makes at least as many; returns are looked at after each
    window: int = 1  # steps of each environment whose episodes are averaged; at least those of an iteration

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of a run, of which the last ends when the task is solved."""
        return (*STAGES, f"to {self.solved:g}")

    def iterations(self, returns: Sequence[float], length: int) -> int | None:
        """How many iterations it took until the mean over the window reached the return; None if it has not yet.

        Args:
          returns: of each iteration the mean return of the episodes that ended in it; NaN without any.
          length: iterations of a window.
        """
        for end in range(length, len(returns) + 1):
            ended = [each for each in returns[end - length : end] if math.isfinite(each)]
            if ended and float(np.mean(ended)) >= self.solved:
                return end
        return None


CARTPOLE = Task("CartPole-v1", 475.0)


def measure(names: Sequence[str], num_seeds: int, track: Callable = iter, task: Task = CARTPOLE) -> list[dict]:
    """A row for each implementation and cache: medians over seeds of the seconds since the process began."""
    runs = {(name, cache): [] for cache in ("empty", "warm") for name in names}
    turns = [(seed, name) for seed in range(num_seeds) for name in names]
    for seed, name in track(turns):
        with tempfile.TemporaryDirectory() as folder:
            cache = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            for state in ("empty", "warm"):
                words = [name, str(seed), repr(time.time()), json.dumps(task)]
                command = [sys.executable, "-m", __name__, *words]
                done = subprocess.run(command, env=os.environ | cache, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"{name} with seed {seed} failed: {done.stderr[-2000:]}")
                runs[name, state].append(json.loads(done.stdout.splitlines()[-1]))
    fields = (*task.stages, *PROGRAMS)
    return [
        {"implementation": name, "cache": cache, "seeds": results}
        | {field: float(np.median([result[field] for result in results])) for field in fields}
        for (name, cache), results in runs.items()
    ]


def one_run(name: str, seed: int, began: float, task: Task = CARTPOLE) -> dict[str, float]:
    """Seconds since `began` at which each stage was over, the size of the program that trains, and its steps."""
    marks = {}

    def mark(stage):
        marks[stage] = time.time() - began

    for module in IMPORTS.get(name, OURS):
        importlib.import_module(module)
    import jax

    mark("import")
    paused = time.time()  # what only this measurement imports does not count
    from .trainings import same_work, tuned_training
    from .workloads import strong

    began += time.time() - paused
    if name in SAME_WORK:
        training = same_work(name, task.environment, task.learning_rate)
    else:
        training = tuned_training(TUNED[name], task.environment, task.total_steps, seed)
    mark("build")
    key, num_iterations = jax.random.key(seed), math.ceil(task.program_steps / training.num_samples)
    start = jax.jit(lambda key: jax.tree.map(strong, training.init(key)))
    chunk = jax.jit(lambda state: jax.lax.scan(lambda s, _: training.step(s), state, length=num_iterations))
    lowered_start = start.lower(key)
    lowered = chunk.lower(jax.eval_shape(start, key))
    mark("trace")
    start, chunk = lowered_start.compile(), lowered.compile()
    mark("compile")
    state, returns, steps, solved = start(key), [], [], None
    # rejax's returns are those of each environment's last episode, and so no window of it is needed
    length = 1 if name == "rejax PPO" else math.ceil(task.window / training.num_steps)
    while solved is None and sum(steps) < 4 * task.total_steps:
        state, metrics = chunk(state)
        returns += np.asarray(metrics["episode/return_mean"]).tolist()
        if "first metrics" not in marks:
            mark("first metrics")
        solved = task.iterations(returns, length)
        mark(task.stages[-1])
        steps += np.asarray(metrics.get("environment/steps", [training.num_samples] * num_iterations)).tolist()
    steps_needed = sum(steps[:solved])
    if solved is None:
        steps_needed = marks[task.stages[-1]] = math.inf
    program = chunk.as_text()
    counts = {
        "fusions": len(re.findall(r" fusion\(", program)),
        "HLO": len(re.findall(r"^\s+(?:ROOT )?%?\S+ = ", program, re.MULTILINE)),
        "StableHLO": len(re.findall(r"^\s+(?:%\S+ = )?\"?(?:stablehlo|func|call)\b", lowered.as_text(), re.MULTILINE)),
    }
    return marks | counts | {"steps": steps_needed}


if __name__ == "__main__":
    name, seed, began, task = sys.argv[1:]
    print(json.dumps(one_run(name, int(seed), float(began), Task(*json.loads(task)))))

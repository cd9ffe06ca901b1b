"""Seconds from a new process to the first metrics of training and to a solved CartPole: `benchmark --cold`.

Every implementation is measured in processes of its own, in turns: with an empty compilation cache, then with what
that process left in it. The three PPOs train with 64 environments, 128 steps, 4 epochs of 4 minibatches and one
learning rate, ten iterations at a time, and GRPO with the settings of `grpo-jax train`, two at a time.
"""

import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np

SOLVED, LEARNING_RATE, MOST_PROGRAMS = 475.0, 1e-3, 25
STAGES = ("import", "build", "trace", "compile", "first metrics", "to 475")
PROGRAMS = ("fusions", "HLO", "StableHLO")
IMPORTS = {"rejax PPO": ("gymnax", "rejax"), "plain PPO": ("gymnax", "flax.linen", "optax")}
OURS = ("grpo_jax.training.train",)
"""What using `Config`, `make_init` and `make_train_step` imports; `import grpo_jax` alone imports nothing."""


def measure(names: Sequence[str], num_seeds: int, track: Callable = iter) -> list[dict]:
    """A row for each implementation and cache: medians over seeds of the seconds since the process began."""
    runs = {(name, cache): [] for cache in ("empty", "warm") for name in names}
    turns = [(seed, name) for seed in range(num_seeds) for name in names]
    for seed, name in track(turns):
        with tempfile.TemporaryDirectory() as folder:
            cache = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            for state in ("empty", "warm"):
                command = [sys.executable, "-m", __name__, name, str(seed), repr(time.time())]
                done = subprocess.run(command, env=os.environ | cache, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"{name} with seed {seed} failed: {done.stderr[-2000:]}")
                runs[name, state].append(json.loads(done.stdout.splitlines()[-1]))
    return [
        {"implementation": name, "cache": cache, "seeds": results}
        | {field: float(np.median([result[field] for result in results])) for field in STAGES + PROGRAMS}
        for (name, cache), results in runs.items()
    ]


def one_run(name: str, seed: int, began: float) -> dict[str, float]:
    """Seconds since `began` at which each stage was over, and the size of the program that trains."""
    marks = {}

    def mark(stage):
        marks[stage] = time.time() - began

    for module in IMPORTS.get(name, OURS):
        importlib.import_module(module)
    import jax

    mark("import")
    paused = time.time()  # what only this measurement imports does not count
    from grpo_jax.commands.harness.settings import settings

    from . import reference_implementations as reference
    from . import workloads

    began += time.time() - paused
    reference.LEARNING_RATE, num_iterations, size = LEARNING_RATE, 10, reference.Size(num_envs=64)
    if name == "rejax PPO":
        init, step = reference.rejax_ppo("CartPole-v1", size, logged=True)
    elif name == "plain PPO":
        init, step = reference.plain_ppo("CartPole-v1", size)
    elif name == "PPO":
        init, step = workloads.ours(workloads.make_config("CartPole-v1", size, critic=True))
    else:
        from grpo_jax import Config, Hyperparams, make_init, make_train_step

        config = Config(environment="CartPole-v1", algorithm="grpo", **settings("CartPole-v1", "grpo"))
        step, begin = make_train_step(config), make_init(config)
        init, num_iterations = functools.partial(begin, hyperparams=Hyperparams()), 2
    mark("build")

    key = jax.random.key(seed)
    start = jax.jit(lambda key: jax.tree.map(workloads.strong, init(key)))
    chunk = jax.jit(lambda state: jax.lax.scan(lambda s, _: step(s), state, length=num_iterations))
    lowered_start = start.lower(key)
    lowered = chunk.lower(jax.eval_shape(start, key))
    mark("trace")
    start, chunk = lowered_start.compile(), lowered.compile()
    mark("compile")
    state = start(key)
    for _ in range(MOST_PROGRAMS):
        state, metrics = chunk(state)
        returns = np.asarray(metrics["episode/return_mean"])
        if "first metrics" not in marks:
            mark("first metrics")
        if (returns >= SOLVED).any():
            mark("to 475")
            break
    marks.setdefault("to 475", float("inf"))
    program = chunk.as_text()
    counts = {
        "fusions": len(re.findall(r" fusion\(", program)),
        "HLO": len(re.findall(r"^\s+(?:ROOT )?%?\S+ = ", program, re.MULTILINE)),
        "StableHLO": len(re.findall(r"^\s+(?:%\S+ = )?\"?(?:stablehlo|func|call)\b", lowered.as_text(), re.MULTILINE)),
    }
    return marks | counts


if __name__ == "__main__":
    print(json.dumps(one_run(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))

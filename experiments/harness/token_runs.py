"""What experiments on token tasks share: warm starts kept in a file, held-out accuracies along a run, samples."""

import dataclasses
import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import serialization
from rich.console import Console

from experiments.harness.runs import Plan, Score
from grpo_jax import Config, TrainState
from grpo_jax.environments.tokens import ASK, text
from grpo_jax.errors import ConfigError
from grpo_jax.evaluation.answers import answer
from grpo_jax.policies import Architecture
from grpo_jax.recording.files import part_of_record, write_json
from grpo_jax.recording.statistics import pass_at_k
from grpo_jax.training.imitation import WarmStart, warm_start
from grpo_jax.training.run import Progress
from grpo_jax.types import PyTree

HELD_OUT = {"held_out": 1}
NUM_FINAL, NUM_PROMPTS, NUM_SAMPLES = 512, 64, 16


def _exact_match(config: Config, state: TrainState, key: jax.Array) -> jax.Array:
    answers = answer(config, state.params, key, num_prompts=NUM_FINAL, greedy=True, env_params=HELD_OUT)
    return answers.correct.mean()


EXACT_MATCH = Score(_exact_match, f"exact match of greedy answers to {NUM_FINAL} held-out prompts")


# --- warm starts -----------------------------------------------------------------------------------------------------


def warm_started(
    config: Config, keys: jax.Array, *, target: float, learning_rate: float, paths: Sequence[Path], console: Console
) -> WarmStart:
    """A warm start, from the files that there are, else made; then all of them keep it.

    Raises:
      ConfigError: a file has a warm start made otherwise, two differ, or the target was not reached.
    """
    about = {
        "task": config.env.task.name,
        "target": target,
        "learning_rate": learning_rate,
        "keys": np.asarray(jax.random.key_data(keys)).tolist(),
        **{field.name: str(getattr(config, field.name)) for field in dataclasses.fields(Architecture)},
    }

    def report(accuracy, updates):
        console.print(f"warm start, {updates.max()} updates: sampled accuracy {_shares(accuracy)}", soft_wrap=True)

    start = None
    for path in paths:
        if path.exists():
            kept = _read_warm_start(path, about)
            if start is not None and not jax.tree.all(jax.tree.map(np.array_equal, start.params, kept.params)):
                raise ConfigError(f"the warm start in {path} has other params than {paths[0]}; name another file")
            start = kept
            console.print(f"Warm start from {path}: sampled accuracy {_shares(start.accuracy)}", soft_wrap=True)
    if start is None:
        start = warm_start(config, keys, target=target, learning_rate=learning_rate, report=report)
        if (start.accuracy < target).any():
            raise ConfigError(f"the warm start did not reach a sampled accuracy of {target} in all seeds; lower it")
    for path in paths:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            temporary.write_bytes(serialization.msgpack_serialize({**start._asdict(), "about": about}))
            temporary.replace(path)
    return start


def _read_warm_start(path: Path, about: Mapping[str, Any]) -> WarmStart:
    """What a file has, if that was made as `about` says."""
    saved = serialization.msgpack_restore(path.read_bytes())
    made = saved.pop("about")
    for name, value in about.items():
        if made.get(name) != value:
            raise ConfigError(
                f"{name} is {value!r} here, and {made.get(name)!r} in the warm start {path}; write what that was made "
                "with, or name another file (--warm-start), for a new run another folder (--out)"
            )
    return WarmStart(**saved)


def as_started(config: Config, actor: PyTree, keys: jax.Array) -> PyTree:
    """Parameters of a policy whose networks, a critic as well, begin as the actor of a warm start; heads are new."""

    def of_row(key, actor):
        return {
            name: {part: actor.get(part, value) for part, value in network.items()}
            for name, network in config.policy.init(key).items()
        }

    return jax.jit(jax.vmap(of_row))(keys, actor)


# --- accuracies along a run ------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """What policies can do after some steps; each but the first `[num_seeds]`."""

    steps: np.ndarray
    greedy: np.ndarray
    sampled: np.ndarray
    pass_at_8: np.ndarray
    well_formed: np.ndarray


class Watch:
    """Answers to held-out prompts, before, along and after each run, kept in accuracy.json.

    Args:
      out: where; an accuracy.json that is there is continued.
      key: of the prompts, which stay the same along all runs.
      num_points: of each run, about.
    """

    def __init__(self, out: Path, key: jax.Array, num_points: int = 20):
        self._path, self._key, self._num_points = part_of_record(out / "accuracy.json"), key, num_points
        self.curves: dict[str, list[Point]] = self._kept()
        self._programs = {}

    def __call__(self, plan: Plan, progress: Progress) -> None:
        """As `Study.run_all` calls it."""
        distance = int(plan.hyperparams.total_steps) / self._num_points
        steps = np.asarray(progress.steps)
        # A run that goes on from a checkpoint makes again what came after it.
        points = [point for point in self.curves.get(plan.label, []) if (point.steps < steps).any()]
        self.curves[plan.label] = points
        done = steps.max() + plan.config.steps_per_iteration > plan.hyperparams.total_steps
        if points and not done and (steps - points[-1].steps).max() < distance:
            return
        if plan.label not in self._programs:
            self._programs[plan.label] = jax.jit(jax.vmap(self._answers(plan.config), in_axes=(0, None)))
        answers = self._programs[plan.label](progress.states.params, self._key)
        greedy, sampled, formed = map(np.asarray, answers)
        points.append(
            Point(steps, greedy.mean((1, 2)), sampled.mean((1, 2)), pass_at_k(sampled, 8), formed.mean((1, 2)))
        )
        curves = {name: [point._asdict() for point in points] for name, points in self.curves.items()}
        write_json(self._path, curves)

    def _kept(self) -> dict[str, list[Point]]:
        """The curves in accuracy.json, of the process that a resumed run began in."""
        if not self._path.exists():
            return {}
        curves = json.loads(self._path.read_text())
        return {
            label: [Point(**{name: np.array(values) for name, values in point.items()}) for point in points]
            for label, points in curves.items()
        }

    def _answers(self, config: Config):
        def answers(params, key):
            greedy = answer(config, params, key, num_prompts=256, greedy=True, env_params=HELD_OUT)
            sampled = answer(config, params, key, num_prompts=NUM_PROMPTS, num_samples=NUM_SAMPLES, env_params=HELD_OUT)
            return greedy.correct, sampled.correct, sampled.well_formed

        return answers


def show_samples(config: Config, params: PyTree, key: jax.Array, console: Console, *, when: str) -> None:
    """Prints what a policy writes after some held-out prompts, and whether it is right."""
    task = config.env.task
    ask = functools.partial(answer, config, num_prompts=6, num_samples=2, env_params=HELD_OUT)
    prompts, completions, correct, _ = jax.tree.map(np.asarray, jax.jit(ask)(params, key))
    console.print(f"Sampled answers to held-out prompts {when}, of the first seed:", soft_wrap=True)
    for prompt, samples, verdicts in zip(prompts, completions, correct, strict=True):
        judged = zip(samples, ("right" if right else "wrong" for right in verdicts), strict=True)
        line = ",  ".join(f"{text(task, sample)} {verdict}" for sample, verdict in judged)
        console.print(f"  {text(task, prompt)}{task.vocabulary[ASK]} {line}", soft_wrap=True)


def plot_accuracies(curves: dict[str, list[Point]], names: tuple[str, ...], title: str, out: Path) -> None:
    """Draws accuracy.png: a panel for each run, a curve for each name: the median of the seeds, each of them faint."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(5, len(curves))
    rows = -(-len(curves) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.2 * columns + 1, 3.2 * rows), sharey=True, squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(curves) :]:
        axis.set_visible(False)
    for axis, (label, points) in zip(axes.flat, curves.items(), strict=False):
        steps = np.stack([point.steps for point in points])
        for color, name in enumerate(names):
            values = np.stack([getattr(point, name) for point in points])
            axis.plot(steps, values, color=f"C{color}", alpha=0.25, linewidth=0.8)
            axis.plot(steps.mean(1), np.median(values, axis=1), color=f"C{color}", label=name.replace("_", " "))
        axis.set(title=label, ylim=(-0.02, 1.02), xlabel="tokens sampled (each seed)")
        axis.title.set_fontsize("small")
        axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("share of answers to held-out prompts")
    axes[0, 0].legend(frameon=False, fontsize="small")
    figure.suptitle(title, fontsize="small")
    figure.savefig(out / "accuracy.png", dpi=130)
    plt.close(figure)


def _shares(values: np.ndarray) -> str:
    return " ".join(f"{value:.2f}" for value in values)

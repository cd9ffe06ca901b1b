"""Held-out prompts along a run of a language model: rewards, pass@k, samples."""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from grpo_jax import Config, TrainState, evaluate
from grpo_jax.commands.harness.figures import with_interval, write_markdown
from grpo_jax.language import LanguageTask, sample_completions
from grpo_jax.recording import Curve, RunSpec, bootstrap_interval, iqm, pass_at_k
from grpo_jax.recording.figures import draw_curve, panels
from grpo_jax.recording.files import write_json
from grpo_jax.recording.trackers import log_table
from grpo_jax.sweeps.runs import Score
from grpo_jax.training.progress import Chunk, Progress

NUM_FINAL, NUM_SHOWN = 128, 4
Point = Mapping[str, Any]
"""A measurement: `iteration`, and for each seed `tokens`, `rewards` and `greedy` by name, `length`, `pass_at_k`."""


def _held_out_reward(config: Config, state: TrainState, key: jax.Array) -> jax.Array:
    return evaluate(config, state, key, num_episodes=NUM_FINAL, env_params={"held_out": 1}).returns.mean()


HELD_OUT_REWARD = Score(_held_out_reward, f"mean reward of {NUM_FINAL} completions of held-out prompts")


class HeldOutCurves:
    """Measures mean rewards and pass@k on held-out prompts before, during and after a run, and prints samples.

    Everything is written to held_out.json, which a resumed run continues. `settings` are the flags of the command.
    """

    def __init__(self, task: LanguageTask, out: Path, console: Console, settings: Any):
        self._task, self._console, self._settings = task, console, settings
        self._path = out / "held_out.json"
        self.points: list[dict[str, Any]] = json.loads(self._path.read_text()) if self._path.exists() else []
        self._prompts = np.arange(task.num_training, len(task.tokens))[: settings.num_held_out]
        self._program = None

    def __call__(self, plan: RunSpec, progress: Progress, chunk: Chunk | None) -> None:
        """Adds a point if it is time for one; the callback of `Study.run_all`."""
        iteration, every = progress.iteration, self._settings.sample_every
        # A resumed run repeats the points after its checkpoint.
        self.points = [point for point in self.points if point["iteration"] < iteration]
        if not progress.ended.all() and self.points and iteration // every == self.points[-1]["iteration"] // every:
            return
        if self._program is None:
            sample = functools.partial(sample_completions, plan.config, self._task)

            def complete(state, prompts, key):
                samples = sample(state, prompts, key, num_samples=self._settings.num_samples)
                return jnp.concatenate([samples, sample(state, prompts, key, greedy=True)], axis=1)

            self._program = jax.jit(jax.vmap(complete, in_axes=(0, None, None)))
        key = jax.random.fold_in(jax.random.key(self._settings.seed), 2)
        completions = np.asarray(self._program(progress.states, jnp.asarray(self._prompts), key))
        self._add(iteration, progress.steps, completions)

    def _add(self, iteration: int, steps: np.ndarray, completions: np.ndarray) -> None:
        """Adds the point of completions `[R, N, K + 1, L]`, the last of which are greedy."""
        prompts = np.broadcast_to(self._prompts[:, None], completions.shape[:3])
        values = self._task.score(prompts, completions)
        completions, values, greedy = completions[:, :, :-1], values[:, :, :-1], values[:, :, -1]
        rewards = self._task.rewards
        correct = values[..., 0] >= self._settings.correct_at
        ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= correct.shape[-1]]
        self.points.append(
            {
                "iteration": iteration,
                "tokens": steps.tolist(),
                "rewards": {reward.name: values[..., i].mean((1, 2)).tolist() for i, reward in enumerate(rewards)},
                "greedy": {reward.name: greedy[..., i].mean(1).tolist() for i, reward in enumerate(rewards)},
                "length": (completions >= 0).sum(-1).mean((1, 2)).tolist(),
                "pass_at_k": {str(k): np.asarray(pass_at_k(correct, k)).tolist() for k in ks},
            }
        )
        write_json(self._path, self.points)
        self._show(iteration, completions[0, :, 0], values[0, :, 0])

    def _show(self, iteration: int, completions: np.ndarray, values: np.ndarray) -> None:
        """Prints the point, and the first of the completions `[N, L]` of the first seed; W&B gets a table of all."""
        point, names = self.points[-1], [reward.name for reward in self._task.rewards]
        means = ", ".join(f"{name} {np.mean(point['rewards'][name]):.3f}" for name in names)
        passes = ", ".join(f"pass@{k} {np.mean(shares):.3f}" for k, shares in point["pass_at_k"].items())
        self._console.print(f"Held-out prompts after {iteration} iterations: {means}; {passes}", soft_wrap=True)
        contents = self._task.all_prompts.contents
        shown = [
            each if isinstance(each, str) else each[-1]["content"] for each in (contents[i] for i in self._prompts)
        ]
        texts = self._task.model.tokenizer.decode_batch(completions)
        rows = [[*pair, *parts] for *pair, parts in zip(shown, texts, values.tolist(), strict=True)]
        for prompt, text, *parts in rows[:NUM_SHOWN]:
            scores = ", ".join(f"{name} {value:g}" for name, value in zip(names, parts, strict=True))
            self._console.print(f"  {prompt!r} -> {text!r} ({scores})", soft_wrap=True)
        if self._settings.recording.wandb is not None:
            log_table("held_out", ["prompt", "completion", *names], rows, iteration=iteration)

    def finish(self) -> None:
        """Prints the means before and after the run, and draws them all along it: held_out.md, held_out.png."""
        rows = before_and_after(self.points)
        table = Table(f"held-out prompts ({len(self._prompts)})", "before", "after")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)
        folder = self._path.parent
        write_markdown(folder / "held_out.md", [column.header for column in table.columns], rows)
        draw_points(self.points, folder / "held_out.png")
        self._console.print(f"All along the run: held_out.json and held_out.png in {folder}", soft_wrap=True)


def series(point: Point) -> dict[str, np.ndarray]:
    """The means of a point by what they are of, each `[num_seeds]`."""
    means = {f"{name}, sampled": values for name, values in point["rewards"].items()}
    means |= {f"{name}, greedy": values for name, values in point["greedy"].items()}
    means |= {f"pass@{k}": values for k, values in point["pass_at_k"].items() if k != "1"}
    return {name: np.asarray(values) for name, values in means.items()}


def before_and_after(points: Sequence[Point]) -> list[list[str]]:
    """Rows of the name of each mean, its value in the first point, and in the last; of several seeds with intervals."""

    def cell(values: np.ndarray) -> str:
        return f"{values[0]:.3f}" if len(values) == 1 else with_interval(values, ".3f")

    first, last = ({**series(point), "tokens": np.asarray(point["length"])} for point in (points[0], points[-1]))
    return [[name, cell(first[name]), cell(last[name])] for name in first]


def draw_points(points: Sequence[Point], path: Path) -> None:
    """Draws each mean over the sampled tokens of a seed: a panel for samples, one for greedy completions and pass@k."""
    names = list(series(points[0]))
    left = [name for name in names if name.endswith(", sampled")]
    groups = [left, [name for name in names if name not in left]]
    steps, num_seeds = np.mean([point["tokens"] for point in points], axis=1), len(points[0]["tokens"])
    title = f"Held-out prompts: IQM of {num_seeds} seeds, 95% bootstrap interval" if num_seeds > 1 else ""
    with panels(path, 2, size=(6.2, 3.4), title=title, sharey=True) as (_, axes):
        for axis, group in zip(axes, groups, strict=True):
            for number, name in enumerate(group):
                values = [series(point)[name] for point in points]
                low, high = zip(*map(bootstrap_interval, values), strict=True)
                draw_curve(axis, Curve(steps, np.array([iqm(each) for each in values]), low, high), f"C{number}", name)
            axis.set(xlabel="tokens sampled (each seed)")
            axis.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
        axes[0].set_ylabel("mean")

"""Held-out prompts along a run of a language model: rewards, pass@k, samples."""

import functools
import json
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from grpo_jax import Config, TrainState, evaluate
from grpo_jax.language import LanguageTask, sample_completions
from grpo_jax.recording import Plan, pass_at_k
from grpo_jax.recording.files import remove_if_unused, write_json
from grpo_jax.recording.trackers import log_table
from grpo_jax.training.progress import Chunk, Progress

from .runs import Score

NUM_FINAL, NUM_SHOWN = 128, 4


def _held_out_reward(config: Config, state: TrainState, key: jax.Array) -> jax.Array:
    return evaluate(config, state, key, num_episodes=NUM_FINAL, env_params={"held_out": 1}).returns.mean()


HELD_OUT_REWARD = Score(_held_out_reward, f"mean reward of {NUM_FINAL} completions of held-out prompts")


class Settings(Protocol):
    """The flags that `HeldOutCurves` reads."""

    seed: int
    sample_every: int
    num_held_out: int
    num_samples: int
    correct_at: float
    wandb: str | None


class HeldOutCurves:
    """Measures mean rewards and pass@k on held-out prompts before, during and after a run, and prints samples.

    Everything is written to held_out.json, which a resumed run continues.

    Args:
      task: prompts and rewards.
      out: the folder.
      console: for the samples.
      settings: the flags of the command.
    """

    def __init__(self, task: LanguageTask, out: Path, console: Console, settings: Settings):
        self._task, self._console, self._settings = task, console, settings
        self._path = remove_if_unused(out / "held_out.json")
        self.points: list[dict[str, Any]] = json.loads(self._path.read_text()) if self._path.exists() else []
        self._prompts = np.arange(task.num_training, len(task.tokens))[: settings.num_held_out]
        self._program = None

    def __call__(self, plan: Plan, progress: Progress, chunk: Chunk | None) -> None:
        """Adds a point if it is time for one; the callback of `Study.run_all`."""
        iteration, every = progress.iteration, self._settings.sample_every
        # A resumed run repeats the points after its checkpoint.
        self.points = [point for point in self.points if point["iteration"] < iteration]
        last = iteration >= plan.max_episodes / plan.config.num_envs
        if not last and self.points and iteration // every == self.points[-1]["iteration"] // every:
            return
        if self._program is None:
            sample = functools.partial(
                sample_completions, plan.config, self._task, num_samples=self._settings.num_samples
            )
            self._program = jax.jit(jax.vmap(sample, in_axes=(0, None, None)))
        key = jax.random.fold_in(jax.random.key(self._settings.seed), 2)
        completions = np.asarray(self._program(progress.states, jnp.asarray(self._prompts), key))
        self._add(iteration, progress.steps, completions)

    def _add(self, iteration: int, steps: np.ndarray, completions: np.ndarray) -> None:
        """Adds the point of completions `[R, N, K, L]`."""
        prompts = np.broadcast_to(self._prompts[:, None], completions.shape[:3])
        values = self._task.score(prompts, completions)
        rewards = self._task.rewards
        correct = values[..., 0] >= self._settings.correct_at
        ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= correct.shape[-1]]
        self.points.append(
            {
                "iteration": iteration,
                "tokens": steps.tolist(),
                "rewards": {reward.name: values[..., i].mean((1, 2)).tolist() for i, reward in enumerate(rewards)},
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
        if self._settings.wandb is not None:
            log_table("held_out", ["prompt", "completion", *names], rows, iteration=iteration)

    def finish(self) -> None:
        """Prints the change of each mean over the run."""
        first, last = self.points[0], self.points[-1]
        for name in first["rewards"]:
            before, after = (np.mean(point["rewards"][name]) for point in (first, last))
            self._console.print(f"Held-out {name}: {before:.3f} before, {after:.3f} after.", soft_wrap=True)

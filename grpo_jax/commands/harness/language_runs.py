"""Held-out prompts along a run of a language model: rewards, pass@k, samples."""

import functools
import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from grpo_jax import TrainState
from grpo_jax.commands.harness.figures import print_table
from grpo_jax.commands.harness.held_out_points import advise, before_and_after, diagnose, draw_points, read_points
from grpo_jax.config import behaviour_policy, kept_with
from grpo_jax.environments.tokens import PAD
from grpo_jax.evaluation.generation import Sampling, generate
from grpo_jax.language import CompletionFile, LanguageTask
from grpo_jax.language.rewards import text_of
from grpo_jax.recording.files import add_lines, write_json
from grpo_jax.recording.run_folder import StopSignal
from grpo_jax.recording.statistics import pass_at_k
from grpo_jax.runs.progress import Chunk, Progress
from grpo_jax.runs.run_spec import RunSpec
from grpo_jax.training.host_side import played_again

NUM_SHOWN = 4
SHARE = 0.2
"""The most that measurements cost by default, in completions, as a share of those of training."""


def measurement_interval(settings: Any, num_iterations: int | None, num_held_out: int) -> int:
    """Iterations between two measurements on so many prompts: as set, 0 for none, or so few that all cost `SHARE`.

    If there are any, one is made before and one after training.
    """
    if settings.sample_every is not None or num_iterations is None:
        return 10 if settings.sample_every is None else settings.sample_every
    budget = SHARE * settings.num_prompts * settings.group_size * num_iterations
    affordable = max(int(budget // (num_held_out * (settings.num_samples + 1))), 2)
    return max(math.ceil(num_iterations / (affordable - 1)), 1)


class HeldOutCurves:
    """Measures mean rewards and pass@k on held-out prompts before, during and after a run, and prints samples.

    The prompts are a random choice of the held-out ones, the same in every run. Means are written to held_out.json, all
    completions to samples.jsonl, those of training to completions.jsonl; a resumed run continues them. A seed stops
    once it reaches the `stop_at_reward`.

    Args:
      task, plan: of the run.
      folder: of the files.
      console: shows means and samples.
      arguments: the flags of the command.
      received: signals, after which the run ends.

    Attributes:
      states: after the latest iterations; the arguments are attributes as well.
    """

    def __init__(
        self,
        task: LanguageTask,
        plan: RunSpec,
        folder: Path,
        console: Console,
        arguments: Any,
        received: Sequence[int] = (),
    ):
        self.task, self.plan, self.folder, self.console, self.arguments = task, plan, folder, console, arguments
        self._path, self._samples, self._received = folder / "held_out.json", folder / "samples.jsonl", received
        held_out = np.arange(task.num_training, len(task.tokens))
        self._prompts = np.random.default_rng(0).permutation(held_out)[: arguments.num_held_out]
        self._texts = [text_of(task.all_prompts.contents[index]) for index in self._prompts]
        self._every = measurement_interval(arguments, plan.hyperparams.num_iterations, len(self._prompts))
        kept = arguments.keep_completions
        count = None if kept == "all" else kept * plan.config.group_size
        self._completions = CompletionFile(folder / "completions.jsonl", task, count)
        self._verdict, self.states = None, None
        self._names = [reward.name for reward in task.rewards]
        self._ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= arguments.num_samples]
        self.points = read_points(self._path, self._names, self._ks, len(plan.keys))

    def __call__(self, progress: Progress, chunk: Chunk | None) -> Progress | None:
        """Adds a point if it is time for one; the callback of `Study.train`."""
        self.states = progress.states
        self._completions(progress, chunk)
        if self._received and not self.arguments.recording.checkpoint_every:
            raise StopSignal(self._received[0], self.folder)
        iteration, every = progress.iteration, self._every
        if not every:
            return None
        # A resumed run repeats the points after its checkpoint, and keeps that of the checkpoint itself.
        self.points = [point for point in self.points if point["iteration"] <= iteration]
        last = self.points[-1]["iteration"] if self.points else -1
        if last < iteration:
            if not progress.ended.all() and self.points and iteration // every == last // every:
                return None
            self._add(progress)
        limit = self.arguments.stop_at_reward
        if limit is None or iteration == 0:
            return None
        return progress._replace(stopped=progress.stopped | (self.last_rewards >= limit))

    @property
    def last_rewards(self) -> np.ndarray:
        """`[R]`: the mean reward of the sampled completions of the last measurement: those of its parts, weighted."""
        means = self.points[-1]["rewards"]
        return sum(reward.weight * np.array(means[reward.name]) for reward in self.task.rewards)

    def _complete(self, states: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Completions of the prompts `[R, N, K + 1, L]`, the last of which are greedy, and the answers in them."""
        config, task, num_samples = self.plan.config, self.task, self.arguments.num_samples
        ends = {"end_token": task.model.tokenizer.end_tokens, "stops": task.stops}

        def complete(state, prompts, key, answers):
            policy = behaviour_policy(config, state.normalizer, state.hyperparams)
            sample = functools.partial(generate, policy, state.params, prompts, key, plan=config.plan)
            kinds = Sampling(num_samples, **ends), Sampling(temperature=0, **ends)
            if task.respond is not None:
                kinds = kinds[0]._replace(answers=answers[:, :-1]), kinds[1]._replace(answers=answers[:, -1:])
            return jnp.concatenate([sample(kind).tokens for kind in kinds], axis=1)

        make = functools.partial(jax.jit, jax.vmap(complete, in_axes=(0, None, None, 0)))
        program = kept_with(config, ("held-out completions", num_samples), make)
        key = jax.random.fold_in(jax.random.key(self.arguments.seed), 2)
        prompt = np.broadcast_to(self._prompts[:, None], (len(self.plan.keys), len(self._prompts), num_samples + 1))

        def play(answers):
            return np.asarray(program(states, task.tokens[self._prompts], key, answers)), answers

        none = np.full((*prompt.shape, task.max_completion), PAD, np.int32)
        return played_again(play, none, lambda played: task.conversations.answer(prompt, *played))

    def _add(self, progress: Progress) -> None:
        """Measures a point, writes it, and shows it."""
        iteration, steps = progress.iteration, progress.steps
        completions, answers = self._complete(progress.states)
        prompts = np.broadcast_to(self._prompts[:, None], completions.shape[:3])
        began = time.perf_counter()
        values, rewarded = self.task.judge(prompts, completions, answers=answers, iteration=iteration)
        seconds, cut = time.perf_counter() - began, self.task.is_cut(completions, answers)
        self._write_samples(iteration, completions, answers, values)
        greedy = _means(values[:, :, -1:], rewarded[:, :, -1:])
        completions, values, rewarded = (each[:, :, :-1] for each in (completions, values, rewarded))
        means = values.sum(2, where=rewarded) / np.maximum(rewarded.sum(2), 1)  # of each prompt
        correct = values[..., 0] >= self.arguments.correct_at
        self.points.append(
            {
                "iteration": iteration,
                "tokens": steps.tolist(),
                "rewards": self._by_name(_means(values, rewarded)),
                "errors": self._by_name(means.std(1) / math.sqrt(means.shape[1])),
                "greedy": self._by_name(greedy),
                "length": (completions >= 0).sum(-1).mean((1, 2)).tolist(),
                "cut": cut[:, :, :-1].mean((1, 2)).tolist(),
                "all_equal": (values[..., 0] == values[..., :1, 0]).all(-1).mean(1).tolist(),
                "pass_at_k": {str(k): np.asarray(pass_at_k(correct, k)).tolist() for k in self._ks},
            }
        )
        write_json(self._path, self.points)
        self.console.print(f"Rewards of {cut.size} completions took {seconds:.2g} s", soft_wrap=True)
        texts = self.task.texts(self._prompts, completions[0, :, 0], answers[0, :, 0])
        self._show(iteration, texts, values[0, :, 0])
        total = values @ [reward.weight for reward in self.task.rewards]
        if advice := not iteration and advise(self.points[0], self._names[0], np.ptp(total, -1).any()):
            self.console.print(advice, soft_wrap=True)

    def _by_name(self, means: np.ndarray) -> dict[str, list[float]]:
        """`[R, rewards]` by the names of the rewards."""
        return dict(zip(self._names, means.T.tolist(), strict=True))

    def _write_samples(self, iteration: int, completions: np.ndarray, answers: np.ndarray, values: np.ndarray) -> None:
        """Writes a line for each seed and prompt, in place of those of a run that a resumed one repeats."""
        lines, texts = [], self._texts
        for seed, prompt in np.ndindex(completions.shape[:2]):
            made, given = completions[seed, prompt], answers[seed, prompt]
            *sampled, greedy = self.task.texts(np.full(len(made), self._prompts[prompt]), made, given)
            rewards = self._by_name(values[seed, prompt])
            line = {"iteration": iteration, "seed": seed, "prompt": texts[prompt]}
            lines.append({**line, "sampled": sampled, "greedy": greedy, "rewards": rewards})
        add_lines(self._samples, lines, begin=iteration)

    def _show(self, iteration: int, texts: list, values: np.ndarray) -> None:
        """Prints the point and some of the completions `[N]` of the first seed."""
        point, names = self.points[-1], self._names
        means = ", ".join(f"{name} {np.mean(point['rewards'][name]):.3f}" for name in names)
        passes = ", ".join(f"pass@{k} {np.mean(shares):.3f}" for k, shares in point["pass_at_k"].items())
        if (verdict := diagnose(self.points, len(self._prompts))) and verdict.split(":")[0] != self._verdict:
            self._verdict = verdict.split(":")[0]
            self.console.print(verdict, soft_wrap=True)
        about = f"{passes}; {np.mean(point['length']):.1f} tokens, {np.mean(point['cut']):.0%} cut at the limit"
        self.console.print(f"Held-out prompts after {iteration} iterations: {means}; {about}", soft_wrap=True)
        prompts = without_shared_beginning(self._texts)
        for prompt, text, parts in [*zip(prompts, texts, values.tolist(), strict=True)][:NUM_SHOWN]:
            scores = ", ".join(f"{name} {value:g}" for name, value in zip(names, parts, strict=True))
            self.console.print(f"  {prompt!r} -> {text!r} ({scores})", soft_wrap=True)

    def finish(self) -> None:
        """Prints the means before and after the run, and draws them all along it, if there are measurements."""
        if not self._every:
            return
        about = measured_on(self.task, self.arguments)
        names = about, "before", "after"
        print_table(self.console, [dict(zip(names, row, strict=True)) for row in before_and_after(self.points)])
        draw_points(self.points, self.folder / "held_out.png", about)
        files = "held_out.json, samples.jsonl and held_out.png"
        self.console.print(f"All along the run: {files} in {self.folder}", soft_wrap=True)


def measured_on(task: LanguageTask, settings: Any) -> str:
    """Which completions are measured, such as "32 held-out prompts, 8 sampled completions of each"."""
    count = min(settings.num_held_out, len(task.tokens) - task.num_training)
    return f"{count} held-out prompts, {settings.num_samples} sampled completions of each"


def without_shared_beginning(texts: Sequence[str]) -> Sequence[str]:
    """Texts with "..." in place of more than 20 characters, up to a space, with which all of them begin."""
    shared = re.match(r"(.*\s)?", os.path.commonprefix(texts), re.DOTALL).end()
    return [f"...{text[shared:]}" for text in texts] if shared > 20 and len(texts) > 1 else texts


def _means(values: np.ndarray, rewarded: np.ndarray) -> np.ndarray:
    """The mean of each reward over the completions `[R, N, K, rewards]` that it applies to; 0 without any."""
    return values.sum((1, 2), where=rewarded) / np.maximum(rewarded.sum((1, 2)), 1)

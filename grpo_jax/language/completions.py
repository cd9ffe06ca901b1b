"""`completions.jsonl`: what a run of a language model completes in training, and what that is worth."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.environments.tokens import PAD
from grpo_jax.language.rewards import text_of
from grpo_jax.language.task import LanguageTask
from grpo_jax.recording.files import add_lines, as_path
from grpo_jax.runs.progress import Chunk, Progress


class CompletionFile:
    """Writes completions of training to a file of JSON lines: a callback of `run`, also of one that is resumed.

    A line has `iteration`, as in metrics.jsonl, `seed`, `prompt` (of a chat the last message), `completion`, `rewards`
    by name, null where one does not apply, `reward`, their weighted sum, `advantage`, the mean over its tokens, null if
    nothing is learnt from it, and `cut`: whether the limit ended it. The lines of a group follow one another.

    Args:
      path: of the file.
      task: of the run.
      count: completions of each iteration, the first ones, such as those of two groups; None: all, 0: no file.
    """

    def __init__(self, path: str | Path, task: LanguageTask, count: int | None = None):
        self._path, self._task, self._count = as_path(path), task, count

    def __call__(self, progress: Progress, chunk: Chunk | None) -> None:
        """Adds the completions of an iteration; before the first one, removes those that a resumed run makes again."""
        if self._count != 0:
            begin, lines = (progress.iteration, ()) if chunk is None else (None, self._lines(chunk))
            add_lines(self._path, lines, begin=begin)

    def _lines(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        states, params, (values, weights, rewarded), advantage = chunk.scored
        if values.ndim == 4:  # of steps
            values, weights, rewarded = values.sum(2), weights[:, :, 0], rewarded.any(2)
        names = [reward.name for reward in self._task.rewards]
        for seed in np.flatnonzero(chunk.metrics["environment/steps"][-1]).tolist():
            kept = np.s_[seed, : self._count]
            prompt, tokens = states.problem[kept], states.tokens[kept]
            answers = params.get("answers", np.full(states.tokens.shape, PAD))[kept]
            rewards = [dict(zip(names, row, strict=True)) for row in np.where(rewarded, values, np.nan)[kept].tolist()]
            columns = {
                "prompt": [text_of(self._task.all_prompts.contents[index]) for index in prompt],
                "completion": self._task.texts(prompt, tokens, answers),
                **{"rewards": rewards, "reward": (values * weights).sum(-1)[kept].tolist()},
                "advantage": np.where(np.isfinite(advantage), advantage, np.nan)[kept].tolist(),
                "cut": self._task.is_cut(tokens, answers).tolist(),
            }
            for row in zip(*columns.values(), strict=True):
                yield {"iteration": chunk.iteration, "seed": seed, **dict(zip(columns, row, strict=True))}

"""Host: the metrics of a run in TensorBoard or Weights & Biases, of many seeds as quantiles."""

import hashlib
import json
import os
import textwrap
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from grpo_jax.recording.run_folder import describe_run
from grpo_jax.runs.run_spec import RunSpec, folder_name

QUARTILES = {"": 0.5, "_q25": 0.25, "_q75": 0.75}
"""The quantile of each suffix of a metric's name; those of metrics that are no returns are medians alone."""


class Tracker(Protocol):
    """Receives the metrics of a run beside `metrics.jsonl`."""

    def record(self, iteration: int, steps: np.ndarray, metrics: Mapping[str, np.ndarray]) -> None:
        """Takes a chunk, iterations from that index on; arrays are `[n, num_seeds]`, NaN where there is no value."""

    def close(self) -> None:
        """Writes the lines that are not written yet."""


class TensorBoard:
    """TensorBoard's event files; their steps are the median over seeds of the environment steps.

    Each setting has its own folder, so that TensorBoard shows them side by side, with the config and hyperparameters.

    Args:
      directory: for the event files of this run alone.
      spec: the run.
      steps: `[R]`, of an earlier process, which this one continues; its later events are hidden.
    """

    def __init__(self, directory: Path, spec: RunSpec, steps: np.ndarray | None = None):
        from tensorboardX import SummaryWriter

        self._writers = []
        for setting, rows in spec.settings.rows.items():
            first_step = 0 if steps is None else int(np.median(steps[rows])) + 1
            writer = SummaryWriter(str(directory / folder_name(str(setting))), purge_step=first_step)
            text = json.dumps(describe_run(spec, setting), indent=2)
            writer.add_text("config", textwrap.indent(text, 4 * " "))  # in Markdown a block of code
            self._writers.append((rows, writer))

    def record(self, iteration: int, steps: np.ndarray, metrics: Mapping[str, np.ndarray]) -> None:
        """One event an iteration, with all scalars: writing them one by one takes longer than small iterations do."""
        from tensorboardX.proto.summary_pb2 import Summary

        for rows, writer in self._writers:
            for step, scalars in over_seeds(steps, metrics, rows):
                values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
                writer.file_writer.add_summary(Summary(value=values), step)
            writer.flush()

    def close(self) -> None:
        """Flushes and closes the files."""
        for _, writer in self._writers:
            writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases for each setting, in one group; a resumed run continues them.

    Its variables hold: WANDB_PROJECT (by default "grpo_jax"), WANDB_ENTITY, WANDB_TAGS, and WANDB_NAME for one setting.
    Its charts are over environment steps.

    Args:
      directory: of the results; in offline mode, the data is kept there.
      spec: the run.
      mode: "online" or "offline".
      group: the name of their group.
    """

    def __init__(self, directory: Path, spec: RunSpec, *, mode: str, group: str | None = None):
        import wandb

        settings, directory = spec.settings, directory.resolve()
        self._runs = []
        for setting, rows in settings.rows.items():
            title = f"{spec.setting.title} {setting}".strip()
            name = str(setting) if spec.rows else title
            identity = hashlib.sha1(f"{directory}\n{title}".encode()).hexdigest()[:16]
            if len(settings.rows) == 1:
                name = os.environ.get("WANDB_NAME", name)
            project = os.environ.get("WANDB_PROJECT", "grpo_jax")
            options = {"project": project, "name": name, "id": identity, "resume": "allow", "mode": mode}
            options |= {"group": group} if group else {}
            # One of several at a time is not `wandb.run`.
            options |= {"reinit": "create_new"} if len(settings.rows) > 1 else {}
            run = wandb.init(**options, dir=directory, config=describe_run(spec, setting))
            run.define_metric("*", step_metric="environment_steps")
            self._runs.append((rows, run))

    def record(self, iteration: int, steps: np.ndarray, metrics: Mapping[str, np.ndarray]) -> None:
        """One call an iteration and setting."""
        for rows, run in self._runs:
            for i, (step, values) in enumerate(over_seeds(steps, metrics, rows)):
                run.log(values | {"environment_steps": step}, step=iteration + i)

    def close(self) -> None:
        """Sends the rest, in online mode."""
        for _, run in self._runs:
            run.finish()


def over_seeds(
    steps: np.ndarray, metrics: Mapping[str, np.ndarray], rows: Any = np.s_[:]
) -> list[tuple[int, dict[str, float]]]:
    """The steps and the scalars of each iteration: a value itself with one seed, else the median; never NaN.

    Returns have quartiles too. Of steps and metrics, each `[n, R]`, the rows are seeds of one setting; those without a
    finite value do not count.
    """
    columns = {}
    for name, values in metrics.items():
        values = np.where(np.isfinite(values), values, np.nan)[:, rows]
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of an iteration without a value
            quantiles = np.nanquantile(values, [*QUARTILES.values()], axis=1)
        suffixes = QUARTILES if values.shape[1] > 1 and "return_" in name else [""]
        columns |= {name + suffix: column for suffix, column in zip(suffixes, quantiles, strict=False)}
    return [
        (int(step), {name: float(column[i]) for name, column in columns.items() if not np.isnan(column[i])})
        for i, step in enumerate(np.median(steps[:, rows], axis=1))
    ]

"""The settings of the recording of a run."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np

from grpo_jax.errors import ConfigError
from grpo_jax.recording.trackers import check_installed
from grpo_jax.training.evaluations import Evaluations, no_progress, reached_return
from grpo_jax.training.run import check_evaluations


@dataclasses.dataclass
class Recording:
    """Settings of the recording of a run; they are flags of the command lines."""

    checkpoint_every: int = 0
    """Iterations between two checkpoints, from which a run can be resumed; 0 for none."""
    resume: bool = False
    """Resume the run in the folder, or begin it if there is none."""
    tensorboard: bool = False
    """Also write TensorBoard's event files."""
    wandb: Literal["offline", "online"] | None = None
    """Also log to Weights & Biases."""
    evaluate_every: int = 0
    """Iterations between two evaluations of the policies, with sampled and with greedy actions; 0 for none."""
    evaluation_episodes: int = 32
    """Episodes of each evaluation."""
    stop_at_return: float | None = None
    """Stop a seed once the return of an evaluation (sampled actions) is at least this."""
    stop_without_progress: int | None = None
    """Stop a seed after this many evaluations in a row without a better return."""
    debug_nans: bool = False
    """Stop at the first loss or gradient that is not finite, and show the operation it comes from; slow."""

    @property
    def stop_when(self) -> Callable[[Evaluations], np.ndarray] | None:
        """The criterion of `run`; None without one."""
        criteria = []
        if self.stop_at_return is not None:
            criteria.append(reached_return(self.stop_at_return))
        if self.stop_without_progress is not None:
            criteria.append(no_progress(self.stop_without_progress))
        if not criteria:
            return None
        return lambda evaluations: np.any([criterion(evaluations) for criterion in criteria], axis=0)

    def check(self) -> None:
        """Raises ConfigError for fields that contradict each other or need a package that is not installed."""
        if self.checkpoint_every < 0:
            raise ConfigError(f"checkpoint_every={self.checkpoint_every} is negative; use 0 for no checkpoints")
        if self.resume and self.checkpoint_every == 0:
            raise ConfigError("resume=True needs checkpoints; set checkpoint_every (--checkpoint-every N), such as 100")
        check_evaluations(self.evaluate_every, self.evaluation_episodes, self.stop_when)
        if self.wandb is not None:
            check_installed("wandb")

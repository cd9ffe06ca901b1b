"""The flags of the commands that use trained policies."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from grpo_jax import TrainedPolicy, load
from grpo_jax.commands.harness.flags import parse_overrides
from grpo_jax.commands.harness.limits import Seed


@dataclasses.dataclass
class PolicyArguments:
    """The flags that choose trained policies."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder of results of a command that trains."""
    run: str | None = None
    """Name of the run, if the folder holds several."""
    which: Literal["final", "best"] = "final"
    """The latest policies, or those with the highest score so far."""
    trust: bool = False
    """Import code that the folder names, such as a custom environment; only if you trust who made the folder."""

    def load(self, row: int | Literal["best", "all"] | None) -> TrainedPolicy:
        """The policy of this row, of all, or, for None, of the best row."""
        return load(self.folder, self.run, which=self.which, row="best" if row is None else row, trust=self.trust)


@dataclasses.dataclass
class EpisodeArguments(PolicyArguments):
    """The flags of commands that play episodes."""

    greedy: bool = False
    """Take the most probable actions instead of samples."""
    environment: str | None = None
    """Play in another environment with the same observations and actions."""
    env_params: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME=VALUE ...]")] = ()
    """Parameters of the environment to override, such as max_steps_in_episode=1000."""
    seed: Seed = 0
    """Seed of the episodes: resets, environment and actions."""

    def load(self, row: int | Literal["best", "all"] | None) -> TrainedPolicy:
        """As in `PolicyArguments`, in the environment of the flags."""
        overrides = parse_overrides(self.env_params)
        policy = super().load(row)
        return policy.on(self.environment, overrides) if self.environment is not None or overrides else policy

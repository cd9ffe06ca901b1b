"""What is recorded of a run, its description, and the folder for its results."""

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from grpo_jax.config import Config
from grpo_jax.environments.suites import SUITES
from grpo_jax.errors import ConfigError
from grpo_jax.importing import import_custom, is_custom
from grpo_jax.recording.files import as_path, plain
from grpo_jax.recording.folder_lock import SUMMARY_FILE, lock_run_folder
from grpo_jax.recording.identity import identity
from grpo_jax.recording.metrics_file import METRICS_FILE
from grpo_jax.runs.run_spec import RunSpec


def describe_run(spec: RunSpec) -> dict[str, Any]:
    """Everything that the run's numbers depend on, in JSON's types; a run is resumed only if this is the same."""
    described = {"run": spec.setting, "config": describe(spec.config), "hyperparams": vars(spec.hyperparams)}
    return plain(described | {"keys": jax.random.key_data(spec.keys), "env_params": spec.env_params})


def digest(spec: RunSpec) -> str:
    """A hash of the description."""
    return hashlib.sha256(json.dumps(describe_run(spec), sort_keys=True).encode()).hexdigest()[:12]


def describe(config: Config) -> dict[str, Any]:
    """The fields of a config as far as two processes can compare them (`identity`), also what import paths lead to."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name, value in fields.items():
        is_path = isinstance(value, str) and is_custom(value) and value.partition(":")[0] not in SUITES
        found = identity(import_custom(value, name) if is_path else value)
        fields[name] = {"path": value} | found if is_path and isinstance(found, dict) else found
    return fields | {"env_params": identity(dict(config.env_params))}


@dataclasses.dataclass
class Recording:
    """What is recorded of a run, and where; flags of the commands that train."""

    out: Path | str
    """Folder for the results, created if it does not exist. It is locked until the process ends."""
    checkpoint_every: int | None = None
    """Iterations between two checkpoints, from which a run can be resumed; 0 for none. By default one each minute."""
    resume: bool = False
    """Resume the run in the folder, or begin it if there is none. The other arguments must be the same."""
    policies: bool = True
    """Keep the best and the final policy of each seed, in policies/."""
    tensorboard: bool = False
    """Also write TensorBoard's event files."""
    wandb: Literal["offline", "online"] | None = None
    """Also log to Weights & Biases, a run for each setting."""
    wandb_group: str | None = None
    """Name of the group of these runs in Weights & Biases; by default, of several settings, the name of the folder."""

    def __post_init__(self):
        """Takes ~ for the home folder."""
        self.out = as_path(self.out)

    def check(self) -> None:
        """Raises ConfigError for fields that contradict each other or need a package that is not installed."""
        if (self.checkpoint_every or 0) < 0:
            raise ConfigError(f"checkpoint_every={self.checkpoint_every} is negative; use 0 for no checkpoints")
        if self.resume and self.checkpoint_every == 0:
            raise ConfigError("resume=True needs checkpoints, and checkpoint_every=0 makes none; leave one of them out")
        if self.wandb is not None:
            check_installed("wandb")


def check_installed(package: str) -> None:
    """Raises ConfigError if a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{package} is not installed: pip install {package}, or do without it")


def prepare_folder(directory: Path, specs: Sequence[RunSpec], *, resume: bool, subfolder: str = "") -> None:
    """Locks the folder of these runs, which perhaps are recorded in a subfolder.

    Raises:
      FileExistsError: the folder contains results that cannot be resumed, or another process writes to it.
      ConfigError: with `resume`, it contains another run.
    """
    checkpoints, metrics = directory / subfolder / "checkpoints", directory / METRICS_FILE
    lock_run_folder(directory, resume=resume)
    begun = (directory / SUMMARY_FILE).exists() or (metrics.exists() and metrics.stat().st_size > 0)
    if resume and begun and not checkpoints.is_dir():
        raise FileExistsError(
            f"{directory} holds a run without checkpoints, so it cannot be resumed. Nothing was written. Choose "
            "another folder (--out), or move the old one away."
        )
    if not checkpoints.is_dir():
        return
    from grpo_jax.recording.checkpoint import check_same_run  # only here, as orbax takes a second

    folders = {spec.setting.folder for spec in specs}
    for folder in sorted({path.name for path in checkpoints.glob("*")} - folders):
        raise ConfigError(
            f"{directory} holds the run {folder!r}, which is none of {', '.join(map(repr, sorted(folders)))}; to "
            "resume, use what it was started with, also rows_at_once, or choose another folder (--out) for a new run"
        )
    for spec in specs:
        check_same_run(checkpoints / spec.setting.folder, describe_run(spec))

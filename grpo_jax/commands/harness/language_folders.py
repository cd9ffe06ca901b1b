"""The models of `grpo-jax lm`: read before training, a folder for each seed after it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from grpo_jax import Config
from grpo_jax.language import LanguageTask, load_params, save_adapter, save_trained
from grpo_jax.recording.files import read_object, write_json
from grpo_jax.types import PyTree

TEMPLATE = "template.json"


def load_actors(folders: Sequence[Path]) -> PyTree:
    """The weights of the models in folders, each leaf `[len(folders), ...]`."""
    actors = {folder: load_params(folder)["actor"] for folder in set(folders)}
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(actors[folder] for folder in folders))


def begun_date(out: Path) -> str | None:
    """The date that the chat template of the run in a folder was given; None if nothing is recorded."""
    return read_object(out / TEMPLATE)["date"] if (out / TEMPLATE).exists() else None


def record_template(out: Path, task: LanguageTask) -> None:
    """Writes what a chat template was given, so that a run that is resumed reads the same prompts on another day."""
    if (template := task.model.tokenizer.template) is not None:
        write_json(out / TEMPLATE, {"date": template.date, "variables": template.variables})


def model_folders(out: Path, name: str, num_seeds: int) -> list[Path]:
    """The folder of the model of each seed: NAME for a single one, or else NAME_0, NAME_1, ..."""
    return [out / name] if num_seeds == 1 else [out / f"{name}_{seed}" for seed in range(num_seeds)]


def save_models(
    arguments: Any,
    task: LanguageTask,
    config: Config,
    params: PyTree,
    starts: Sequence[Path],
    out: Path,
    console: Console,
) -> None:
    """Writes the folder of the model of each seed, or that of its adapter.

    Args:
      arguments: the flags of `grpo-jax lm`.
      task: prompts and rewards.
      config: of the run.
      params: trained, each leaf `[num_seeds, ...]`.
      starts: the folder of each seed's model before training.
      out: the folder that they get theirs in.
      console: shows the names.
    """
    saves_adapter = arguments.lora_rank is not None and not arguments.merge_lora
    save, name = (save_adapter, "adapter") if saves_adapter else (save_trained, "model")
    for seed, folder in enumerate(model_folders(out, name, arguments.num_seeds)):
        trained = task.model._replace(folder=starts[seed], architecture=config.network)
        save(folder, trained, jax.tree.map(lambda leaf, seed=seed: leaf[seed], params), dtype=arguments.save_dtype)
        console.print(f"The trained {name}: {folder}", soft_wrap=True)

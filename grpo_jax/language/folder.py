"""The files of a model folder: none may lead out of it, as a downloaded one may come from anyone."""

from pathlib import Path

from grpo_jax.errors import ConfigError


def file_in(folder: str | Path, name: str) -> Path:
    """The path of a file in a model folder, which need not exist.

    Links may lead to files in the folder, or, in the cache of Hugging Face, to the blobs beside its snapshots.

    Raises:
      ConfigError: the path leads elsewhere, or to what is no file.
    """
    path = Path(folder) / name
    try:
        inside, found = Path(folder).resolve(), path.resolve()
        allowed = [inside, *([inside.parents[1] / "blobs"] if inside.parent.name == "snapshots" else [])]
        is_inside = any(found.is_relative_to(each) for each in allowed)
        is_other = found.exists() and not found.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or what is no name
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not is_inside:
        raise ConfigError(f"{path} leads out of the model's folder, to {found}; copy the file into the folder")
    if is_other:
        raise ConfigError(f"{path} is not a file; copy the model's folder again")
    return path

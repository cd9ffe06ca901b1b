"""What reads a model folder: its files, their fields, and the packages of the extra `lm`."""

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_jax.errors import ConfigError
from grpo_jax.importing import pip_install
from grpo_jax.recording.files import as_path, describe_kind, fits, read_object

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json"),
)
"""The files of a model folder that belong to its tokenizer and are copied with it."""

# The types of fields of config.json, besides its sizes.
_KINDS = {
    **{"model_type": str, "architectures": list[str], "tie_word_embeddings": bool, "layer_types": list[str]},
    **{"rope_parameters": dict[str, Any], "rope_scaling": dict[str, Any]},
    **{"id2label": dict[str, str], "pad_token_id": int, "rope_theta": float, "rms_norm_eps": float},
}


def need(package: str) -> ModuleType:
    """The package; raises ConfigError if it is not installed."""
    with as_config_error(f"language models need {package}: {pip_install('lm')} (%s)"):
        return importlib.import_module(package)


@contextlib.contextmanager
def as_config_error(message: str) -> Iterator[None]:
    """Makes a ConfigError, with the error at the last %s, of any: `tokenizers` raises some that are no Exceptions."""
    try:
        yield
    except (ConfigError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        before, _, after = message.rpartition("%s")
        raise ConfigError(f"{before}{error}{after}") from error


def file_in(folder: str | Path, name: str) -> Path:
    """The path of a file in a model folder, which need not exist; ConfigError for what is not a file.

    A downloaded folder may come from anyone, so links may lead only to files in the folder, or, in the cache of Hugging
    Face, to the blobs beside its snapshots.
    """
    folder = as_path(folder)
    path = folder / name
    with as_config_error(f"{path} cannot be read: %s"):  # a loop of links, or not a name
        inside, found = folder.resolve(), path.resolve()
        allowed = [inside, *([inside.parents[1] / "blobs"] if inside.parent.name == "snapshots" else [])]
        is_inside = any(found.is_relative_to(each) for each in allowed)
        is_other = found.exists() and not found.is_file()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # of a loop of links, which `resolve` takes from Python 3.13 on
    if not is_inside:
        raise ConfigError(f"{path} leads out of the model's folder, to {found}; copy the file into the folder")
    if is_other:
        raise ConfigError(f"{path} is not a file; copy the model's folder again")
    return path


def read_fields(folder: str | Path, name: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object in a file of a model folder, {} without it; its fields are null or of the types in `kinds`."""
    path = file_in(folder, name)
    fields = read_object(path) if path.exists() else {}
    for field, kind in kinds.items():
        if not fits(value := fields.get(field), kind | None):
            raise ConfigError(f"{path}: {field}={value!r:.200} must be {describe_kind(kind)}; copy the file again")
    return fields


def read_config(folder: str | Path) -> dict[str, Any]:
    """The contents of config.json; ConfigError if it is missing or damaged, or a field has another type."""
    path = file_in(folder, "config.json")
    if path.exists():
        return read_fields(folder, "config.json", _KINDS)
    advice = "name the folder of a model, with its config.json and safetensors; GGUF is not read"
    raise ConfigError(f"{path} cannot be read: there is no such file; {advice}")

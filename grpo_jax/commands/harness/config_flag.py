"""What --config and --algorithm name: fields in a JSON file, and algorithms by name or import path."""

from pathlib import Path
from typing import Any, get_type_hints

from grpo_jax import Config, Hyperparams
from grpo_jax.algorithms import Algorithm, by_name
from grpo_jax.errors import ConfigError
from grpo_jax.hyperparams import joined
from grpo_jax.importing import import_object, is_custom
from grpo_jax.policies.sampling import SamplingHyperparams
from grpo_jax.recording.config_file import FIELDS, from_json
from grpo_jax.recording.files import read_json


def read_fields(path: Path) -> dict[str, Any]:
    """The fields of `Config` and of its class of hyperparameters in a JSON file; ConfigError if it cannot be read."""
    try:
        fields = read_json(path)
    except ConfigError as error:
        raise ConfigError(f"--config {error}; use a file such as a sweep's best.json") from error
    known = {name: value for name, value in fields.items() if name in ("algorithm", "truncate_sampling")}
    kind = class_of(**from_json(path, known, FIELDS, "Config", trust=True))
    return from_json(path, fields, FIELDS | get_type_hints(kind), f"Config or {kind.__name__}", trust=True)


def class_of(algorithm: str | Algorithm = Config.algorithm, truncate_sampling: bool = False) -> type[Hyperparams]:
    """The class of hyperparameters of a config with these fields."""
    kind = Hyperparams if algorithm == "auto" else find_algorithm(algorithm).hyperparams
    return joined(kind, SamplingHyperparams) if truncate_sampling else kind


def find_algorithm(algorithm: str | Algorithm) -> Algorithm:
    """The algorithm of a name or an import path; raises ConfigError for anything else."""
    if isinstance(algorithm, Algorithm):
        return algorithm
    if not is_custom(algorithm):
        return by_name(algorithm)
    found = import_object(algorithm, "algorithm")
    if not isinstance(found, Algorithm):
        raise ConfigError(
            f"--algorithm {algorithm} is {type(found).__name__}, not an Algorithm; write one such as "
            "MINE = GRPO._replace(surrogate=...)"
        )
    return found

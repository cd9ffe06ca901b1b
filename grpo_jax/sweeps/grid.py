"""The settings of a sweep: every combination of the values of its axes, or random draws between two values of each."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from grpo_jax.config import Config
from grpo_jax.errors import OTHER_WORDS, ConfigError, KnownFields, function_name, nearest
from grpo_jax.hyperparams import Hyperparams, advice_on, completed
from grpo_jax.runs.run_spec import CONFIG, RunSpec, Value, as_value, format_value


def make_grid(
    bases: Sequence[RunSpec], traced: Mapping[str, Iterable[Any]], samples: int | None = None, seed: int = 0
) -> list[RunSpec]:
    """A run for each base and each combination of the values of hyperparameters, which its label names.

    Of each base, `samples` points are drawn log-uniformly between two values of each axis; with None, it is the grid.

    Raises:
      ConfigError: nothing varies, a value is not a number, the ends of a range are not 0 < low < high, or the
        environments differ.
    """
    ranges = {name: as_numbers(name, values) for name, values in traced.items()}
    if not bases[0].label and not ranges:
        raise ConfigError("nothing to sweep: give a field several values, such as learning_rate 1e-4, 1e-3 and 1e-2")
    if len({base.config.env.name for base in bases}) > 1:
        raise ConfigError("returns of different environments cannot be ranked: sweep each environment by itself")
    points = list(itertools.product(*ranges.values())) if samples is None else _draws(ranges, samples, seed)
    chosen = itertools.product(bases, (dict(zip(ranges, point, strict=True)) for point in points))
    return [
        base._replace(label=base.label | values, hyperparams=base.hyperparams.replace(**values))
        for base, values in chosen
    ]


def make_bases(
    configs: Config | Mapping[str, Config], values: Mapping[str, Any], hyperparams: Hyperparams, keys: jax.Array
) -> tuple[list[RunSpec], dict[str, Sequence[Any]]]:
    """A run for each config and combination of values of its fields; and the values of hyperparameters that vary.

    A field with a single value is no axis.

    Raises:
      ConfigError: a field is unknown, or is one that others depend on.
    """
    named = {"": configs} if isinstance(configs, Config) else configs
    if not isinstance(named, Mapping) or not named or not all(isinstance(each, Config) for each in named.values()):
        raise ConfigError(
            "sweep takes a Config, or several by their names: "
            'sweep({"ppo": Config(algorithm="ppo"), "grpo": Config(algorithm="grpo")}, ...)'
        )
    if not isinstance(values, Mapping):
        raise ConfigError(f"values={values!r} must be lists by name, such as {{'learning_rate': [3e-4, 1e-3]}}")
    for config in named.values():
        hyperparams = completed(hyperparams, config.hyperparams_class)
    for name in (name for name, value in vars(hyperparams).items() if np.ndim(value)):
        raise ConfigError(f"the hyperparams have several values of {name}; move them into the values of the sweep")
    static, traced = {}, {}
    for name, given in values.items():
        is_list = isinstance(given, list | range) or isinstance(given, np.ndarray | jax.Array) and given.ndim > 0
        # A tuple is one value of a config's field, such as extras=("distance",).
        is_list |= isinstance(given, tuple) and name in hyperparams.__dataclass_fields__
        several = list(given) if is_list else [given]
        if not several:
            raise ConfigError(f"{name} has no values; give one or several in a list")
        if name in ("environment", "algorithm", "env_params"):  # from which a Config has chosen other fields
            raise ConfigError(f"{name} is swept by a config for each: sweep({{name: Config({name}=...), ...}}, ...)")
        if name in hyperparams.__dataclass_fields__:
            traced[name] = several
        elif name in Config.__dataclass_fields__:
            static[name] = several
        else:
            known = {*Config.__dataclass_fields__, *hyperparams.__dataclass_fields__}
            if name in OTHER_WORDS:
                raise ConfigError(f"{name} is {OTHER_WORDS[name]} here")
            is_known = issubclass(KnownFields.owner(name) or Config, Hyperparams)
            raise ConfigError(
                f"{name!r} is no field of Config or {type(hyperparams).__name__} (fields of networks are swept by "
                'several networks, {"network": [MLP((64,)), MLP((128,))]}): '
                f"{advice_on(name, hyperparams) if is_known else nearest(name, known)}"
            )
    hyperparams = hyperparams.replace(**{name: each[0] for name, each in traced.items() if len(each) == 1})
    bases = []
    for name, config in named.items():
        for combination in itertools.product(*static.values()):
            chosen = dict(zip(static, combination, strict=True))
            label = {CONFIG: name} if len(named) > 1 else {}
            label |= {field: _shown(value) for field, value in chosen.items() if len(static[field]) > 1}
            changed = dataclasses.replace(config, **chosen) if chosen else config
            bases.append(RunSpec(label, changed, hyperparams, keys))
    return bases, {name: each for name, each in traced.items() if len(each) > 1}


def _shown(value: Any) -> Value:
    """A value of a field in a setting."""
    if isinstance(value, np.number):
        return as_value(value)
    return value if type(value) in (int, float, str) else function_name(value)


def as_numbers(name: str, values: Iterable[Any]) -> list[float]:
    """The values of a hyperparameter; ConfigError if one is no number."""
    try:
        return [float(str(value)) for value in values]  # a float32 as it is written
    except ValueError as error:
        words = " ".join(map(str, values))
        raise ConfigError(f"{name} {words}: not all of them are numbers, but it is a hyperparameter") from error


def _draws(ranges: Mapping[str, list[float]], samples: int, seed: int) -> list[tuple[float, ...]]:
    """Points drawn log-uniformly, rounded to six digits."""
    for name, ends in ranges.items():
        if len(ends) != 2 or not 0 < ends[0] < ends[1] < math.inf:
            raise ConfigError(
                f"{name} {' '.join(map(format_value, ends))} is no range to draw from on a logarithmic scale; "
                "use two values, 0 < low < high"
            )
    if not ranges:
        raise ConfigError("samples need a range to draw from, such as learning_rate 1e-4 1e-2")
    low, high = np.log(np.array(list(ranges.values()))).T
    drawn = np.exp(np.random.default_rng(seed).uniform(low, high, size=(samples, len(ranges))))
    return [tuple(float(f"{value:.6g}") for value in row) for row in drawn]

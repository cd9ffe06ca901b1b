"""A run's `Config` and `Hyperparams` from the flags of a command line."""

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from grpo_jax import Config, Hyperparams
from grpo_jax.algorithms import Algorithm, algorithms_with, automatic_algorithm, name_of
from grpo_jax.commands.harness.config_flag import class_of, find_algorithm, read_fields
from grpo_jax.commands.harness.parsing import parse_flags, peek
from grpo_jax.commands.harness.scale import Scale, can_grow, for_gpu, resolve_scale
from grpo_jax.devices.execution_plan import ExecutionPlan
from grpo_jax.environments import make_environment
from grpo_jax.errors import LARGEST_COUNT, ConfigError, KnownFields
from grpo_jax.hyperparams import joined
from grpo_jax.importing import is_custom
from grpo_jax.policies.networks import NETWORKS
from grpo_jax.policies.networks import name_of as network_name
from grpo_jax.recording.config_file import FIELDS
from grpo_jax.runs.processes import is_process_zero
from grpo_jax.runs.tuned import NetworkFields, split_fields, without_replaced, without_unread
from grpo_jax.runs.tuned_settings import tuned_settings


@dataclasses.dataclass(kw_only=True)
class RunFlags:
    """The flags that describe a run."""

    config: Config
    layers: NetworkFields = NetworkFields()
    hyperparams: Hyperparams
    scale: Scale = "auto"
    """Size of the machine that the defaults suit: "gpu" (more environments, fewer gradient steps) is also for a TPU,
    "auto" by the backend."""
    config_file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """JSON file of fields, such as a sweep's best.json, in place of the tuned settings; flags override them."""


@dataclasses.dataclass
class Chosen:
    """The flags on which the defaults of all others depend."""

    config: Path | None = None
    environment: str | None = None
    algorithm: str | None = None
    network: str = Config.network
    scale: Scale = "auto"
    total_steps: float | None = None
    num_iterations: float | None = None
    num_envs: int | None = None
    num_steps: int | None = None
    num_minibatches: int | None = None
    recurrent: str | None = None
    truncate_sampling: bool | None = None

    @property
    def sizes(self) -> dict[str, Any]:
        """Those that are given, of the fields on which `for_gpu` depends; impossible ones are refused later."""
        limits = {"total_steps": math.inf} | dict.fromkeys(("num_envs", "num_steps", "num_minibatches"), LARGEST_COUNT)
        sizes = {name: value for name, limit in limits.items() if 1 <= (value := getattr(self, name) or 0) <= limit}
        return sizes if self.recurrent is None else sizes | {"recurrent": self.recurrent}


def hyperparams_class(flags: Sequence[str], algorithms: Sequence[str] = ()) -> type[Hyperparams]:
    """The class with the hyperparameters of these flags, and of other algorithms that they are compared with."""
    chosen = peek(Chosen, flags)
    fields = {} if chosen.config is None else read_fields(chosen.config)
    given = {"algorithm": chosen.algorithm, "truncate_sampling": chosen.truncate_sampling}
    fields |= {name: value for name, value in given.items() if value is not None}
    own = {name: fields[name] for name in given if name in fields}
    return functools.reduce(joined, (class_of(**own | {"algorithm": each}) for each in algorithms), class_of(**own))


def parse(arguments: type, flags: Sequence[str], algorithms: Sequence[str] = ()) -> Any:
    """Parses the flags of a class with the fields of `RunFlags`.

    The defaults are the fields in the file --config, or else the tuned settings of the environment and the algorithm,
    without hyperparameters that nothing reads. Parameters of the environment are merged one by one. The algorithm
    "auto" is replaced before the tuned settings are read. Hyperparameters of `algorithms` are flags too.
    """
    chosen = peek(Chosen, flags)
    from_file = {} if chosen.config is None else read_fields(chosen.config)
    environment = chosen.environment or from_file.get("environment", Config.environment)
    algorithm = chosen.algorithm or from_file.get("algorithm", Config.algorithm)
    if algorithm == "auto":
        name, reason = automatic_algorithm(make_environment(environment).prompt is not None)
        _say(f"--algorithm auto is {name}: {reason}")
        return parse(arguments, [*flags, "--algorithm", name], algorithms)
    kind = hyperparams_class(flags, algorithms)
    words = (word.partition("=")[0] for word in flags if word.startswith("--"))
    given = {word.removeprefix("--no-").removeprefix("--").replace("-", "_") for word in words}
    for name in given - kind.__dataclass_fields__.keys():
        _check_owner(name, algorithm)
    scale = resolve_scale(chosen.scale)
    note = f"Defaults are those of {chosen.config}."
    if chosen.config is None:
        run = f"{algorithm if isinstance(algorithm, str) else name_of(algorithm)} on {environment}"
        note = f"Defaults are those of {run}; of others: --environment NAME --algorithm NAME --help."
        fields = _tuned(environment, find_algorithm(algorithm), scale, chosen)
    elif chosen.scale == "auto":
        fields = from_file
    else:
        raise ConfigError(f"--scale {scale} chooses tuned settings, in whose place --config gives others; leave it out")
    if type(fields.get("network")) in NETWORKS.values():
        fields = fields | vars(fields["network"]) | {"network": network_name(fields["network"])}
    fields = without_replaced(fields, vars(chosen))
    static, layers, traced = (
        {name: value for name, value in fields.items() if name in kind.__dataclass_fields__}
        for kind in (Config, NetworkFields, kind)
    )
    # Not by its constructor, which would check it and choose its sizes before the flags are read.
    config = object.__new__(Config)
    vars(config).update(static)
    parsed = parse_flags(
        arguments,
        flags,
        default=arguments(config=config, layers=NetworkFields(**layers), hyperparams=kind(**traced), scale=scale),
        registry=_constructors(dict(fields.get("env_params", ()))),
        complete=functools.partial(_complete, fields.get("network", "auto")),
        note=note,
    )
    parsed.hyperparams = without_unread(parsed.config, parsed.hyperparams, traced.keys() - given)
    if chosen.config is None:
        taken = given - {"network"} if chosen.network == "auto" else given
        left = {name: value for name, value in fields.items() if name not in taken}
        _say(_tuned_line(run if scale == "cpu" else f"{run} (--scale gpu)", left, parsed.hyperparams))
    return parsed


def _check_owner(name: str, algorithm: str | Algorithm) -> None:
    """Raises ConfigError for a hyperparameter that others have, but not this algorithm."""
    owner = KnownFields.owner(name)
    if owner is not None and issubclass(owner, Hyperparams):
        readers = algorithms_with(name) or ["--truncate-sampling"]
        name, shown = name.replace("_", "-"), algorithm if isinstance(algorithm, str) else name_of(algorithm)
        raise ConfigError(f"--{name} is no number of {shown}: it is of {' and '.join(readers)}; leave it out")


def _tuned(environment: str, algorithm: Algorithm, scale: Scale, chosen: Chosen) -> dict[str, Any]:
    """The tuned settings, at this scale."""
    fields = tuned_settings(environment, algorithm)
    if scale == "cpu" or chosen.network == "transformer" or not can_grow(environment):
        return fields
    return for_gpu(fields, algorithm, chosen.sizes)


def _tuned_line(run: str, fields: Mapping[str, Any], hyperparams: Hyperparams) -> str:
    """What is tuned, of these fields, in one line; empty if all are the defaults of `Config` and `Hyperparams`."""
    known = (dataclasses.fields(kind) for kind in (Config, NetworkFields, Hyperparams))
    defaults = {field.name: field.default for field in itertools.chain(*known)}
    read = {name: value for name, value in fields.items() if value == getattr(hyperparams, name, value)}
    shown = [f"{name} {value}" for name, value in read.items() if value != defaults[name]]
    return f"tuned for {run}: {', '.join(shown)}; flags override" if shown else ""


@functools.cache  # a line for all the settings of a sweep that have it
def _say(line: str) -> None:
    if line and is_process_zero():
        print(line, file=sys.stderr)  # standard output may be a table for a file


def _complete(network: str, values: dict[str, Any]) -> None:
    """Imports the algorithm, and makes the network of the flags of its fields, where these are not its defaults.

    `network` is what "auto" stands for.
    """
    config, layers = values["config"].keywords, values["layers"].keywords
    config["network"] = network if config["network"] == "auto" else config["network"]
    if isinstance(config["algorithm"], str) and is_custom(config["algorithm"]):
        config["algorithm"] = find_algorithm(config["algorithm"])
    fields = {name: value for name, value in layers.items() if value != getattr(NetworkFields, name)}
    if fields:
        config["network"] = split_fields(config["environment"], config | fields)[0]["network"]


def _constructors(env_params: Mapping[str, float]) -> ConstructorRegistry:
    """Environments and algorithms are given by name; parameters of the environment as name=value, added to these."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def fields_of_config(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if info.type in (str | Algorithm, str | ExecutionPlan, str | Any, str | Callable):
            return PrimitiveConstructorSpec(
                1, "NAME", lambda words: words[0], lambda value: True, lambda value: [str(value)]
            )
        if info.type == FIELDS["env_params"]:
            return PrimitiveConstructorSpec(
                *("*", "[NAME=VALUE ...]", lambda words: {**env_params, **parse_overrides(words)}),
                *(lambda value: True, lambda value: [f"{name}={number}" for name, number in dict(value).items()]),
            )
        return None

    return registry


def parse_overrides(words: Sequence[str]) -> dict[str, float]:
    """The numbers of NAME=NUMBER ... by their names; raises ConfigError for any other word, and a name twice."""
    found: dict[str, float] = {}
    for word in words:
        name, equals, value = word.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or name in found:
            problem = f"{name} has a value already" if math.isfinite(number) else f"{value!r} is not a finite number"
            problem = problem if equals else "there is no '='"
            raise ConfigError(f"{word!r}: {problem}; write NAME=NUMBER, such as max_steps_in_episode=200")
        found[name] = number
    return found

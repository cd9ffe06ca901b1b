"""Grids and random samples of settings: `grpo-jax sweep --learning-rate 1e-4 1e-3 1e-2 --num-seeds 16`.

A flag of `grpo-jax train` with several values is an axis of `grpo_jax.sweep`.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.figures import Row, print_table, return_cells
from grpo_jax.commands.harness.flags import RunFlags, hyperparams_class, parse
from grpo_jax.commands.harness.limits import Count
from grpo_jax.commands.harness.parsing import invocation, parse_known_flags
from grpo_jax.commands.harness.study import StudyArguments, print_files, study_options
from grpo_jax.errors import ConfigError
from grpo_jax.recording.figures import NUM_DRAWN
from grpo_jax.recording.statistics import describe_seeds
from grpo_jax.runs.run_spec import RunSpec, format_value
from grpo_jax.sweeps.grid import as_numbers, make_grid
from grpo_jax.sweeps.runs import Run
from grpo_jax.sweeps.sweep import train_grid

NUM_SHOWN = 20
# Fields with several values, which are hence no axis.
LIST_FIELDS = ("hidden_sizes", "actor_observation", "extras", "env_params")


@dataclasses.dataclass(kw_only=True)
class Arguments(StudyArguments):
    """Trains every combination of the values given, all seeds, and ranks them.

    Beside the flags below, any flag of the command train, with one value or with several: --learning-rate 1e-3 1e-2.
    """

    samples: Count | None = None
    """Draw so many settings at random, log-uniformly between the two values of each flag, in place of a grid."""
    rows_at_once: Count | None = None
    """The most rows (seeds × settings) of a program, where all need more memory than there is."""


def main(arguments: Arguments, flags: Sequence[str]) -> None:
    # With the keys of grpo-jax train, so that each run is the one that it would be there.
    plans = grid_of_flags(flags, arguments.training_keys, arguments.samples, arguments.seed)
    options = study_options("sweep", arguments) | {"rows_at_once": arguments.rows_at_once}
    result = train_grid(plans, evaluation_keys=arguments.evaluation_keys, **options)
    console, out = options["console"], result.out
    title, settings = result.environment, result.ranking
    if arguments.format == "table" and len(settings) > NUM_SHOWN:
        title, settings = f"{title}, the best {NUM_SHOWN} of {len(settings)}", settings[:NUM_SHOWN]
    print_table(console, ranking(settings), arguments.format, title=title)
    console.print(f"Final return: {describe_seeds(result.num_seeds)}.", soft_wrap=True)
    pictures = "sweep.png", f"learning_curves.png (best {NUM_DRAWN})"
    print_files(console, out, settings[0].config, "summary.json", "metrics.jsonl", "best.json", *pictures)
    console.print(f"The best again: {invocation('train')} --config {out / 'best.json'}", soft_wrap=True)


def grid_of_flags(flags: Sequence[str], keys: jax.Array, samples: int | None = None, seed: int = 0) -> list[RunSpec]:
    """The grid of flags of `grpo-jax train`, such as `["--learning-rate", "1e-4", "1e-3", "--num-envs", "64"]`.

    A flag with several values is an axis. Raises ConfigError as `make_grid` does.
    """
    values = _parse_values(flags)
    axes = {name: words for name, words in values.items() if len(words) > 1 and name not in LIST_FIELDS}
    fixed = [word for name, words in values.items() if name not in axes for word in (flag(name), *words)]
    if "environment" in axes or "config" in axes:
        raise ConfigError("returns of different environments cannot be ranked: use one --environment, or one --config")
    algorithms = axes.get("algorithm", ())
    known = hyperparams_class(fixed, algorithms).__dataclass_fields__
    static = {name: words for name, words in axes.items() if name not in known}
    traced = {name: words for name, words in axes.items() if name not in static}
    for name in ("total_steps", "num_iterations"):  # in place of the other one in a file
        if name in traced:  # the smallest, as large iterations of a short run are too few
            fixed += [flag(name), traced[name][int(np.argmin(as_numbers(name, traced[name])))]]
    bases = []
    for combination in itertools.product(*static.values()):
        point = dict(zip(static, combination, strict=True))
        chosen = [word for name, value in point.items() for word in (flag(name), value)]
        base = parse(RunFlags, fixed + chosen, algorithms)
        label = {name: _number(word) for name, word in point.items()}
        bases.append(RunSpec(label, base.config, base.hyperparams, keys))
    return make_grid(bases, traced, samples, seed)


def _parse_values(flags: Sequence[str]) -> dict[str, list[str]]:
    """The words that follow each flag; those of its last occurrence, if it comes twice."""
    values: dict[str, list[str]] = {}
    for word in flags:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            values[name := name.replace("-", "_")] = [value] if value else []
        elif not values:
            raise ConfigError(f"{word!r} follows no flag; write --name value value ...")
        else:
            values[name].append(word)
    return values


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


def ranking(settings: Sequence[Run]) -> list[Row]:
    """A row for each setting."""
    values = ({axis: format_value(value) for axis, value in setting.values.items()} for setting in settings)
    pairs = enumerate(zip(settings, values, strict=True), start=1)
    return [{"rank": str(rank)} | shown | return_cells(setting) for rank, (setting, shown) in pairs]


if __name__ == "__main__":
    command(lambda: main(*parse_known_flags(Arguments)))

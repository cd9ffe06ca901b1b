"""What the values of flags may be: every number and every file of results, in all commands."""

import importlib
from pathlib import Path
from typing import Annotated, get_args, get_type_hints

import pytest

import grpo_jax
from grpo_jax import Config, Hyperparams
from grpo_jax.commands import train
from grpo_jax.commands.harness import limits
from grpo_jax.commands.harness.limits import Between, Count, OutFile, Seed, ToWrite
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.errors import ConfigError

CHECKED_ELSEWHERE = {"row", *Config.__dataclass_fields__, *Hyperparams.__dataclass_fields__}
COMMANDS, STUDIES = (
    [path.stem.replace("_", "-") for path in (Path(grpo_jax.__file__).parents[depth] / folder).glob("[!_]*.py")]
    for depth, folder in ((0, "commands"), (1, "experiments"))
)
NAMES = [*COMMANDS, *STUDIES]

REFUSED = {
    "train": ["--seed 99999999999999999999999", "--seed -1", "--seed 4294967296", "--num-seeds 0", "--hidden-sizes"],
    "sweep": ["--memory-gib nan", "--memory-gib 0", "--samples 0"],
    "evaluate": ["--seed -1", "--num-episodes 0"],
    "play": ["--fps 0.001", "--fps nan", "--num-episodes 99999999999"],
    "tokens": ["--total-steps 0", "--target 0", "--target nan", "--num-seeds 0"],
    "gymnax-suite": ["--steps-factor 1e300"],
    "family": ["--algorithms", "--total-steps 0"],
    "token-speed": ["--seconds -1", "--repeats 0"],
    "estimators": ["--num-groups 0"],
}
NEEDED = {"evaluate": "runs/a", "play": "runs/a"}


def arguments_of(name):
    folder = "grpo_jax.commands" if name in COMMANDS else "experiments"
    return importlib.import_module(f"{folder}.{name.replace('-', '_')}").Arguments


@pytest.mark.parametrize("name, flags", [(name, flags) for name, each in REFUSED.items() for flags in each])
def test_a_value_without_a_meaning_is_refused(name, flags):
    parse = train.parse if name == "train" else parse_flags
    word, *value = flags.split()
    problem = r"\S+ is not" if value else "has no value; write one or several"
    with pytest.raises(ConfigError, match=f"^{word} {problem}"):
        parse(arguments_of(name), [*NEEDED.get(name, "").split(), *flags.split()])


@pytest.mark.parametrize("name, flag", [("evaluate", "--out"), ("play", "--out")])
def test_a_folder_in_place_of_a_file_is_refused(name, flag):
    with pytest.raises(ConfigError, match=rf"^{flag} \. is a folder; name a file in it, such as results.json"):
        parse_flags(arguments_of(name), [*NEEDED.get(name, "").split(), flag, "."])


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_a_command_has_limits(name):
    hints = get_type_hints(arguments_of(name), include_extras=True)
    for field, hint in hints.items():
        parts = [hint]
        for part in parts:
            parts += get_args(part)
        known = any(
            isinstance(limit, Between | ToWrite) for part in parts for limit in getattr(part, "__metadata__", ())
        )
        if field not in CHECKED_ELSEWHERE and {int, float} & set(parts):
            assert known, f"--{field} of {name} takes any number; give it a type of harness/limits.py"


def test_limits_are_found_wherever_they_are_in_a_type():
    limits.check("--n", Count | None, None)
    limits.check("--n", tuple[Count, ...], (1, 2))
    limits.check("--seed", Seed, 2**32 - 1)
    for annotation, value in ((Count | None, 0), (tuple[Count, ...], (1, 0)), (Annotated[Count, "help"], 0)):
        with pytest.raises(ConfigError, match="--n 0 is not a whole number from 1 to 2147483647"):
            limits.check("--n", annotation, value)


def test_a_file_of_results_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    limits.check("--out", OutFile | None, tmp_path / "new" / "results.json")
    with pytest.raises(ConfigError, match="--out .* cannot be written, as .*file is a file"):
        limits.check("--out", OutFile | None, tmp_path / "file" / "results.json")
    with pytest.raises(ConfigError, match="--out .* is a folder; name a file in it, such as .*results.json"):
        limits.check("--out", OutFile, Path(tmp_path))

"""Flags, and their mistakes in one line."""

import dataclasses
from typing import Annotated

import jax
import pytest
import tyro

from grpo_jax import PPO, Hyperparams
from grpo_jax.algorithms import ALGORITHMS
from grpo_jax.commands import list as names
from grpo_jax.commands import train
from grpo_jax.commands.harness.parsing import parse_flags, parse_known_flags
from grpo_jax.commands.sweep import grid_of_flags
from grpo_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Part:
    width: int = 3
    """Of the part."""


@dataclasses.dataclass
class Arguments:
    """Does something."""

    folders: Annotated[tuple[str, ...], tyro.conf.Positional]
    """What it reads."""
    part: Part = Part()
    options: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of its own."""
    out: str | None = None
    """Where it writes."""


def test_flags_fill_a_dataclass_and_the_dataclasses_in_it():
    assert parse_flags(Arguments, ["a", "b", "--width", "4"]) == Arguments(("a", "b"), Part(4))
    assert parse_flags(Arguments, [], default=Arguments((), Part(5), out="there")).part == Part(5)
    assert parse_flags(Arguments, ["--options", "x", "1"]).options == {"x": 1.0}
    assert parse_known_flags(Arguments, ["--out", "x", "--other", "1"]) == (Arguments((), out="x"), ["--other", "1"])


@pytest.mark.parametrize(
    "flags, message",
    {
        "--widht 4": r"^unknown flag --widht: did you mean '--width'",
        "--width wide": r"^--width wide: 'wide' is not a whole number, such as 64$",
    }.items(),
)
def test_a_mistake_is_one_line(flags, message):
    with pytest.raises(ConfigError, match=message):
        parse_flags(Arguments, flags.split())


@pytest.mark.parametrize(
    "flags, message",
    {
        "--total-steps 1e6x": "^--total-steps 1e6x: '1e6x' is not a number, such as 0.5 or 1e6$",
        "--num-envs 3.5": "^--num-envs 3.5: '3.5' is not a whole number",
        "--hidden-sizes 64,64": "write --hidden-sizes 64 64$",
        "--learning-rate 1e-3 1e-2": "'1e-2' follows .* use grpo-jax sweep",
    }.items(),
)
def test_wrong_values_of_train_are_in_plain_words(flags, message):
    with pytest.raises(ConfigError, match=message):
        train.parse(train.Arguments, flags.split())


def test_help_of_train_is_short_and_begins_with_the_environment(capsys):
    with pytest.raises(SystemExit):
        train.parse(train.Arguments, ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 80
    assert next(line for line in lines if line.startswith("  --")).startswith("  --environment ")
    assert any("dr_grpo" in line for line in lines) and any("--help-all" in line for line in lines)


def test_lists_name_every_algorithm_and_hyperparameter(capsys):
    names.main(names.Arguments("algorithms"))
    names.main(names.Arguments("hyperparameters"))
    first = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert {*ALGORITHMS, *Hyperparams.__dataclass_fields__} <= first and names.WORDS.keys() == ALGORITHMS.keys()
    with pytest.raises(ConfigError, match="did you mean 'environments'"):
        names.main(names.Arguments("environmets"))


OWN_SLOTS = """
from flax import struct
from grpo_jax import PPO, Hyperparams

@struct.dataclass
class Mine(Hyperparams):
    soft_clip: float = 0.2

MINE = PPO._replace(surrogate=lambda log_ratio, advantage, hp: log_ratio * advantage * hp.soft_clip)
"""


def test_an_own_algorithm_and_hyperparams_are_import_paths(tmp_path, monkeypatch):
    (tmp_path / "own_slots.py").write_text(OWN_SLOTS)
    monkeypatch.syspath_prepend(tmp_path)
    own = ["--algorithm", "own_slots:MINE", "--hyperparams", "own_slots:Mine"]
    parsed = train.parse(train.Arguments, [*own, "--soft-clip", "0.4"])
    assert parsed.hyperparams.soft_clip == 0.4 and parsed.hyperparams.entropy_coef == 0.01, "those tuned for PPO"
    assert parsed.config.algorithm.critic is not None and parsed.config.algorithm != PPO
    grid = grid_of_flags([*own, "--soft-clip", "0.1", "0.3"], jax.random.split(jax.random.key(0), 1))
    assert [plan.hyperparams.soft_clip for plan in grid.plans] == [0.1, 0.3]
    for flag, path, message in (("algorithm", "Mine", "not an Algorithm"), ("hyperparams", "MINE", "no subclass")):
        with pytest.raises(ConfigError, match=message):
            train.parse(train.Arguments, [f"--{flag}", f"own_slots:{path}"])

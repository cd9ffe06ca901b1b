"""Flags: dataclasses of them, the values that they may have, and their help."""

import dataclasses
import re
from pathlib import Path
from typing import Annotated

import jax
import pytest
import tyro

from grpo_jax import PPO
from grpo_jax.commands import lm, train
from grpo_jax.commands.harness import limits
from grpo_jax.commands.harness.limits import Count, OutFile, OutFolder, Seed
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
    out: Path | None = None
    """Where it writes."""


def test_flags_fill_a_dataclass_and_the_dataclasses_in_it(monkeypatch):
    assert parse_flags(Arguments, ["a", "b", "--width", "4"]) == Arguments(("a", "b"), Part(4))
    assert parse_flags(Arguments, [], default=Arguments((), Part(5), out=Path("there"))).part == Part(5)
    assert parse_flags(Arguments, ["--options", "x", "1"]).options == {"x": 1.0}
    parsed = Arguments((), out=Path("x"))
    assert parse_known_flags(Arguments, ["--out", "x", "--other", "1"]) == (parsed, ["--other", "1"])
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_flags(Arguments, ["--out=~/x"]).out == Path("/home/me/x"), "which a shell leaves as it is"


def test_help_shows_the_flags_used_most_or_all(capsys):
    def flags(word, parse=lambda words: train.parse(train.Arguments, words)):
        with pytest.raises(SystemExit):
            parse([word])
        printed = capsys.readouterr().out
        assert "--help-all" in printed or word == "--help-all"
        assert parse != lm.parse or not re.search("environment| episode", printed)
        return {*re.findall(r"^\W*(--[a-z-]+)", re.sub(r"\x1b\[[0-9;]*m", "", printed), re.M)}

    few, all_of_them = flags("--help"), flags("--help-all")
    assert {"--environment", "--learning-rate", "--config", "--init-from"} <= few and len(few) < 30
    assert few < all_of_them and "--gae-lambda" in all_of_them and len(all_of_them) > 90
    page = (Path(__file__).parents[2] / "docs/language_models.md").read_text()
    named = {*re.findall("--[a-z-]+", re.search("grpo-jax lm(.*?)```", page, re.S)[1]), "--num-prompts", "--lora-rank"}
    assert named <= flags("--help", lm.parse) and "--total-steps" in flags("--help-all", lm.parse)


OWN_SLOTS = """
from flax import struct
from grpo_jax import PPO, Hyperparams

@struct.dataclass
class Mine(Hyperparams):
    soft_clip: float = 0.2

MINE = PPO._replace(surrogate=lambda log_ratio, advantage, hp: log_ratio * advantage * hp.soft_clip, hyperparams=Mine)
"""


def test_an_own_algorithm_and_hyperparams_are_import_paths(tmp_path, monkeypatch):
    (tmp_path / "own_slots.py").write_text(OWN_SLOTS)
    monkeypatch.syspath_prepend(tmp_path)
    own = ["--algorithm", "own_slots:MINE"]
    parsed = train.parse(train.Arguments, [*own, "--soft-clip", "0.4"])
    assert parsed.hyperparams.soft_clip == 0.4 and parsed.hyperparams.entropy_coef == 0.01, "those tuned for PPO"
    assert parsed.config.algorithm.critic is not None and parsed.config.algorithm != PPO
    grid = grid_of_flags([*own, "--soft-clip", "0.1", "0.3"], jax.random.split(jax.random.key(0), 1))
    assert [plan.hyperparams.soft_clip for plan in grid] == [0.1, 0.3]
    with pytest.raises(ConfigError, match="not an Algorithm"):
        train.parse(train.Arguments, ["--algorithm", "own_slots:Mine"])


# --- limits ----------------------------------------------------------------------------------------------------------


def test_limits_are_found_wherever_they_are_in_a_type():
    limits.check("--n", Count | None, None)
    limits.check("--n", tuple[Count, ...], (1, 2))
    limits.check("--seed", Seed, 2**32 - 1)
    for annotation, value in ((Count | None, 0), (tuple[Count, ...], (1, 0)), (Annotated[Count, "help"], 0)):
        with pytest.raises(ConfigError, match="--n 0 is not a whole number from 1 to 2147483647"):
            limits.check("--n", annotation, value)


def test_a_place_of_results_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for path in ("new/results.json", "file"):
        limits.check("--out", OutFile | None, tmp_path / path)
        limits.check("--out", OutFolder, tmp_path / path)
    limits.check("--out", OutFolder, tmp_path)
    refused = {
        tmp_path / "file" / "results.json": "cannot be written, as .*file is a file",
        tmp_path: "is a folder; name a file in it, such as .*results.json",
        Path("/proc/results.json"): "cannot be written: No such file or directory",
        tmp_path / ("x" * 300): "cannot be written: File name too long",
    }
    for path, message in refused.items():
        with pytest.raises(ConfigError, match=f"--out .* {message}"):
            limits.check("--out", OutFile, path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

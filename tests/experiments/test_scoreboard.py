"""The scoreboard: when a task counts as solved, its lines and its table; no time is asserted."""

import math
from pathlib import Path

import pytest

from experiments import scoreboard
from experiments.harness.cold_start import Task
from experiments.scoreboard import Arguments
from grpo_jax.errors import ConfigError

NAN = math.nan


def test_a_task_is_solved_over_whole_episodes():
    """An episode is at most 500 steps long, so 4 iterations of 128 have at least one of each environment."""
    task = Task("Acrobot-v1", -100.0)
    early = [NAN, -90.0, NAN, -500.0, -80.0, -300.0, -90.0, -90.0, -90.0, -110.0]
    assert task.iterations(early, 1) == 2, "the short episodes of an iteration are the first to end"
    assert task.iterations(early, 4) == 10 and task.iterations(early[:9], 4) is None
    assert task.iterations([NAN] * 8, 4) is None and task.iterations([-80.0], 4) is None


def test_a_mistake_costs_nothing(tmp_path):
    for changes, message in (
        ({"tasks": ("CartPole",)}, "unknown task 'CartPole': did you mean 'CartPole-v1'"),
        ({"tasks": ("tokens:sort-5",), "implementations": ("PPO",)}, "only GRPO can train on tokens:sort-5; add it"),
    ):
        with pytest.raises(ConfigError, match=message):
            scoreboard.main(Arguments(**changes, out=tmp_path))
    (tmp_path / "runs.jsonl").write_text('{"task": "CartPole-v1"}')
    with pytest.raises(ConfigError, match=r"line 1 of .*runs.jsonl is damaged .*; remove it"):
        scoreboard.main(Arguments(out=tmp_path))


def test_the_page_is_made_of_its_lines():
    folder = Path(scoreboard.__file__).parent / "results" / "scoreboard"
    lines = scoreboard.read_lines(folder / "runs.jsonl")
    assert (folder / "README.md").read_text() == f"{scoreboard.HEAD}\n{scoreboard.table(lines)}"

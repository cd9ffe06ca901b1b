"""The scoreboard: when a task counts as solved, its lines and its table; no time is asserted."""

import json
import math
import subprocess
from pathlib import Path

import pytest

from experiments import scoreboard
from experiments.harness import cold_start
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


def test_each_run_adds_its_lines_and_the_page_has_them_all(tmp_path, monkeypatch):
    """Each process is replaced by one that ends at once; the n-th implementation takes 10 n seconds, 2 n warm."""
    kinds, folders, others, steps = [], set(), subprocess.run, {"plain PPO": 81_920, "PPO": 40_960, "GRPO": math.inf}

    def run(command, *, env=None, **options):
        if env is None:
            return others(command, **options)
        name, task = command[3], Task(*json.loads(command[6]))
        kinds.extend([name] * (name not in kinds))
        folder = env["JAX_COMPILATION_CACHE_DIR"]
        seconds = (2.0 if folder in folders else 10.0) * (1 + kinds.index(name))
        folders.add(folder)
        result = dict.fromkeys((*task.stages, *cold_start.PROGRAMS), seconds) | {"steps": steps[name]}
        result |= {task.stages[-1]: math.inf} if steps[name] == math.inf else {}
        return subprocess.CompletedProcess(command, 0, f"{json.dumps(result)}\n", "")

    monkeypatch.setattr(cold_start.subprocess, "run", run)
    scoreboard.main(Arguments(("Acrobot-v1",), ("plain PPO", "PPO", "GRPO"), 2, "beside | other work", tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [line["implementation"] for line in lines] == ["plain PPO", "PPO", "GRPO"]
    assert lines[1]["seconds"] == {"empty": [20.0, 20.0], "warm": [4.0, 4.0]} and lines[1]["steps"] == [40_960] * 2
    page = (tmp_path / "README.md").read_text()
    assert page == f"{scoreboard.HEAD}\n{scoreboard.table(lines)}"
    assert "| Acrobot-v1, -100 | PPO | 20.0 (2.00×) | 4.0 (2.00×) | 40,960 | 2 of 2 |" in page
    assert "| GRPO | not reached | not reached | not reached | 0 of 2 |" in page and r"; beside \| other work |" in page


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

"""The measurements of a GPU: that none is made again, the page of their lines, and all of them small; without a GPU."""

import json

import pytest

from experiments import gpu_hour
from experiments.harness.gpu_page import RESULTS, write_page

HERE = {"device": "H", "jax": "0.11", "commit": "c"}
SPEED = {"steps_per_second": 3e6, "steps_per_second_low": 2e6, "compile_seconds": 9.0, "memory_bytes": 2**20}
LINES = [
    {
        "piece": "first",
        "name": "2,048 environments: PPO, gpu",
        **SPEED,
        "launches": 7,
        "milliseconds": 0.5,
        "kernels": {},
    },
    {"piece": "first", "name": "2,048 environments: plain PPO", **SPEED, "steps_per_second": 2e6},
    {"piece": "first", "name": "2,048 environments: GRPO, gpu", "failed": "no memory"},
    {"piece": "cold", "name": "plain PPO", "cache": "empty", "compile": 6.25},
]


def test_lines_are_kept_and_make_a_page(tmp_path):
    text = "\n".join(json.dumps(line | HERE) for line in LINES) + '\n{"cut o'
    (tmp_path / RESULTS).write_text(text)
    assert {name for _, _, name in gpu_hour.measured(tmp_path)} == {LINES[i]["name"] for i in (0, 1, 3)}
    write_page(tmp_path, "")
    page = (tmp_path / "README.md").read_text()
    assert page.startswith("# H\n\njax 0.11, commit c\n") and "| plain PPO empty | 6.25 |" in page
    assert "| 2,048 environments | 3 | 2 | 1.5 |" in page and "- 2,048 environments: GRPO, gpu: no memory" in page
    assert "2,048 environments: PPO, gpu: 7 kernels and copies, 0.500 ms" in page


@pytest.mark.slow
def test_every_piece_runs_small(tmp_path, capfd):
    gpu_hour.main(gpu_hour.Arguments(smoke=True, minutes=30.0, out=tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "smoke" / RESULTS).read_text().splitlines()]
    assert all("pip install" in line["failed"] for line in lines if "failed" in line), lines
    assert {line["piece"] for line in lines} >= gpu_hour.PIECES.keys() - {"brax"}, capfd.readouterr()
    assert (tmp_path / "smoke" / "README.md").read_text().startswith("# A smoke test")

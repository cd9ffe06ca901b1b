"""The measurements of a GPU: that none is made again, the page of their lines, and all of them small; without a GPU."""

import dataclasses
import json
import pkgutil

import pytest

from experiments import gpu_hour
from experiments.harness.gpu_page import RESULTS, write_page
from grpo_jax.devices.execution_plan import ExecutionPlan

COLD = {"device": "H", "jax": "0.11", "commit": "c", "piece": "cold", "name": "plain PPO", "compile": 6.25}
SPEED = {"steps_per_second": 3e6, "steps_per_second_low": 2e6, "compile_seconds": 9.0, "memory_bytes": 2**20}
SPEED = COLD | SPEED | {"piece": "first", "launches": 7, "milliseconds": 0.5, "kernels": {}}
CHOICE = SPEED | {"piece": "choices", "name": "B: PPO, steps_per_loop 8"}
LINES = [CHOICE, COLD, SPEED | {"name": "A: PPO, gpu"}, SPEED | {"name": "A: plain PPO", "steps_per_second": 2e6}]


def test_lines_are_kept_and_make_a_page(tmp_path):
    written = map(json.dumps, [*LINES, COLD | {"name": "A: GRPO, gpu", "failed": "no memory"}])
    (tmp_path / RESULTS).write_text("\n".join(written) + '\n{"cut o')
    assert {name for _, _, name in gpu_hour.measured(tmp_path)} == {line["name"] for line in LINES}
    write_page(tmp_path, "")
    page = (tmp_path / "README.md").read_text()
    assert page.startswith("# H\n\njax 0.11, commit c\n") and "| plain PPO | 6.25 |" in page
    assert "| A | 3 | 2 | 1.5 |" in page and "- A: GRPO, gpu: no memory" in page
    assert "A: PPO, gpu: 7 kernels and copies, 0.500 ms" in page and "| PPO, steps_per_loop 8 | 3 |" in page


def test_choices_cover_the_fields_of_a_plan_and_patch_what_there_is():
    elsewhere = {"hopper_kernels", "steps_per_check"}  # timed by the two plans; of whole episodes alone
    fields = {field.name for field in dataclasses.fields(ExecutionPlan)} - elsewhere
    assert fields == {field for choice in gpu_hour.CHOICES.values() for field in choice}
    assert all(pkgutil.resolve_name(name) for patch in gpu_hour.PATCHES.values() for name in patch)


@pytest.mark.slow
def test_every_piece_runs_small(tmp_path, capfd):
    gpu_hour.main(gpu_hour.Arguments(smoke=True, minutes=30.0, out=tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "smoke" / RESULTS).read_text().splitlines()]
    assert all("pip install" in line["failed"] for line in lines if "failed" in line), lines
    assert {line["piece"] for line in lines} >= gpu_hour.PIECES.keys() - {"brax"}, capfd.readouterr()

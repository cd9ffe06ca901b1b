"""The README, whose code runs as printed, and the papers of the algorithms."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import grpo_jax
from grpo_jax.algorithms import ALGORITHMS, PAPERS
from grpo_jax.training.checks import check_run, try_on_shapes

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
FAMILIES = (REPOSITORY / "docs" / "grpo.md").read_text(encoding="utf-8").partition("## The families")[2]
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_first_code_block_asks_for_a_run_that_there_is(monkeypatch, capsys):
    """All but the training: names, fields, rows, and a train step on shapes with the metric that is printed."""

    def run_on_shapes(config, hyperparams, keys):
        check_run(config, hyperparams)
        metrics = try_on_shapes(config, hyperparams)
        return SimpleNamespace(metrics={name: np.zeros((1, len(keys))) for name in metrics})

    monkeypatch.setattr(grpo_jax, "run", run_on_shapes)
    exec(compile(BLOCKS[0], "README.md", "exec"), {})
    assert capsys.readouterr().out == "[0. 0. 0. 0.]\n"


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_code_blocks_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # One train step of short episodes tells as much as many of long ones.
    for number, smaller in {"80_000": "4_096", "200_000": "3_000", "num_seeds=8": "num_seeds=1"}.items():
        block = block.replace(number, smaller)
    block = block.replace('algorithm="grpo"', 'algorithm="grpo", env_params={"max_steps_in_episode": 20}')
    exec(compile(block, "README.md", "exec"), {})


def test_every_algorithm_has_a_paper_and_a_family():
    assert PAPERS.keys() == ALGORITHMS.keys() == set(re.findall(r"`(\w+)`", FAMILIES)) & ALGORITHMS.keys()


def test_every_paper_is_linked_beside_its_formula():
    files = [path for path in Path(grpo_jax.__file__).parent.rglob("*.py") if path.name != "algorithms.py"]
    linked = set(re.findall(r"arxiv\.org/abs/([\d.]+\d)", "".join(path.read_text(encoding="utf-8") for path in files)))
    assert not {name for name, paper in PAPERS.items() if paper not in linked}

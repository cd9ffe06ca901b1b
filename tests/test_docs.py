"""The documentation: its code runs as printed, block after block, and what it promises of the command line holds."""

import re
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from grpo_jax.environments import make_environment
from grpo_jax.environments.suites import SUITES

ENVIRONMENTS = (Path(__file__).parents[1] / "docs" / "environments.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", ENVIRONMENTS, flags=re.DOTALL)


@pytest.fixture(scope="module")
def names():
    names = {"__name__": "corridor"}
    for block in BLOCKS:
        exec(compile(block, "environments.md", "exec"), names)
    return names


def test_code_blocks_run(names):
    assert names["metrics"]["environment/steps"] > 0
    assert jnp.allclose(names["swept"].rollout.environment_params["slip"][:, 0], names["slips"])
    slips = names["randomised"].rollout.environment_params["slip"].reshape(-1, 16)
    assert (slips == slips[:, :1]).all() and len(set(slips[:, 0].tolist())) == 4


@pytest.mark.slow
def test_completions_have_the_shapes_that_are_told():
    page = (Path(__file__).parents[1] / "docs" / "transformers.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(block, "transformers.md", "exec"), names := {})
    assert [names[name].shape for name in ("tokens", "log_probs", "lengths")] == [(2, 4, 6), (2, 4, 6), (2, 4)]


def test_the_example_is_an_environment_by_its_path(names, monkeypatch):
    monkeypatch.setitem(sys.modules, "corridor", type(sys)("corridor"))
    vars(sys.modules["corridor"]).update(names)
    env = make_environment("corridor:Corridor", {"length": 7})
    assert set(env.params) == {"length", "slip"} and env.max_steps == 20
    assert make_environment("corridor:Walls").action_mask is not None


def test_the_suites_are_named():
    assert all(f"`{suite}:" in ENVIRONMENTS for suite in SUITES)


def test_the_example_is_about_thirty_lines():
    lines = BLOCKS[0].splitlines()
    example = lines[lines.index("@struct.dataclass") : lines.index(next(x for x in lines if x.startswith("config")))]
    assert len([line for line in example if line.strip()]) <= 30

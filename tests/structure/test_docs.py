"""The documentation: its code runs as printed, block after block, and what it promises of the command line holds."""

import re
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from grpo_jax.environments import make_environment
from grpo_jax.environments.suites import SUITES
from grpo_jax.environments.tokens import TASKS, make_task
from grpo_jax.recording.recorder import Recording

ENVIRONMENTS = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", ENVIRONMENTS, flags=re.DOTALL)
TOKENS = (Path(__file__).parents[2] / "docs" / "tokens.md").read_text(encoding="utf-8")
LONG_RUNS = (Path(__file__).parents[2] / "docs" / "long_runs.md").read_text(encoding="utf-8")


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


def test_groups_are_configured_as_printed():
    page = (Path(__file__).parents[2] / "docs" / "groups.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(block, "groups.md", "exec"), {})


@pytest.mark.slow
def test_completions_have_the_shapes_that_are_told():
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")
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


@pytest.mark.slow
def test_the_page_about_token_tasks_runs():
    names = {"__name__": "my_tasks"}
    for block in re.findall(r"```python\n(.*?)```", TOKENS, flags=re.DOTALL):
        exec(compile(block, "tokens.md", "exec"), names)
    assert names["answers"].correct.shape == (4, 8)
    assert names["metrics"]["episode/count"] == 16
    assert names["trained"].steps[-1].max() > 0
    assert make_environment(names["larger"]).max_steps == 3


def test_the_token_tasks_are_named():
    for name, prompt, completion in re.findall(r"\| `tokens:(\S+)` \| `(\S+)=` `(\S+)` \|", TOKENS):
        task = make_task(name)
        written = [task.vocabulary.index(character) for character in completion]
        assert len(written) <= task.max_length and set(prompt) <= set(task.vocabulary)
    assert all(f"`tokens:{kind}-" in TOKENS for kind in TASKS)


@pytest.mark.slow
def test_the_recorded_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", LONG_RUNS, flags=re.DOTALL)
    first, again = {}, {}
    for names in (first, again):
        exec(compile(block, "long_runs.md", "exec"), names)
    assert len(again["result"].steps) == len(first["result"].steps) == 39
    assert first["result"].compile_seconds > 0 == again["result"].compile_seconds
    assert (tmp_path / "runs" / "mine" / "metrics.jsonl").exists()


def test_flags_of_long_runs_are_those_of_the_experiments():
    fields = Recording.__dataclass_fields__
    assert all(f"--{field.replace('_', '-')}" in LONG_RUNS for field in fields)

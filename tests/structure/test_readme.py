"""The README, whose code runs as printed, the map of the folders, and the algorithms that pages list."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import grpo_jax
from grpo_jax.algorithms import ALGORITHMS, GRPO, PAPERS
from grpo_jax.groups import Start
from grpo_jax.training.checks import check_run, try_on_shapes

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
ALGORITHMS_PAGE = (REPOSITORY / "docs" / "algorithms.md").read_text(encoding="utf-8")
STUDY = (REPOSITORY / "experiments" / "results" / "family" / "README.md").read_text(encoding="utf-8")
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


def table() -> str:
    """The algorithms as Markdown: name, slots in which they differ from GRPO, paper."""

    def shown(value):
        if type(value) is tuple:
            return "(" + ", ".join(map(shown, value)) + ")"
        if isinstance(value, Start):
            return next(name for name in ("FRESH", "CONTINUE", "ANCHORED") if getattr(grpo_jax, name) == value)
        return getattr(value, "__name__", str(value))

    rows = ["| algorithm | slots | paper |", "|---|---|---|"]
    for name, algorithm in ALGORITHMS.items():
        differing = {
            slot: value
            for slot, value in algorithm._asdict().items()
            if (name == "grpo" or value != getattr(GRPO, slot)) and value not in (None, False)
        }
        slots = ", ".join(f"`{slot}={shown(value)}`" for slot, value in differing.items())
        paper = f"[{PAPERS[name]}](https://arxiv.org/abs/{PAPERS[name]})"
        rows.append(f"| `{name}` | {slots} | {paper} |")
    return "\n".join(rows)


def test_table_of_algorithms_is_that_of_the_code():
    assert table() in ALGORITHMS_PAGE, "the table in docs/algorithms.md should be:\n" + table()


def test_every_algorithm_has_a_paper_and_a_family():
    assert PAPERS.keys() == ALGORITHMS.keys() == set(re.findall(r"`(\w+)`", FAMILIES)) & ALGORITHMS.keys()


def test_every_algorithm_was_trained_in_the_study_of_the_family():
    assert not ALGORITHMS.keys() - set(re.findall(r"^\| `(\w+)` \| \d", STUDY, flags=re.MULTILINE))


def test_every_paper_is_linked_beside_its_formula():
    files = [path for path in Path(grpo_jax.__file__).parent.rglob("*.py") if path.name != "algorithms.py"]
    linked = set(re.findall(r"arxiv\.org/abs/([\d.]+\d)", "".join(path.read_text(encoding="utf-8") for path in files)))
    assert not {name for name, paper in PAPERS.items() if paper not in linked}


def test_map_is_the_folder_listing():
    (listing,) = re.findall(r"```\ngrpo_jax/\n(.*?)```", CONTRIBUTING, flags=re.DOTALL)
    names = [name for line in listing.splitlines() for name in re.findall(r"\w+(?:/|\.py)", line.partition("   ")[0])]
    package = Path(grpo_jax.__file__).parent
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert sorted(names) == sorted(folders | {path.name for path in package.glob("[!_]*.py")})


def test_is_short():
    assert len(README.splitlines()) <= 100

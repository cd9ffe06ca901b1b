"""The wheel, built and installed into a new environment: the commands of a user who has no clone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TINY = "--num-envs 4 --num-steps 16 --num-minibatches 2 --hidden-sizes 8 --total-steps 200"

# Commands, one after the other in one empty folder, each with words of what it prints.
COMMANDS = {
    "grpo-jax --version": "grpo-jax ",
    "grpo-jax --help": "Any algorithm on any environment",
    "grpo-jax train --help": "usage: grpo-jax train ",
    "grpo-jax docs sharp_bits": "TF32",
    "grpo-jax train --environment CartPole-v1 --algorithm ppo --num-seeds 2 --total-steps 20000 --out runs/ppo": (
        "Results in runs/ppo"
    ),
    "grpo-jax plot runs/ppo --out runs/plot": "Curves in runs/plot",
    "grpo-jax evaluate runs/ppo --num-episodes 20": "20 sampled episodes of each of 2 seeds",
    "grpo-jax play runs/ppo --out cartpole.gif": "Drawn in cartpole.gif",
    "grpo-jax export runs/ppo --out exported": "exported/act.jax_export",
    f"grpo-jax sweep --environment Catch-bsuite --algorithm ppo --learning-rate 1e-3 1e-2 --num-seeds 2 {TINY} "
    "--schedule own:half": ("The best again: grpo-jax train --config runs/sweep_"),
}

EXPORTED = """
import pathlib, sys
sys.modules["grpo_jax"] = None  # importing it is an error
import numpy as np
from jax import export
act = export.deserialize(pathlib.Path("exported/act.jax_export").read_bytes())
print(len(act.call(np.zeros((3, 4), np.float32))), "actions")
"""


def run(command: str, folder: Path, path: Path) -> str:
    """What a command prints, which succeeds, with the programs of an environment first."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    environment["PATH"] = f"{path}:{environment['PATH']}"
    done = subprocess.run(command.split(), cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder of the programs of an environment in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, as setuptools would also pack what an earlier build has left in build/.
    ignored = shutil.ignore_patterns(".*", "build", "venv", "*.egg-info")
    source = shutil.copytree(REPOSITORY, folder / "source", ignore=ignored)
    run(f"{sys.executable} -m pip wheel -q --no-deps -w {folder} {source}", folder, folder)
    run(f"{sys.executable} -m venv {folder / 'venv'}", folder, folder)
    (wheel,) = folder.glob("*.whl")
    run(f"{folder / 'venv' / 'bin' / 'pip'} install -q {wheel}", folder, folder)
    return folder / "venv" / "bin"


@pytest.mark.slow
def test_an_installed_wheel_trains(programs, tmp_path):
    (tmp_path / "own.py").write_text("def half(progress):\n    return 0.5 + 0.0 * progress\n")
    for command, words in COMMANDS.items():
        assert words in run(command, tmp_path, programs), command
    assert (tmp_path / "runs" / "plot" / "comparison.png").exists()
    (tmp_path / "without_the_package.py").write_text(EXPORTED)
    assert run("python without_the_package.py", tmp_path, programs) == "3 actions\n"

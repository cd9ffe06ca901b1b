"""The hour on a GPU: what it would run, that it goes on where it stopped, and its page; no GPU is needed."""

import importlib
import json

import pytest

from experiments import gpu_hour
from experiments.harness.gpu_page import write_page
from grpo_jax.commands.harness.parsing import parse_flags

MEASUREMENTS = {f"{piece}/{name}": each for piece, all_of in gpu_hour.PIECES.items() for name, each in all_of.items()}


def test_every_measurement_is_a_command_with_flags_that_exist():
    for name, measurement in MEASUREMENTS.items():
        (module, *small), (_, *large) = (measurement.words(smoke=smoke) for smoke in (True, False))
        if module != "pytest":
            arguments = importlib.import_module(module).Arguments
            small, large = parse_flags(arguments, small), parse_flags(arguments, large)
            assert small.out == large.out and (small != large or not measurement.smaller), name


def test_the_page_has_a_whole_training_beside_the_published_one(tmp_path):
    folder = tmp_path / "shapes" / "purejaxrl-cartpole"
    folder.mkdir(parents=True)
    row = {"implementation": "PPO", "num_seeds": 2048, "steps_per_second": 51_200_000.0, "compile_seconds": 9.0}
    (folder / "speed.json").write_text(json.dumps({"results": [row]}))
    write_page(tmp_path, "H100", smoke=False)
    assert not (tmp_path / "README.md").exists(), "an unfinished measurement is not on the page"
    (folder / "measured.json").write_text(json.dumps({"command": "python -m experiments.benchmark", "seconds": 120.0}))
    write_page(tmp_path, "H100", smoke=False)
    page = (tmp_path / "README.md").read_text()
    assert page.startswith("# Measured on H100") and "2 minutes in all" in page
    # 500,000 steps of 2,048 seeds at 51.2 million a second
    assert "| purejaxrl: CartPole, 2,048 seeds | PPO | 20.0 + 9 | 51,200,000 | 98 (A100, purejaxrl docs" in page
    assert (tmp_path / "seconds.png").stat().st_size > 1000


@pytest.mark.slow
def test_every_piece_runs_small(tmp_path, capsys):
    gpu_hour.main(gpu_hour.Arguments(smoke=True, out=tmp_path))
    failed = [line for line in capsys.readouterr().out.splitlines() if "failed:" in line]
    assert all("pip install" in line for line in failed), failed
    page = (tmp_path / "smoke" / "README.md").read_text()
    assert page.startswith("# A smoke test")
    assert all(f"## {title}" in page for title in ("Published trainings", "Settings", "Language models"))
    assert "Tests on the device: 1, of which 0 failed" in page

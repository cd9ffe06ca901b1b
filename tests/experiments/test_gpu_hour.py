"""The hour on a GPU: what it would run, that it goes on where it stopped, and its page; no GPU is needed."""

import importlib

import pytest

from experiments import gpu_hour
from grpo_jax.commands.harness.parsing import parse_flags

MEASUREMENTS = {f"{piece}/{name}": each for piece, all_of in gpu_hour.PIECES.items() for name, each in all_of.items()}


def test_every_measurement_is_a_command_with_flags_that_exist():
    for name, measurement in MEASUREMENTS.items():
        (module, *small), (_, *large) = (measurement.words(smoke=smoke) for smoke in (True, False))
        if module != "pytest":
            arguments = importlib.import_module(module).Arguments
            small, large = parse_flags(arguments, small), parse_flags(arguments, large)
            assert small.out == large.out and (small != large or not measurement.smaller), name


@pytest.mark.slow
def test_every_piece_runs_small(tmp_path, capsys):
    gpu_hour.main(gpu_hour.Arguments(smoke=True, out=tmp_path))
    failed = [line for line in capsys.readouterr().out.splitlines() if "failed:" in line]
    assert all("pip install" in line for line in failed), failed
    page = (tmp_path / "smoke" / "README.md").read_text()
    assert page.startswith("# A smoke test")
    assert all(f"## {title}" in page for title in ("Published trainings", "Settings", "Language models"))
    assert "Tests on the device: 1, of which 0 failed" in page

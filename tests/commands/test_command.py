"""What the commands share: a console, and one line for what a user can mend."""

import errno
import os
import signal
import sys

import jax
import pytest

from experiments.harness.provenance import provenance
from grpo_jax.commands.harness.command import command
from grpo_jax.errors import ConfigError
from grpo_jax.recording import run_folder
from grpo_jax.recording.run_folder import StopSignal


@pytest.mark.parametrize(
    "error, said",
    [
        (ConfigError("num_envs=3 is odd"), "error: num_envs=3 is odd\n"),
        (MemoryError(), "error: not enough memory; use smaller numbers\n"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB\nat 0x12"),
            "error: not enough memory: RESOURCE_EXHAUSTED: 9 GiB; use smaller numbers\n",
        ),
        (KeyboardInterrupt(), "interrupted\n"),
    ],
)
def test_what_a_user_can_mend_is_one_line(error, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grpo-jax train"])
    monkeypatch.setattr(run_folder, "_locks", {})  # as in a process without other runs

    def fail():
        raise error

    with pytest.raises(SystemExit) as stopped:
        command(fail)
    assert capsys.readouterr().err == said
    assert stopped.value.code == (130 if isinstance(error, KeyboardInterrupt) else 2)


@pytest.mark.parametrize("error", [OSError(errno.EINVAL, "a fault"), jax.errors.JaxRuntimeError("INTERNAL: a fault")])
def test_a_fault_of_ours_keeps_its_traceback(error, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo-jax train"])

    def fail():
        raise error

    with pytest.raises(type(error), match="a fault"):
        command(fail)


def test_a_signal_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grpo-jax", "--seed", "3", "--out", "elsewhere", "--resume"])

    def stop():
        raise StopSignal(signal.SIGTERM, tmp_path)

    for said in (f"SIGTERM: saved in {tmp_path}, for good\n", f"--seed 3 --out {tmp_path} --resume\n"):
        with pytest.raises(StopSignal):
            command(stop)
        assert capsys.readouterr().err.endswith(said)
        (tmp_path / "checkpoints").mkdir(exist_ok=True)


@pytest.mark.parametrize("given", ["", "--xla_cpu_collective_call_terminate_timeout_seconds=60"])
def test_devices_wait_for_each_other_for_more_than_40_seconds(given, monkeypatch):
    """A limit that the user gives comes later in the variable, and XLA takes the last."""
    monkeypatch.setenv("XLA_FLAGS", given)
    for _ in range(2):
        command(lambda: None)
        flags = os.environ["XLA_FLAGS"].split()
        assert flags[1] == "--xla_cpu_collective_call_terminate_timeout_seconds=86400" and flags[2:] == given.split()
    assert provenance()["settings"].get("XLA_FLAGS", "") == given
    monkeypatch.setenv("XLA_FLAGS", "flags.txt")  # a file of flags is kept
    command(lambda: None)
    assert os.environ["XLA_FLAGS"] == "flags.txt"

"""A folder has one writer; what cannot be written to, or holds another run, is one line."""

import fcntl
import os
import signal
from pathlib import Path

import pytest

import grpo_jax
from grpo_jax import Recording
from grpo_jax.errors import ConfigError
from grpo_jax.language import load_model, read_prompts
from grpo_jax.recording import run_folder
from grpo_jax.recording.files import as_path
from grpo_jax.recording.run_folder import deferred_signals, prepare_folder


@pytest.fixture(autouse=True)
def no_locks(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(run_folder, "_locks", {})


def test_a_folder_has_one_writer(tmp_path):
    with (tmp_path / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(FileExistsError, match="another process is writing to .* Wait for it"):
            prepare_folder(tmp_path, [], resume=True)
    for _ in range(2):  # several runs of one process share it
        prepare_folder(tmp_path, [], resume=True)
    with (tmp_path / ".lock").open("a") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "checkpoints/ppo/1"])
def test_a_folder_with_results_is_refused_and_left_alone(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("old")
    before = {*tmp_path.rglob("*")}
    with pytest.raises(FileExistsError, match=rf"already holds a run \({name.split('/')[0]}\).*--out"):
        prepare_folder(tmp_path, [], resume=False)
    assert {*tmp_path.rglob("*")} == before and (tmp_path / name).read_text() == "old"


@pytest.mark.parametrize("place", ["file", "file/in", "loop", "/dev/null/x", "/proc/x", "n" * 300])
def test_what_cannot_be_a_folder_is_one_line(place, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="cannot be written to: .*--out") as refused:
        prepare_folder(tmp_path / place, [], resume=False)
    assert "\n" not in str(refused.value) and {path.name for path in tmp_path.iterdir()} == {"file", "loop"}


def test_a_path_is_what_a_user_means(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert as_path("~/runs") == tmp_path / "runs" == Recording("~/runs").out and as_path("a/~") == Path("a/~")
    for read in (grpo_jax.load, load_model, read_prompts):
        with pytest.raises(ConfigError, match=str(tmp_path)):
            read("~/nothing")
    for wrong in ("", None, 3, "a\0b", "~nobody_of_this_name/x"):
        with pytest.raises(ConfigError, match="is no path: .*such as runs/mine"):
            as_path(wrong)


def test_signals_wait_and_a_second_interrupt_does_not():
    # As in a terminal: what a shell runs in the background ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred_signals() as received:
        os.kill(os.getpid(), signal.SIGINT)
        reached.append(list(received))
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("never")
    assert reached == [[signal.SIGINT]]
    with pytest.raises(KeyboardInterrupt):  # one that nobody asked for
        with deferred_signals():
            os.kill(os.getpid(), signal.SIGINT)
        reached.append("never")
    with deferred_signals() as received:
        pass
    assert received == [] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and len(reached) == 1

"""A folder has one writer; what cannot be written to, or holds another run, is one line."""

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from saved_policies import save_policies
from small import small_config

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
    shutil.rmtree(tmp_path)
    prepare_folder(tmp_path, [], resume=True)
    with (tmp_path / ".lock").open("a") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "checkpoints/ppo/1"])
def test_a_folder_with_results_is_refused_and_left_alone(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("old")
    before = {*tmp_path.rglob("*")}
    with pytest.raises(FileExistsError, match=rf"already holds a run \({name.split('/')[0]}\).*another folder"):
        prepare_folder(tmp_path, [], resume=False)
    assert {*tmp_path.rglob("*")} == before and (tmp_path / name).read_text() == "old"


@pytest.mark.parametrize("place", ["file", "file/in", "loop", "/dev/null/x", "/proc/x", "n" * 300])
def test_what_cannot_be_a_folder_is_one_line(place, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="cannot be written to: .*another folder") as refused:
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


READ = """
import sys, jax, numpy, grpo_jax
from grpo_jax import Hyperparams, Recording, recorded_run
from grpo_jax.commands import evaluate, play
folder, gif = map(grpo_jax.recording.files.as_path, sys.argv[1:])
policy, key = grpo_jax.load(folder, which="best"), jax.random.key(0)
assert policy.act(numpy.zeros(policy.config.env.observation.shape)) in (0, 1, 2)
evaluate.main(evaluate.Arguments(folder, num_episodes=2))
play.main(play.Arguments(folder, out=gif))
for out, resume in ((folder, True), (folder / "inner", False)):
    try:
        recorded_run(policy.config, Hyperparams(total_steps=64), key[None], Recording(out, 100, resume))
    except OSError as error:
        print("said:", error)
"""


@pytest.mark.slow
def test_a_read_only_folder_is_read_and_never_written(tmp_path):
    def as_an_ordinary_user():
        drop_from_bounding_set, override_permissions = 24, 1  # also root then has to respect permissions
        ctypes.CDLL(None).prctl(drop_from_bounding_set, override_permissions, 0, 0, 0)

    folder, gif = tmp_path / "run", tmp_path / "episode.gif"
    save_policies(folder, small_config("ppo", "Catch-bsuite", num_steps=2))
    parts = [folder, *folder.rglob("*")]
    for part in parts:
        part.chmod(0o555 if part.is_dir() else 0o444)
    command = [sys.executable, "-c", READ, str(folder), str(gif)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=as_an_ordinary_user)
    for part in parts:
        part.chmod(0o755)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("said:")]
    assert len(lines) == 2 and all("cannot be written to" in line for line in lines), done.stdout
    assert {*folder.rglob("*")} == {*parts[1:]} and gif.exists()

"""A folder has one writer: of processes that lock it at once, exactly one goes on; a read-only one has none."""

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from saved_policies import save_policies

import grpo_jax
from grpo_jax import Config, Recording
from grpo_jax.errors import ConfigError
from grpo_jax.language import load_model, read_prompts
from grpo_jax.policies import MLP
from grpo_jax.recording import run_folder
from grpo_jax.recording.files import as_path
from grpo_jax.recording.run_folder import clean_up_on_error, deferred_signals, prepare_folder

NUM_PROCESSES = 4


@pytest.fixture(autouse=True)
def no_locks(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(run_folder, "_locks", {})


def lock_at_once(folder) -> list[str]:
    """What several processes are told that resume the same folder at the same moment, "" for success."""
    (start, begin), (results, result) = os.pipe(), os.pipe()
    children = []
    for _ in range(NUM_PROCESSES):
        if child := os.fork():
            children.append(child)
            continue
        os.close(begin)
        os.read(start, 1)  # until all begin
        try:
            prepare_folder(folder, [], resume=True)
            said = ""
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(result, f"{said}\n".encode())
        os.close(result)
        signal.alarm(60)
        signal.pause()  # whoever has the lock keeps it until it ends
    os.close(result)
    os.close(begin)
    said = b""
    while said.count(b"\n") < NUM_PROCESSES and (more := os.read(results, 4096)):
        said += more
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)
    os.close(start)
    os.close(results)
    return said.decode().splitlines()


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # of forks, which end before JAX
def test_of_several_processes_exactly_one_resumes(tmp_path):
    for attempt in range(5):
        said = sorted(lock_at_once(tmp_path / f"run_{attempt % 2}"))  # also after the winner has died
        assert said[0] == "" and len(set(said[1:])) == 1, said
        assert said[1].startswith("FileExistsError: another process is writing to") and "Wait for it" in said[1]


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "checkpoints/ppo"])
def test_a_folder_with_results_is_refused_and_left_alone(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
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


def test_an_error_removes_what_was_begun_unless_an_iteration_is_recorded(tmp_path):
    for path in ("there/notes.txt", "a/mixed/theirs/.lock"):  # of another process, within the folder of this one
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("precious")
    for out, metrics in (("there", ""), ("new", ""), ("a/mixed", ""), ("kept", "{}")):
        with pytest.raises(KeyError), clean_up_on_error(tmp_path):
            prepare_folder(tmp_path / out, [], resume=False)
            (tmp_path / out / "checkpoints").mkdir()
            (tmp_path / out / "metrics.jsonl").write_text(metrics)
            raise KeyError
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    kept = {"kept", "kept/.lock", "kept/checkpoints", "kept/metrics.jsonl"}
    assert left == kept | {"there", "there/notes.txt", "a", "a/mixed", "a/mixed/theirs", "a/mixed/theirs/.lock"}


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


# --- read-only folders -----------------------------------------------------------------------------------------------


def as_an_ordinary_user():
    """For a process that is about to start: also root then has to respect permissions."""
    drop_from_bounding_set, override_permissions = 24, 1
    ctypes.CDLL(None).prctl(drop_from_bounding_set, override_permissions, 0, 0, 0)


SCRIPT = """
import sys
import jax, numpy as np
import grpo_jax
from grpo_jax import Config, Hyperparams, Recording, recorded_run
folder = sys.argv[1]
policy = grpo_jax.load(folder, which="best")
assert policy.act(np.zeros(policy.config.env.observation.shape)) in (0, 1, 2)
assert grpo_jax.evaluate(policy.config, policy.state(jax.random.key(0)), jax.random.key(0)).returns.shape
keys = jax.random.split(jax.random.key(0), 1)
for out, resume in ((folder, True), (folder + "/inner", False)):
    try:
        recorded_run(policy.config, Hyperparams(total_steps=64), keys, Recording(out, 100, resume))
    except OSError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_read_only_folder_is_read_and_never_written(tmp_path):
    config = Config(
        environment="Catch-bsuite", algorithm="ppo", num_envs=2, num_steps=2, num_minibatches=1, network=MLP((2,))
    )
    folder = tmp_path / "run"
    save_policies(folder, config)
    parts = [folder, *folder.rglob("*")]
    for part in parts:
        part.chmod(0o555 if part.is_dir() else 0o444)
    commands = [
        ("-c", textwrap.dedent(SCRIPT), str(folder)),
        ("-m", "grpo_jax.commands.evaluate", str(folder), "--num-episodes", "2"),
        ("-m", "grpo_jax.commands.play", str(folder), "--out", str(tmp_path / "episode.gif")),
    ]
    options = {"capture_output": True, "text": True, "preexec_fn": as_an_ordinary_user}
    try:
        done = [subprocess.run([sys.executable, *command], **options) for command in commands]
    finally:
        for part in parts:
            part.chmod(0o755)
    assert [each.returncode for each in done] == [0, 0, 0], [each.stderr for each in done]
    lines = done[0].stdout.splitlines()
    assert len(lines) == 2 and all("cannot be written to" in line and "(--out)" in line for line in lines), lines
    assert {*folder.rglob("*")} == {*parts[1:]} and (tmp_path / "episode.gif").exists()

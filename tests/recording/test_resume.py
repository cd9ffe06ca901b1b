"""Runs that were killed end as if they had not been: bitwise, each time in a new process.

In the same layout, that is: in another one XLA makes another program of a row, whose numbers are rounded differently.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from compilation import CHEAP_XLA_FLAGS
from probes import bits

from grpo_jax.recording.checkpoint import Checkpoints

REPOSITORY = Path(__file__).parents[2]
FLAGS = (
    *("--num-envs", "8", "--num-minibatches", "4", "--num-epochs", "2", "--hidden-sizes", "8", "--num-seeds", "3"),
    *("--checkpoint-every", "2", "--total-steps", "32000", "--env-params", "max_steps_in_episode=16"),
)
RUNS = {
    "ppo": ("--algorithm", "ppo", "--num-steps", "16", "--normalize-observations", "--normalize-rewards"),
    "grpo": ("--algorithm", "grpo", "--group-size", "4"),
    "gru": ("--algorithm", "grpo", "--group-size", "4", "--recurrent", "gru", "--recurrent-size", "8"),
    "anchored": ("--algorithm", "kernel_gae", "--group-size", "4", "--num-steps", "16", "--regroup-every", "8"),
    "parts": (
        *("--environment", "tests.probes:Parts", "--actor-observation", "position", "velocity", "--frame-stack", "2"),
        *("--algorithm", "ppo", "--num-steps", "16", "--normalize-observations"),
    ),
    "envs": ("--algorithm", "grpo", "--group-size", "4", "--mesh", "envs=2", "--total-steps", "16000"),
}
# Where processes talk to each other, an iteration takes longer.
FEW = ("--num-steps", "16", "--checkpoint-every", "4", "--total-steps", "3840")
WINDOWS = (*FEW, "--group-size", "4", "--regroup-every", "8")
RUNS |= {
    "hosts": ("--algorithm", "ppo", *FEW),
    "kernel": ("--algorithm", "kernel_gae", *WINDOWS),
    "critic": ("--algorithm", "same_step_critic", *WINDOWS, "--normalize-rewards"),
    "forks": ("--algorithm", "forks", *FEW, "--group-size", "4"),
}
# Starts that have no name on the command line get one.
TRAIN = """
import sys
from grpo_jax.algorithms import ALGORITHMS, SAME_STEP_GAE
from grpo_jax.groups import forked
ALGORITHMS["forks"] = SAME_STEP_GAE._replace(start=forked(3))
from grpo_jax.commands.harness.command import command
from grpo_jax.commands.train import Arguments, main
from grpo_jax.commands.harness.flags import parse
command(lambda: main(parse(Arguments, sys.argv[1:])))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("compiled"))
    cache = {"XDG_CACHE_HOME": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    return os.environ | cache | devices | {"XLA_FLAGS": CHEAP_XLA_FLAGS}


def begin(kind, out, environment, *flags):
    command = [sys.executable, "-c", TRAIN, *FLAGS, *RUNS[kind], "--out", str(out), *flags]
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def begin_both(kind, out, environment, *flags):
    """Two processes of two devices each, as on two hosts."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    hosts = ("--coordinator", address, "--num-processes", "2", "--process-id")
    return [begin(kind, out, environment, *flags, *hosts, str(number)) for number in range(2)]


def finish(process):
    out, err = process.communicate(timeout=600)
    return process.returncode, out + err


def finish_well(*processes):
    codes, said = zip(*map(finish, processes), strict=True)
    assert not any(codes), said


def ending(out):
    """What a run leaves behind, but for its times: the final state bit by bit, its record, its evaluation."""
    (folder,) = out.glob(f"checkpoints/*/{last_saved(out)}")
    state = json.loads((folder / "run" / "metadata").read_text())
    arrays = Checkpoints(folder.parent, state["description"])._manager.restore(int(folder.name)).arrays
    summary = json.loads((out / "summary.json").read_text())["runs"][0]
    return {
        "iteration": state["iteration"],
        "steps": state["steps"],
        "state": bits(arrays),
        "metrics": (out / "metrics.jsonl").read_bytes(),
        "final_return": summary["final_return"],
        "warnings": summary["warnings"],
    }


def num_recorded(out):
    metrics = out / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def last_saved(out):
    return max((int(path.name) for path in out.glob("checkpoints/*/*") if path.name.isdigit()), default=0)


def wait_for(condition, process):
    while not condition() and process.poll() is None:
        time.sleep(0.002)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, environment):
    """The ending of a run of one process, with so many devices; or of two processes, if there is a mesh."""
    endings = {}

    def of(kind, *mesh, num_devices=2):
        if (kind, mesh, num_devices) not in endings:
            out = tmp_path_factory.mktemp(kind) / "out"
            if mesh:
                finish_well(*begin_both(kind, out, environment, "--mesh", *mesh))
            else:
                finish_well(begin(kind, out, environment | {"JAX_NUM_CPU_DEVICES": str(num_devices)}))
            endings[kind, mesh, num_devices] = ending(out)
        return endings[kind, mesh, num_devices]

    return of


def assert_close(one, other, first):
    """Three iterations from `first` on to rounding. Not all: where an action is sampled otherwise, the runs part."""
    lines, others = ([json.loads(line) for line in end["metrics"].splitlines()] for end in (one, other))
    assert len(lines) == len(others) > first + 3
    assert lines[0].keys() == others[0].keys()
    for line, same in zip(lines[first : first + 3], others[first:], strict=False):
        for name in line.keys() - {"run"}:
            values, expected = (np.array(of[name], float) for of in (same, line))
            np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, num_kills", [("ppo", 20), ("grpo", 2), ("gru", 2), ("parts", 2), ("anchored", 2), ("envs", 2)]
)
def test_killed_at_random_moments(kind, num_kills, uninterrupted, environment, tmp_path):
    expected = uninterrupted(kind)
    out, moments = tmp_path / "out", random.Random(0)
    kills, saving, resumed_from = 0, 0, []
    while kills < num_kills:
        unfinished = set(out.glob("checkpoints/*/*tmp*"))
        process = begin(kind, out, environment, "--resume")
        # Some while it starts, the others after some new iterations and checkpoints: of each chunk there is one.
        if kills % 5 == 4:
            time.sleep(moments.uniform(0, 4))
        else:
            enough = last_saved(out) + moments.randint(1, 10)
            wait_for(lambda enough=enough: num_recorded(out) >= enough and last_saved(out) >= enough - 4, process)
            time.sleep(moments.uniform(0, 0.3))
        if process.poll() is not None:
            break  # it came to its end first
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
        saving += bool(set(out.glob("checkpoints/*/*tmp*")) - unfinished)
        resumed_from.append(last_saved(out))
    finish_well(begin(kind, out, environment, "--resume"))
    print(f"{kind}: killed {kills} times, {saving} in the middle of a save, at iterations {resumed_from}")
    assert kills == num_kills, "make the run longer"
    assert ending(out) == expected


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_loses_no_iteration(number, uninterrupted, environment, tmp_path):
    expected, out = uninterrupted("ppo"), tmp_path / "out"
    process = begin("ppo", out, environment)
    wait_for(lambda: num_recorded(out) > 0, process)
    time.sleep(0.1)
    process.send_signal(number)
    code, said = finish(process)
    assert code == 128 + number and "--resume" in said and "Traceback" not in said, said
    assert 0 < num_recorded(out) == last_saved(out) < expected["iteration"]
    finish_well(begin("ppo", out, environment, "--resume"))
    assert ending(out) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, mesh",
    [
        ("hosts", ("seeds=4",)),
        ("hosts", ("seeds=2", "envs=2")),
        ("kernel", ("envs=4",)),  # groups of four, of which each device has two members
        ("critic", ("seeds=2", "envs=2")),
        ("forks", ("seeds=2", "envs=2")),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_two_processes_end_and_go_on(kind, mesh, uninterrupted, environment, tmp_path):
    """At SIGKILL, then at SIGTERM, which one of them gets. What they wrote also goes on in one process."""
    out, flags = tmp_path / "out", ("--resume", "--mesh", *mesh)
    expected = uninterrupted(kind, *mesh)
    assert_close(uninterrupted(kind, num_devices=1), expected, first=0)
    processes = begin_both(kind, out, environment, *flags)
    wait_for(lambda: last_saved(out) >= 1, processes[0])
    assert processes[0].poll() is None, finish(processes[0])
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.communicate()
    processes = begin_both(kind, out, environment, *flags)
    wait_for(lambda: last_saved(out) >= 10, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    codes, said = zip(*map(finish, processes), strict=True)
    assert codes == (143, 143) and "--resume" in said[0] and "--resume" not in said[1], said
    saved = last_saved(out)
    assert 10 <= saved == num_recorded(out) < expected["iteration"] - 3
    one = shutil.copytree(out, tmp_path / "one")
    finish_well(begin(kind, one, environment | {"JAX_NUM_CPU_DEVICES": "1"}, "--resume"))
    assert_close(expected, ending(one), first=saved)
    if mesh == ("seeds=4",):  # over seeds, processes are only where the devices are
        four = shutil.copytree(out, tmp_path / "four")
        finish_well(begin(kind, four, environment | {"JAX_NUM_CPU_DEVICES": "4"}, *flags))
        assert ending(four) == expected
    finish_well(*begin_both(kind, out, environment, *flags))
    assert ending(out) == expected


@pytest.mark.slow
def test_what_process_0_refuses_ends_both(environment, tmp_path):
    out, flags = tmp_path / "out", ("--mesh", "seeds=4")
    finish_well(begin("hosts", out, environment))
    codes, said = zip(
        *map(finish, begin_both("hosts", out, environment, *flags, "--resume", "--seed", "1")), strict=True
    )
    assert codes == (2, 2) and all("keys is" in words for words in said), said
    codes, said = zip(*map(finish, begin_both("hosts", out, environment, *flags)), strict=True)
    assert codes == (2, 2) and all("go on with it (resume=True, --resume)" in words for words in said), said

"""Rows and environments over devices: the same numbers, to rounding, on any mesh."""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilation import CHEAP_XLA_FLAGS

from grpo_jax import make_train_step, run
from grpo_jax.devices.mesh import (
    ENVS,
    MODEL,
    ROWS,
    along_envs,
    make_mesh,
    make_row_mesh,
    over_rows,
    pad_rows,
    state_shardings,
)


def row(state):
    """A loop whose number of steps depends on the row."""
    x, number = state
    return jax.lax.fori_loop(0, number, lambda i, x: jnp.tanh(x) + i, x), x.sum()


@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_rows_give_the_same_results_together_as_alone(num_rows):
    states = jax.random.normal(jax.random.key(0), (num_rows, 5)), jnp.arange(num_rows)
    mesh = make_row_mesh(num_rows)
    assert dict(mesh.shape) == {ROWS: min(num_rows, 2)}
    together = jax.jit(over_rows(row, mesh))(states)
    assert together[0].shape == (num_rows, 5)
    single = jax.jit(row)
    for i in range(num_rows):
        alone = single(jax.tree.map(lambda leaf, i=i: leaf[i], states))
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-6)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_an_accelerator_computes_one_branch_of_a_single_row_and_both_of_several(num_rows):
    """With both branches, a chunk of one iteration would take the time of two, and call rewards on the host twice."""
    device = SimpleNamespace(platform="gpu")
    mesh = SimpleNamespace(devices=np.array([device]), size=1)
    branch = over_rows(lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x), mesh)
    rows = jnp.arange(1.0, 1.0 + num_rows)
    np.testing.assert_allclose(branch(rows), jnp.sin(rows), rtol=1e-6)
    assert ("cond" in str(jax.make_jaxpr(branch)(rows))) == (num_rows == 1)


def test_rows_that_the_mesh_does_not_divide_are_padded_with_the_last():
    mesh = make_mesh(seeds=2)
    padded = pad_rows((jnp.arange(3), jax.random.split(jax.random.key(0), 3)), mesh)
    assert padded[0].tolist() == [0, 1, 2, 2] and (padded[1][2] == padded[1][3]).all()
    assert pad_rows(jnp.arange(4), mesh).tolist() == [0, 1, 2, 3]
    laid_out = jax.device_put(padded[0], jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(ROWS)))
    assert [shard.data.tolist() for shard in laid_out.addressable_shards] == [[0, 1], [2, 2]]


def test_what_does_not_fit_the_devices_is_refused(grpo):
    for sizes in ({"seeds": 2, "envs": 2}, {"envs": 0}):
        with pytest.raises(ValueError, match="does not fit 2 devices.*product is 2"):
            make_mesh(**sizes)
    odd = dataclasses.replace(grpo.config, num_envs=7, group_size=7, num_minibatches=1)
    with pytest.raises(ValueError, match="num_envs=7 .*split evenly over envs=2 devices; use num_envs=8"):
        run(odd, grpo.hyperparams, jax.random.split(jax.random.key(0), 1), mesh=make_mesh(seeds=1, envs=2))


def test_environments_on_two_devices_are_as_on_one(grpo):
    """Each device has one group of four; gradients and the order of minibatches are those of all eight environments."""
    mesh = make_mesh(seeds=1, envs=2)
    train_step = make_train_step(grpo.config)
    ten = over_rows(lambda state: jax.lax.scan(lambda state, _: train_step(state), state, length=10), mesh)
    start = jax.tree.map(lambda leaf: leaf[None], grpo.start)
    end, metrics = jax.jit(ten)(jax.device_put(start, state_shardings(mesh, start)))
    assert end.rollout.observation.sharding.spec[1] == ENVS
    for name, value in metrics.items():
        np.testing.assert_allclose(value[0], grpo.metrics[name], rtol=1e-5, atol=1e-5, err_msg=name)
    for one, other in zip(jax.tree.leaves(grpo.end.params), jax.tree.leaves(end.params), strict=True):
        np.testing.assert_allclose(other[0], one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [ENVS, MODEL])
def test_a_row_on_two_devices_may_call_the_host(axis):
    def call(x):
        return jax.pure_callback(lambda x: 2 * np.asarray(x), jax.ShapeDtypeStruct((4,), jnp.float32), along_envs(x, 0))

    rows = jnp.arange(4.0)[None]
    mesh = make_mesh(seeds=1, **{axis: 2})
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(ROWS, axis))
    assert jax.jit(over_rows(call, mesh))(jax.device_put(rows, sharding)).tolist() == [[0, 2, 4, 6]]


EIGHT_DEVICES = """
import sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
from grpo_jax import Config, Hyperparams, run
from grpo_jax.algorithms import GRPO, SAME_STEP_GAE
from grpo_jax.groups import forked
from grpo_jax.devices.mesh import make_mesh
from grpo_jax.policies import MLP

windows = {"group_size": 4, "num_steps": 16, "regroup_every": 8}
settings = {
    "grpo": {"algorithm": "grpo", "group_size": 4, "env_params": {"max_steps_in_episode": 32}},
    "ppo": {"algorithm": "ppo", "num_steps": 16, "normalize_observations": True, "normalize_rewards": True},
    "gru": {"algorithm": "ppo", "num_steps": 16, "network": MLP((8,), recurrent="gru", recurrent_size=8)},
    "parts": {
        **{"environment": "tests.probes:Parts", "algorithm": "ppo", "num_steps": 16},
        **{"network": MLP((8,), actor_observation=("position", "velocity")), "normalize_observations": True},
    },
    "whole groups": {"algorithm": "tpo", "group_size": 2, "env_params": {"max_steps_in_episode": 32}}
    | {"shuffle_blocks": 2},
    "blocks": {"algorithm": "ppo", "num_steps": 16, "shuffle_blocks": 8, "execution_plan": "tpu"},
    "kernel": {"algorithm": "kernel_gae"} | windows,
    "same step": {"algorithm": "same_step_gae"} | windows,
    "critic": {"algorithm": "same_step_critic", "normalize_rewards": True} | windows,
    "forks": {"algorithm": GRPO._replace(start=forked(3)), "group_size": 4, "num_steps": 16, "num_kept_groups": 2},
    "forks and baseline": {"algorithm": SAME_STEP_GAE._replace(start=forked(3)), "group_size": 4, "num_steps": 16},
}[sys.argv[1]]
config = Config(num_envs=16, num_epochs=2, num_minibatches=4, **{"network": MLP((8,))} | settings)
# Budgets differ, so that some rows stop while others still have to communicate.
steps = jnp.array([3.0, 5.0, 2.0]) * config.steps_per_iteration
hyperparams = Hyperparams(total_steps=steps, entropy_coef=0.01)
keys = jax.random.split(jax.random.key(0), 3)

def result(seeds, envs):
    done = run(config, hyperparams, keys, chunk_length=2, mesh=make_mesh(seeds=seeds, envs=envs))
    state = done.states.replace(key=jax.random.key_data(done.states.key))
    return jax.tree.map(np.asarray, (state, done.metrics))

one = jax.tree.leaves(result(1, 1))
for seeds, envs, tolerance in [(2, 1, 1e-6), (4, 1, 1e-6), (8, 1, 1e-6), (1, 2, 1e-5), (1, 8, 1e-5), (2, 4, 1e-5)]:
    for a, b in zip(one, jax.tree.leaves(result(seeds, envs)), strict=True):
        largest = np.max(np.abs(a), where=np.isfinite(a), initial=1.0)  # sums round relative to their largest terms
        atol = tolerance * largest
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=atol, err_msg=f"seeds={seeds} envs={envs}")
"""


SPLIT_MODEL = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 4)
from grpo_jax import Config, Hyperparams, run
from grpo_jax.algorithms import GRPO, with_reference
from grpo_jax.devices.mesh import make_mesh
from grpo_jax.policies import Transformer

config = Config(environment="tokens:sort-3", algorithm=with_reference(GRPO), num_envs=16, group_size=4,
                num_minibatches=2, num_epochs=1, network=Transformer(width=32, num_layers=2, num_heads=2))
# Only the entropy bonus gives a gradient: random policies get no reward.
hyperparams = Hyperparams(learning_rate=1e-3, total_steps=3 * config.steps_per_iteration, entropy_coef=-1.0)
keys = jax.random.split(jax.random.key(0), 2)

def result(**sizes):
    done = run(config, hyperparams, keys, chunk_length=2, mesh=make_mesh(**sizes))
    block = done.states.params["actor"]["block_0"]
    parts = [block[name]["kernel"].addressable_shards[0].data.shape for name in ("qkv", "out", "gate_up", "down")]
    return jax.tree.map(np.asarray, (done.states.params, done.metrics)), parts

one, whole = result(seeds=1)
for sizes in ({"seeds": 1, "model": 2}, {"seeds": 1, "model": 2, "envs": 2}, {"seeds": 2, "model": 2}):
    other, parts = result(**sizes)
    rows = 2 // sizes["seeds"]
    assert [np.prod(part) for part in parts] == [np.prod(w) * rows // 4 for w in whole], (whole, parts)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5, err_msg=str(sizes))
"""


def finish(process: subprocess.Popen) -> None:
    _, errors = process.communicate(timeout=1800)
    assert process.returncode == 0, errors[-3000:]


def start(*arguments: str, num_devices: int | None = None) -> subprocess.Popen:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": CHEAP_XLA_FLAGS}
    if num_devices is not None:
        environment["JAX_NUM_CPU_DEVICES"] = str(num_devices)
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", re.findall(r'^    "([a-z ]+)": {', EIGHT_DEVICES, flags=re.MULTILINE))
def test_eight_devices_are_as_one(case):
    finish(start("-c", EIGHT_DEVICES, case))


@pytest.mark.slow
def test_a_policy_split_over_devices_is_as_one_on_one_device():
    """Each device holds half of every large kernel and of its moments; all devices sample a group's tokens."""
    finish(start("-c", SPLIT_MODEL))


@pytest.mark.slow
def test_two_processes_of_two_devices_are_as_one_of_one(tmp_path):
    """Both layouts of four devices, over gloo; process 0 alone writes. Three seeds: the fourth place is padding."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = """-m grpo_jax.commands.train --environment Catch-bsuite --algorithm ppo --num-envs 4 --num-steps 16
        --num-minibatches 2 --hidden-sizes 8 --total-steps 200 --num-seeds 3""".split()
    finish(start(*command, "--out", str(tmp_path / "one"), num_devices=1))
    for mesh in (["seeds=4"], ["seeds=2", "envs=2"]):
        out = tmp_path / mesh[-1]
        hosts = ["--mesh", *mesh, "--coordinator", f"localhost:{port}", "--num-processes", "2", "--out", str(out)]
        both = [start(*command, *hosts, "--process-id", str(i), num_devices=2) for i in range(2)]
        for process in both:
            finish(process)
        assert {"summary.json", "metrics.jsonl", "learning_curves.png"} <= {path.name for path in out.iterdir()}
        one, two = (
            [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for folder in (tmp_path / "one", out)
        )
        assert len(one) == len(two) == 3
        for line, other in zip(one, two, strict=True):
            for name in line.keys() - {"run"}:
                expected, values = (np.array(entry[name], float) for entry in (line, other))
                np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5, err_msg=name)
        finals = [json.loads((folder / "summary.json").read_text()) for folder in (tmp_path / "one", out)]
        assert finals[0]["runs"][0]["final_return"] == finals[1]["runs"][0]["final_return"]

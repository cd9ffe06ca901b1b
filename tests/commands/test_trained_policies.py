"""The commands that use trained policies: evaluate, play and export."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from saved_policies import save_policies

from grpo_jax import Config, Hyperparams, TrainedPolicy, load
from grpo_jax.commands import evaluate, export, play
from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.exported_policy import ACTIVATIONS
from grpo_jax.commands.harness.study import print_files
from grpo_jax.environments import make_environment
from grpo_jax.errors import ConfigError
from grpo_jax.policies import MLP, networks
from grpo_jax.policies.normalization import Normalizer, RunningStatistics
from grpo_jax.rendering.drawings import CAPTION_HEIGHT
from grpo_jax.runs.run_spec import Setting, Settings

SIZES = {"algorithm": "ppo", "num_envs": 4, "num_steps": 8, "num_minibatches": 1, "network": MLP((4,))}
CARTPOLE = Config(environment="CartPole-v1", env_params={"max_steps_in_episode": 20}, **SIZES)
EXPORTED = {
    "mlp": CARTPOLE,
    "gaussian": Config(environment="Pendulum-v1", normalize_observations=True, **SIZES),
    "gru": dataclasses.replace(CARTPOLE, network=MLP((4,), recurrent="gru", recurrent_size=3)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cartpole")
    save_policies(directory, CARTPOLE, hyperparams=Hyperparams())
    return directory


def test_episodes_of_settings_are_summarised_apart(tmp_path, capsys, monkeypatch):
    """Two seeds of one setting and one of another, whose episodes are given."""
    returns = np.array([[1.0, 3.0], [4.0, 4.0], [10.0, 20.0]])
    settings = Settings({Setting({"clip": 0.1}): np.array([0, 1]), Setting({"clip": 0.2}): np.array([2])})
    config = SimpleNamespace(env=SimpleNamespace(name="Maze"))
    policies = SimpleNamespace(config=config, settings=settings, name="run on Maze", row=np.arange(3))
    policies = type("Policies", (SimpleNamespace,), {"__len__": lambda _: 3})(**vars(policies))
    monkeypatch.setattr(evaluate.Arguments, "load", lambda self, row: policies)
    episodes = [np.concatenate([part, returns], axis=1) for part in (returns[:, :1], returns[:, 1:])]
    monkeypatch.setattr(evaluate, "play", lambda *_: episodes)
    out = tmp_path / "evaluation.json"
    evaluate.main(evaluate.Arguments(tmp_path, num_episodes=3, out=out, greedy=True))
    printed = capsys.readouterr().out
    assert f"Maze: 3 greedy episodes of each of 3 {settings.word}" in printed and f"Written to {out}" in printed
    lines = [line.split() for line in printed.splitlines()]
    assert "clip=0.1 0 1.667 0.9428 1 3 2.333".split() in lines
    assert "clip=0.2 2 13.33 4.714 10 20 16.67".split() in lines
    assert sum("IQM" in line for line in lines) == 1, "of several seeds"
    written = json.loads(out.read_text())
    assert written["environment"] == "Maze" and written["num_episodes"] == 3 and written["greedy"]
    assert written["returns"] == [[1, 1, 3], [4, 4, 4], [10, 10, 20]] and written["lengths"][0] == [3, 1, 3]


@pytest.mark.slow
def test_episodes_are_drawn(tmp_path, capsys):
    config = Config(environment="Catch-bsuite", num_envs=2, group_size=2, num_minibatches=1, network=MLP(()))
    save_policies(tmp_path, config)
    out = tmp_path / "episode.gif"
    play.main(play.Arguments(tmp_path, out=out, row=0, num_episodes=2, env_params=("max_steps_in_episode=4",)))
    printed = capsys.readouterr().out
    assert "episode 1: return 0, 4 steps" in printed and str(out) in printed
    with Image.open(out) as gif:
        assert gif.n_frames == 5 and gif.size == (2 * 120, 240 + CAPTION_HEIGHT)
    with pytest.raises(ConfigError, match="no parameter 'gravity'"):
        play.main(play.Arguments(tmp_path, out=out, env_params=("gravity=1",)))


SCRIPT = """
import sys

sys.modules["grpo_jax"] = None  # an import of it raises an error
import jax.export
import numpy as np

for folder in sys.argv[1:]:
    given = np.load(folder + "/given.npz")
    carry = (tuple(given[name] for name in given if name.startswith("carry")),) if "carry0" in given else ()
    for name, seed in (("act", ()), ("act_sampled", (np.uint32(7),))):
        program = jax.export.deserialize(bytearray(open(f"{folder}/{name}.jax_export", "rb").read()))
        leaves = jax.tree.leaves(program.call(given["observation"], *carry, *seed))
        np.savez(f"{folder}/{name}.npz", *leaves)
"""


@pytest.mark.slow
def test_exported_programs_choose_the_same_actions_without_this_package(tmp_path):
    pytest.importorskip("flatbuffers")
    expected, outs = {}, []
    for name, config in EXPORTED.items():
        save_policies(tmp_path / name, config)
        outs.append(out := tmp_path / "exported" / name)
        export.main(export.Arguments(folder=tmp_path / name, out=out, row=0))
        policy = load(tmp_path / name, row=0)
        observation = np.random.default_rng(0).normal(size=(1000, *config.env.observation.shape)).astype(np.float32)
        carry = jax.tree.map(lambda leaf: leaf + 0.1, policy.initial_carry(1000))
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(carry)]
        np.savez(out / "given.npz", observation=observation, **{f"carry{i}": leaf for i, leaf in enumerate(leaves)})
        for program, key in (("act", None), ("act_sampled", jax.random.key(7))):
            acted = policy.act(observation, key, carry=carry if leaves else None)
            expected[out / f"{program}.npz"] = jax.tree.leaves(acted)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", SCRIPT, *map(str, outs)], check=True, env=environment, cwd=tmp_path)
    for path, leaves in expected.items():
        for name, leaf in zip(found := np.load(path), leaves, strict=True):
            np.testing.assert_allclose(found[name], leaf, rtol=1e-5, atol=1e-6, err_msg=f"{path} {name}")
        assert len(np.unique(leaves[0])) > 1
    with pytest.raises(ConfigError, match=r"action, carry = policy\.act"):
        policy.act(observation)
    readme = (outs[2] / "README.md").read_text()
    assert "actions, carry = act.call(observation, carry)" in readme and "for cpu, cuda, tpu" in readme


def test_arrays_are_exported_with_the_same_names(folder, tmp_path, monkeypatch):
    from safetensors.numpy import load_file

    policy = load(folder)
    export.save_arrays(policy, tmp_path)
    arrays, numpy_arrays = load_file(tmp_path / "policy.safetensors"), np.load(tmp_path / "policy.npz")
    assert arrays.keys() == set(numpy_arrays) and all((arrays[name] == numpy_arrays[name]).all() for name in arrays)
    assert (arrays["params/actor/Dense_1/kernel"] == policy.params["actor"]["Dense_1"]["kernel"]).all()
    with pytest.raises(ConfigError, match="exists already"):
        export.main(export.Arguments(folder=folder, out=tmp_path))
    # NumPy has no bfloat16.
    exact = jnp.linspace(-3, 3, 7, dtype=jnp.bfloat16)
    arrays = {"half": np.asarray(exact), "single": np.float32([0.1]), "count": np.int32([3])}
    monkeypatch.setattr(export, "policy_arrays", lambda policy: arrays)
    export.save_arrays(policy, tmp_path)
    saved = np.load(tmp_path / "policy.npz")
    assert {name: saved[name].dtype for name in saved} == {"half": "float32", "single": "float32", "count": "int32"}
    assert (saved["half"] == np.float32(exact)).all() and saved["half"][1] == np.float32(exact[1])
    assert load_file(tmp_path / "policy.safetensors")["half"].dtype == jnp.bfloat16


def test_a_full_disk_leaves_nothing_of_an_export(folder, tmp_path, capsys, monkeypatch):
    pytest.importorskip("flatbuffers")
    monkeypatch.setattr(export, "PLATFORMS", ("cpu",))
    out = tmp_path / "exported"

    def start():
        export.main(export.Arguments(folder=folder, out=out))

    def full(*arguments, **others):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(export, "write_arrays", full)  # after policy.npz
        with pytest.raises(SystemExit):
            command(start)
    said = capsys.readouterr().err
    assert "exported cannot be written: No space left on device" in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    start()
    names = "README.md act.jax_export act_sampled.jax_export manifest.json policy.npz policy.py policy.safetensors"
    assert " ".join(sorted(path.name for path in out.iterdir())) == names


NUMPY_SCRIPT = """
import sys

sys.modules["jax"] = sys.modules["grpo_jax"] = None  # an import of them raises an error
import numpy as np
from policy import act

given, rng = np.load("given.npz"), np.random.default_rng(0)
mask = given["mask"] if "mask" in given else None
np.savez("acted.npz", *(act(given["x"], each, action_mask=mask) for each in (None, rng)))
"""
LAKE = make_environment("FrozenLake-misc")._replace(action_mask=lambda state, params: jnp.arange(4) != 1)
NORMED = MLP((8, 16), activation="gelu", layer_norm=True, shared_critic=True)
IN_NUMPY = {
    "box": (EXPORTED["gaussian"], np.linspace(-3, 3, 1500).reshape(500, 3), {}),
    "masks": (Config(LAKE, **SIZES | {"network": NORMED}), np.arange(500) % 16, {"mask": np.arange(4) != 1}),
}


def test_numpy_alone_acts_like_the_policy(tmp_path):
    random, rest = np.random.default_rng(2), (Hyperparams(), {}, np.float32(0), np.int64(0), np.int32(0))
    for name, (config, x, masks) in IN_NUMPY.items():
        like = jax.eval_shape(config.policy.init, jax.random.key(0))
        params = jax.tree.map(lambda leaf: np.float32(random.normal(0, 1.0, leaf.shape)), like)
        statistics = RunningStatistics(*np.float32(random.uniform(0.5, 1, (4, 3)))) if name == "box" else None
        policy = TrainedPolicy("run", config, params, Normalizer(statistics, None), *rest)
        (out := tmp_path / name).mkdir()
        export.save_arrays(policy, out)
        export.save_numpy(policy, out)
        np.savez(out / "given.npz", x=x, **masks)
        subprocess.run([sys.executable, "-c", NUMPY_SCRIPT], check=True, cwd=out)
        acted, sampled = np.load(out / "acted.npz").values()
        actions = np.asarray(policy.act(x, action_mask=masks.get("mask")))
        assert acted.dtype == actions.dtype and len(np.unique(acted)) > 1 and (sampled != acted).any()
        assert np.mean(np.abs(acted - actions) > 1e-5) < 0.005, "but for ties"
    network = json.loads((out / "manifest.json").read_text())["network"]
    assert (network["name"], network["activation"], network["hidden_sizes"]) == ("mlp", "gelu", [8, 16])


def test_numpy_has_every_activation():
    x = np.linspace(-4, 4, 41, dtype=np.float32)
    assert set(ACTIVATIONS) == set(networks._ACTIVATIONS)
    expected = jax.jit(lambda x: {name: getattr(nn, name)(x) for name in ACTIVATIONS})(x)
    for name, function in ACTIVATIONS.items():
        np.testing.assert_allclose(function(x), expected[name], atol=2e-6, err_msg=name)


def test_policies_that_need_own_code_say_how_they_are_evaluated(tmp_path, capsys):
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "final.npz").write_bytes(b"1")
    print_files(make_console(), tmp_path, Config("probes:Probe"), "summary.json")
    assert f"grpo-jax evaluate {tmp_path} --trust" in capsys.readouterr().out

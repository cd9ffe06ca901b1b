"""The command train, and the defaults of its flags: what it writes, draws and refuses."""

import json

import numpy as np
import pytest
from probes import Echo, bits
from saved_policies import save_policies

from grpo_jax import ANCHORED, PPO, Config, Hyperparams, load, tuned
from grpo_jax.algorithms import name_of
from grpo_jax.commands import train
from grpo_jax.commands.harness import flags
from grpo_jax.commands.harness.figures import solved_after
from grpo_jax.commands.harness.study import EvaluationArguments
from grpo_jax.errors import ConfigError
from grpo_jax.policies import MLP
from grpo_jax.recording.files import write_json
from grpo_jax.runs.result import RunResult
from grpo_jax.runs.run_spec import Setting
from grpo_jax.runs.tuned_settings import ENVIRONMENT_SETTINGS, tuned_settings
from grpo_jax.sweeps.runs import Run, summarise

SIZES = {"num_envs": 4, "num_steps": 16, "num_minibatches": 2, "network": MLP((4,))}
CONFIG = Config(environment="Catch-bsuite", algorithm="ppo", **SIZES)


def test_train_writes_its_results(tmp_path, capsys):
    options = {"hyperparams": Hyperparams(total_steps=200.0), "evaluation": EvaluationArguments(num_final=8)}
    train.main(train.Arguments(config=CONFIG, out=tmp_path / "out", num_seeds=2, format="markdown", **options))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    (run,) = summary["runs"]
    assert run["values"] == {"name": "ppo"} and run["environment_steps"] == [192, 192]
    assert run["environment"] == "Catch-bsuite" and run["config"]["network"]["hidden_sizes"] == [4]
    assert run["num_seeds"] == len(run["final_return"]["per_seed"]) == 2
    low, high = run["final_return"]["ci95"]
    assert -1 <= low <= run["final_return"]["iqm"] <= high <= 1
    assert run["steps_per_second"] > 0 and run["wall_seconds"] > run["compile_seconds"] > 0
    assert {"jax", "gymnax", "python"} <= summary["versions"].keys() and summary["hardware"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["run"] == {"values": {"name": "ppo"}, "environment": "Catch-bsuite"} for line in lines)
    assert len(lines[0]["episode/return_mean"]) == 2
    assert (tmp_path / "out" / "learning_curves.png").read_bytes().startswith(b"\x89PNG")
    table, said = capsys.readouterr()
    first = [line.split(" | ")[0] for line in table.splitlines()]
    assert first == ["| run", "| ---", "| ppo"], "for a file, the table alone"
    assert "final evaluation, 8 sampled episodes each" in said and " kB)" in said


@pytest.mark.slow
def test_train_starts_from_another_folder(tmp_path):
    hyperparams = Hyperparams(total_steps=64, learning_rate=0.0)
    save_policies(tmp_path / "before", CONFIG)
    options = {"out": tmp_path / "a" / "b", "init_from": tmp_path / "before"}
    train.main(train.Arguments(config=CONFIG, hyperparams=hyperparams, **options))
    trained, given = load(tmp_path / "a" / "b").params, load(tmp_path / "before").params
    assert bits(trained) == bits(given)
    assert str(tmp_path / "before") in (tmp_path / "a" / "b" / "summary.json").read_text()


def test_tuned_settings_are_defaults_however_flags_are_written():
    def config(*words):
        return train.parse(train.Arguments, list(words)).config

    for words in (["--algorithm", "dapo"], ["--algorithm=DAPO"], ["--algorithm", "ppo", "--algorithm=dapo"]):
        parsed = train.parse(train.Arguments, words)
        assert (parsed.config.num_envs, parsed.config.num_minibatches, parsed.hyperparams.clip_high) == (128, 16, 0.28)
    assert config().group_size == 16 and config("--num_envs", "8").group_size == 8, "chosen once the flags are known"
    overridden = config("--env-params", "max_steps_in_episode=50", "gravity=1")
    assert overridden.env.max_steps == 50 and dict(overridden.env_params)["gravity"] == 1.0


RUNS = (
    {"environment": "CartPole-v1", "algorithm": "ppo"},
    {"environment": "Breakout-MinAtar", "algorithm": "KERNEL-GAE", "network": "auto"},
    {"environment": "Breakout-MinAtar", "algorithm": "ppo", "network": "cnn", "learning_rate": 1e-3},
    {"environment": "MemoryChain-bsuite", "recurrent_size": 8, "env_params": {"memory_length": 3.0}},
    {"environment": "Pendulum-v1", "algorithm": "auto", "num_iterations": 3.0},
)
MISTAKES = (
    ({"lr": 1e-3}, "unknown argument 'lr' of tuned: it is learning_rate here"),
    ({"num_env": 8}, "unknown argument 'num_env' of tuned: did you mean 'num_envs'"),
    ({"env_params": 3}, "env_params=3 "),
    ({"network": lambda *_: None, "activation": "relu"}, "activation='relu' has no effect on a custom network"),
)


def test_tuned_is_what_the_command_has_and_says(capsys):
    flags._say.cache_clear()
    for fields in RUNS:
        texts = {name: "memory_length=3" if name == "env_params" else str(value) for name, value in fields.items()}
        parsed = train.parse(train.Arguments, [word for name, text in texts.items() for word in (f"--{name}", text)])
        assert tuned(**fields) == (parsed.config, parsed.hyperparams)
    said = capsys.readouterr().err
    assert said.startswith("tuned for ppo on CartPole-v1: entropy_coef 0.01; flags override\n")
    assert "network mlp" in said.splitlines()[1] and "network" not in said.splitlines()[2]
    config, _ = tuned(Echo(), PPO._replace(start=ANCHORED))
    assert (config.num_envs, config.group_size) == (32, 8), "custom ones have those of their kind"
    for fields, message in MISTAKES:
        with pytest.raises(ConfigError, match=message):
            tuned(**fields)


def test_auto_is_resolved_before_the_tuned_settings(tmp_path, capsys):
    def parse(*flags):
        config = train.parse(train.Arguments, ["--algorithm", "auto", *flags]).config
        return name_of(config.algorithm), config.num_envs

    flags._say.cache_clear()
    assert parse() == ("ppo", 32), "tuned for PPO"
    assert capsys.readouterr().err.startswith("--algorithm auto is ppo: a critic learns from every step; try grpo if")
    assert parse("--environment", "tokens:sort-3") == ("grpo", 512)
    file = tmp_path / "fields.json"
    fields = {"algorithm": "auto", "environment": "CartPole-v1", "num_envs": 8, "num_minibatches": 1}
    file.write_text(json.dumps(fields))
    assert parse("--config", str(file)) == ("ppo", 8)


def test_settings_are_by_suite_and_exceptions_by_environment(monkeypatch):
    exception = {"any": {"discount": 0.9}, "ppo": {"num_envs": 48}}
    monkeypatch.setitem(ENVIRONMENT_SETTINGS, "brax:walker", exception)
    common, special = tuned_settings("brax:runner", "kernel_gae"), tuned_settings("brax:walker", "kernel_gae")
    assert common["normalize_observations"] and common["num_steps"] == 64 and common["group_size"] == 8
    assert special == common | {"discount": 0.9, "num_envs": 48}
    assert "num_steps" not in tuned_settings("brax:runner", "grpo"), "one-episode groups play to the limit"


def test_runs_are_written_as_strict_json(tmp_path):
    names = ("episode/count", "episode/return_mean", "optim/skipped_updates")
    steps = 64 * np.arange(1, 101)[:, None]
    metrics, ended_by = {name: np.ones((100, 1)) for name in names}, np.array(["max_episodes"])
    result = RunResult(None, metrics, steps, 1.0, 1.0, None, ended_by, np.ones(1))
    setting, hyperparams = Setting({"name": "ppo"}, "Catch-bsuite"), Hyperparams(total_steps=np.inf)
    run = Run(setting, CONFIG, hyperparams, result, np.ones(1), 2.0, 1.0)
    write_json(tmp_path / "summary.json", summarise(run))
    text = (tmp_path / "summary.json").read_text()
    summary = json.loads(text)
    assert summary["hyperparams"]["total_steps"] == "inf" and "Infinity" not in text
    assert summary["ended_by"] == ["max_episodes"] and summary["budget_used"] == [1.0]
    assert solved_after(run) == 128, "of two iterations, 2% of those made"

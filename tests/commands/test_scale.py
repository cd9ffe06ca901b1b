"""--scale: the sizes of a GPU, made from those tuned for a CPU."""

import jax
import numpy as np
import pytest

from grpo_jax import PPO, Config, Hyperparams
from grpo_jax.algorithms import by_name
from grpo_jax.commands import train
from grpo_jax.commands.harness.scale import can_grow, for_gpu
from grpo_jax.commands.sweep import grid_of_flags
from grpo_jax.errors import ConfigError
from grpo_jax.runs.tuned import split_fields
from grpo_jax.runs.tuned_settings import ENVIRONMENT_SETTINGS, tuned_settings

SIZES = "num_envs", "num_steps", "num_minibatches", "learning_rate"


def on_gpu(environment, algorithm, **given):
    fields = for_gpu(tuned_settings(environment, algorithm), by_name(algorithm), given)
    return tuple(fields.get(name) for name in SIZES)


def test_the_sizes_of_a_gpu():
    assert on_gpu("CartPole-v1", "ppo") == (32, 128, 16, 2.5e-3)
    assert on_gpu("CartPole-v1", "ppo", total_steps=8e6) == (512, 32, 16, 3.5e-3)
    assert on_gpu("CartPole-v1", "ppo", total_steps=1e12) == (4096, 16, 16, 5e-3)
    assert on_gpu("Breakout-MinAtar", "ppo", total_steps=2e7) == (4096, 16, 8, 8.4e-3)
    assert on_gpu("Pendulum-v1", "ppo", total_steps=2e7) == (1024, 16, 16, 1.7e-3)
    # Whole episodes: only their number grows.
    assert on_gpu("CartPole-v1", "grpo", total_steps=8e6) == (512, None, 16, 3.5e-3)
    assert on_gpu("Freeway-MinAtar", "grpo", total_steps=1e12) == (128, None, 16, 4.2e-3)
    # What remembers or compares keeps the length of its rollouts.
    assert on_gpu("MetaMaze-misc", "ppo", total_steps=1e12)[:2] == (512, 128)
    assert on_gpu("Breakout-MinAtar", "kernel_gae", total_steps=1e12)[:2] == (512, 128)
    assert on_gpu("MountainCar-v0", "ppo")[:2] == (16, 16)
    large = {"num_envs": 4096, "num_steps": 128, "num_minibatches": 4, "learning_rate": 1e-3}
    assert for_gpu(large, PPO) == large, "already a GPU's"


def test_given_sizes_change_the_others():
    assert on_gpu("CartPole-v1", "ppo", num_envs=64) == (64, 64, 16, 2.5e-3)
    assert on_gpu("CartPole-v1", "ppo", num_envs=4096) == (4096, 16, 16, 5e-3)
    assert on_gpu("CartPole-v1", "ppo", num_steps=16) == (256, 16, 16, 2.5e-3)
    assert on_gpu("CartPole-v1", "ppo", num_minibatches=4) == (32, 128, 4, 3.5e-3)


def parsed(*flags):
    arguments = train.parse(train.Arguments, ["--environment", "Breakout-MinAtar", "--algorithm", "ppo", *flags])
    config = arguments.config
    return config.num_envs, config.num_steps, config.num_minibatches, arguments.hyperparams.learning_rate


def test_the_backend_chooses_and_flags_win(monkeypatch, capsys):
    assert parsed("--total-steps", "2e7") == parsed("--scale=gpu") == (64, 128, 8, 5e-3)
    capsys.readouterr()
    assert parsed("--scale", "gpu", "--total-steps", "2e7") == (4096, 16, 8, 8.4e-3)
    said = capsys.readouterr().err
    assert said.startswith("tuned for ppo on Breakout-MinAtar (--scale gpu): ")
    assert "num_envs 4096" in said and "learning_rate 0.0084" in said and "num_steps 16" in said
    for backend in ("gpu", "tpu"):
        monkeypatch.setattr(jax, "default_backend", lambda name=backend: name)
        assert parsed("--total-steps", "2e7") == (4096, 16, 8, 8.4e-3)
    assert parsed("--num-envs", "4096", "--num-minibatches=32", "--learning-rate", "1e-3") == (4096, 16, 32, 1e-3)
    assert parsed("--scale", "cpu", "--total-steps", "2e7") == (64, 128, 8, 5e-3)


def test_a_sweep_over_budgets_has_the_sizes_of_the_smallest():
    flags = "--environment Breakout-MinAtar --algorithm ppo --scale gpu --total-steps".split()
    plans = grid_of_flags([*flags, "2e7", "1e6"], jax.random.split(jax.random.key(0), 1))
    assert {plan.config.num_envs for plan in plans} == {64}


def test_mistakes_and_what_stays(tmp_path, monkeypatch):
    for number, message in (("0", "num_.*=0 is not a positive integer"), ("1" + "0" * 400, "the largest int32")):
        with pytest.raises(ConfigError, match=message):
            parsed("--scale", "gpu", "--num-envs", number)
    (tmp_path / "fields.json").write_text('{"num_envs": 8, "num_minibatches": 1}')
    file = ["--config", str(tmp_path / "fields.json")]
    with pytest.raises(ConfigError, match="--scale gpu chooses tuned settings"):
        parsed(*file, "--scale", "gpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert parsed(*file)[0] == 8, "saved sizes do not depend on the backend"
    kept = "tokens:sort-5", "experiments.family:SORT", "gymnasium:CartPole-v1"
    assert not any(map(can_grow, kept)) and all(map(can_grow, ("CartPole-v1", "brax:ant", "probes:Echo")))


ALGORITHMS = "ppo", "grpo", "kernel_gae", "gspo"


@pytest.mark.parametrize("environment", ENVIRONMENT_SETTINGS)
def test_every_size_is_that_of_a_valid_run(environment):
    """At every budget, with one size of groups; on CartPole, which is quick to make, as only the limit differs."""
    for algorithm in ALGORITHMS:
        sizes = []
        for total_steps in (1e5, 1e7, 1e12):
            fields = for_gpu(tuned_settings(environment, algorithm), by_name(algorithm), {"total_steps": total_steps})
            static, traced = split_fields("CartPole-v1", fields | {"env_params": {}})
            config = Config(environment="CartPole-v1", algorithm=algorithm, **static)
            Hyperparams(**traced).check()
            sizes.append((config.num_envs, config.group_size))
        assert np.all(np.diff([num_envs for num_envs, _ in sizes]) >= 0) and len({size for _, size in sizes}) == 1

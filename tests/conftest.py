"""What the tests share: compiled programs kept on disk, and two small runs."""

import gc
import os
from collections.abc import Callable
from typing import NamedTuple

import jax
import pytest
from compilation import CHEAP_XLA_FLAGS, USERS, in_one_context, soon_orthogonal
from jax._src.interpreters import mlir

from experiments.compiled_programs import choose_backend
from grpo_jax import Config, Hyperparams, TrainState, config, make_init, make_train_step
from grpo_jax.environments import make_environment
from grpo_jax.policies import MLP, dense

ORTHOGONAL = dense.orthogonal
gc.disable()  # until the tests are collected


def pytest_configure(config):
    """Two devices, so that rows can be split; cheap compilation, as `compilation.py` says."""
    if config.option.markexpr == "not slow":
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {CHEAP_XLA_FLAGS}"
    mlir.make_ir_context = in_one_context(mlir.make_ir_context)
    jax.config.update("jax_num_cpu_devices", 2)
    if hasattr(config, "cache"):  # not with -p no:cacheprovider
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("compiled")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    choose_backend()  # last: JAX starts, and without a GPU or TPU an installed plugin for one only compiles
    make_environment("CartPole-v1")  # before a test imports gymnax itself, with all that draws


def pytest_collection_finish(session):
    """Initial weights without a loop; imports and tracing make many objects, hardly any of them garbage."""
    if session.config.option.markexpr == "not slow":
        for module in USERS:
            module.orthogonal = soon_orthogonal
    gc.freeze()  # the imported modules
    gc.set_threshold(50_000, 10, 10)
    gc.enable()


@pytest.fixture
def initial_weights_of_users(monkeypatch):
    """Those that networks have outside of the tests."""
    for module in USERS:
        monkeypatch.setattr(module, "orthogonal", ORTHOGONAL)


class Run(NamedTuple):
    """A run that is over in milliseconds, and its programs, each compiled once for all tests."""

    config: Config
    hyperparams: Hyperparams
    init: Callable  # jitted (key, hyperparams) -> state
    ten: Callable  # jitted (state) -> state and metrics [10] after a scan of ten train steps
    start: TrainState
    end: TrainState
    metrics: dict  # each [10]


def small_run(algorithm, **settings) -> Run:
    config = Config(algorithm=algorithm, num_envs=8, num_epochs=2, num_minibatches=4, network=MLP((8,)), **settings)
    train_step = make_train_step(config)
    init = jax.jit(make_init(config))
    ten = jax.jit(lambda state: jax.lax.scan(lambda state, _: train_step(state), state, length=10))
    hyperparams = Hyperparams(entropy_coef=0.01, total_steps=4000.0, final_learning_rate=1e-4)
    start = init(jax.random.key(0), hyperparams)
    return Run(config, hyperparams, init, ten, start, *ten(start))


@pytest.fixture(scope="session")
def grpo():
    """GRPO on CartPole of at most 32 steps: two groups of four."""
    return small_run("grpo", group_size=4, env_params={"max_steps_in_episode": 32})


@pytest.fixture(scope="session")
def ppo():
    """PPO on CartPole of at most 12 steps, in rollouts of 16: every environment is truncated at least once."""
    return small_run("ppo", num_steps=16, env_params={"max_steps_in_episode": 12})


@pytest.fixture(params=["grpo", "ppo"])
def small(request):
    """Either of them."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module", autouse=True)
def own_programs():
    """Equal configs of a file share what is traced and compiled for them, as in a process; not those of other files."""
    config._kept.cache_clear()


@pytest.fixture(autouse=True)
def keep_the_cache():
    """Restores the tests' compilation cache, as commands choose their own."""
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)

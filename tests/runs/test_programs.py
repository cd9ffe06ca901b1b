"""Compiled programs are kept for each type of CPU, and nothing of JAX's settings is left changed."""

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from probes import Probe

from grpo_jax import Config, Hyperparams, run
from grpo_jax.policies import MLP
from grpo_jax.runs import programs
from grpo_jax.runs.programs import cache_folder, kept_programs


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home, and JAX without a cache of its own, as in a new process."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
    reset_cache()


def kept():
    return len([*cache_folder().glob("*-cache")])


def test_a_run_keeps_its_programs_and_no_others(home):
    def begin(width):
        """Only `init` is compiled; anew, as no other test has this width."""
        sizes = {"num_envs": 4, "num_steps": 8, "num_minibatches": 1, "network": MLP((width,))}
        config = Config(environment=Probe(), algorithm="ppo", **sizes)
        stop = {"callback": lambda progress, chunk: progress._replace(stopped=np.array(True))}
        run(config, Hyperparams(total_steps=64.0), jax.random.split(jax.random.key(0), 1), **stop)

    begin(17)
    assert kept() > 0 and jax.config.jax_compilation_cache_dir is None
    before = kept()
    jax.jit(lambda x: x * 3 + 1)(np.ones(7)).block_until_ready()
    assert kept() == before, "what the user compiles afterwards is not kept"


def test_the_users_settings_come_first(home):
    for name, value in (("jax_compilation_cache_dir", str(home / "own")), ("jax_enable_compilation_cache", False)):
        before = getattr(jax.config, name)
        jax.config.update(name, value)
        with kept_programs():
            assert getattr(jax.config, name) == value
            assert jax.config.jax_compilation_cache_dir in (None, str(home / "own"))
        jax.config.update(name, before)
    assert not cache_folder().exists()


def test_each_type_of_cpu_has_a_folder_where_one_can_be_made(home, monkeypatch):
    here = cache_folder()
    monkeypatch.setattr(programs.platform, "machine", lambda: "another")
    assert cache_folder() != here
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with kept_programs():
        assert jax.config.jax_compilation_cache_dir is None


def test_a_program_that_calls_the_host_never_calls_the_function_of_another_process(home):
    """jax 0.10 does not keep such a program; jax 0.11 keeps it, and gives it the callback of who loads it."""

    def first_result(step):
        def program(x):
            return jax.pure_callback(lambda x: np.asarray(x) + step, jax.ShapeDtypeStruct((3,), np.float32), x)

        return jax.jit(program)(np.ones(3, np.float32))[0]

    with kept_programs():
        assert [first_result(1), first_result(2), first_result(1)] == [2, 3, 2]

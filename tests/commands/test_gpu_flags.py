"""The settings for GPUs, in an environment that only seems to have one."""

import os

import jax
import pytest

from grpo_jax.commands.harness import gpu_flags
from grpo_jax.commands.harness.gpu_flags import CHOICE, DEFAULTS, SETTINGS, apply_gpu_flags, flags_in_use
from grpo_jax.errors import ConfigError

VARIABLES = {variable for setting in SETTINGS.values() for variable in setting}
LOOP_GRAPHS = SETTINGS["loop_graphs"]["XLA_FLAGS"]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """A process on a GPU, in which the user has set nothing."""
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name not in VARIABLES})
    monkeypatch.setattr(gpu_flags, "has_gpu", lambda: True)
    before = jax.config.jax_platforms, jax.config.jax_default_matmul_precision
    jax.config.update("jax_platforms", None)
    yield os.environ
    jax.config.update("jax_platforms", before[0])
    jax.config.update("jax_default_matmul_precision", before[1])


def test_settings_are_chosen_by_name(environment):
    environment[CHOICE] = "loop_graphs, latency_hiding float32 more_memory"
    apply_gpu_flags()
    assert environment["XLA_FLAGS"] == f"{LOOP_GRAPHS} {SETTINGS['latency_hiding']['XLA_FLAGS']}"
    assert environment["XLA_CLIENT_MEM_FRACTION"] == "0.9"
    assert jax.config.jax_default_matmul_precision == "float32"
    assert flags_in_use() == {name: environment[name] for name in VARIABLES - {"XLA_PYTHON_CLIENT_PREALLOCATE"}}


@pytest.mark.parametrize(("choice", "expected"), [(None, DEFAULTS), ("", ())])
def test_defaults_can_be_switched_off(environment, monkeypatch, choice, expected):
    applied = []
    monkeypatch.setattr(gpu_flags, "_set", lambda variable, value: applied.append((variable, value)))
    if choice is not None:
        environment[CHOICE] = choice
    apply_gpu_flags()
    assert applied == [item for name in expected for item in SETTINGS[name].items()]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--xla_gpu_autotune_level=0", f"--xla_gpu_autotune_level=0 {LOOP_GRAPHS}"),
        (
            "--xla_gpu_enable_command_buffer= --xla_dump_to=x",
            "--xla_gpu_enable_command_buffer= --xla_dump_to=x --xla_gpu_command_buffer_unroll_loops=true",
        ),
        ("flags.txt", "flags.txt"),  # a file
    ],
)
def test_flags_of_the_user_are_kept(environment, flags, expected):
    environment |= {CHOICE: "loop_graphs", "XLA_FLAGS": flags}
    apply_gpu_flags()
    assert environment["XLA_FLAGS"] == expected


def test_variables_of_the_user_are_kept(environment):
    environment |= {CHOICE: "more_memory float32", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.5"  # the old name, which JAX refuses beside the new one
    apply_gpu_flags()
    assert "XLA_CLIENT_MEM_FRACTION" not in environment
    assert environment["JAX_DEFAULT_MATMUL_PRECISION"] == "highest"
    assert jax.config.jax_default_matmul_precision != "float32"


@pytest.mark.parametrize(("has_gpu", "platforms"), [(False, None), (True, "cpu"), (True, "tpu,cpu")])
def test_nothing_is_set_without_a_gpu(environment, monkeypatch, has_gpu, platforms):
    monkeypatch.setattr(gpu_flags, "has_gpu", lambda: has_gpu)
    jax.config.update("jax_platforms", platforms)
    environment[CHOICE] = " ".join(SETTINGS)
    before = dict(environment)
    apply_gpu_flags()
    assert environment == before


def test_an_unknown_setting_is_an_error_on_every_host(environment, monkeypatch):
    monkeypatch.setattr(gpu_flags, "has_gpu", lambda: False)
    environment[CHOICE] = "loop_graph"
    with pytest.raises(ConfigError, match="'loop_graph'.*did you mean 'loop_graphs'"):
        apply_gpu_flags()

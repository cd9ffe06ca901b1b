"""How tests compile: cheaply, as compiling takes longer than running, and for a GPU that is not there.

`conftest.py` changes two things, unless slow tests are asked for: XLA does not optimise (`CHEAP_XLA_FLAGS`). Initial
weights are drawn without the loop that makes them orthogonal (`soon_orthogonal`). `test_algorithms.py` trains without
either; the fixture `initial_weights_of_users` gives a test the real weights. Compiled programs are kept beside pytest's
cache. All programs are written in one MLIR context, as making it takes a third of the time of compiling a small one.
"""

import functools
import math

import jax
import jax.numpy as jnp
import jaxlib.version
import pytest
from jax.sharding import SingleDeviceSharding
from jaxlib.mlir import ir

from experiments.compiled_programs import h100
from grpo_jax.policies import actor_critic, dense, networks, recurrent

# Programs this small are compiled faster in one part than in several that are linked.
CHEAP_XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if jaxlib.version.__version_info__ < (0, 11):
    # Compiling fusions through MLIR takes three times as long. jaxlib 0.11 refuses the flag as unknown.
    CHEAP_XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"


USERS = actor_critic, dense, networks, recurrent
"""The modules whose layers have orthogonal initial weights."""


def soon_orthogonal(scale):
    """In place of `dense.orthogonal`, of which each layer has a loop that most of the compilation of `init` goes into.

    Uniform numbers of about the same length, not quite orthogonal: a hash, as JAX's random numbers compile slowly.
    """

    def init(key, shape, dtype=jnp.float32):
        words = jax.random.key_data(key)
        mixed = jax.lax.iota(jnp.uint32, math.prod(shape)) * jnp.uint32(0x9E3779B1) + words[0]
        for shift in (16, 13, 16):
            mixed = (mixed ^ (mixed >> shift) ^ words[-1]) * jnp.uint32(0x85EBCA6B)
        uniform = (mixed >> 8).astype(dtype) * (2 / 2**24) - 1
        return scale * (3 / max(shape)) ** 0.5 * uniform.reshape(shape)

    return init


def in_one_context(make):
    """In place of JAX's `make_ir_context`: the same context, but for a program that is written while another one is."""
    shared = functools.cache(make)
    return lambda: shared() if ir.Context.current is None else make()


def compiled(family):
    """A distribution of actions whose functions are one program each, and not one for each of their operations."""
    names = "from_noise", "mode", "log_prob", "entropy", "kl", "to_environment"
    return family._replace(**{name: jax.jit(getattr(family, name)) for name in names})


def compile_for_h100(function, *arguments):
    """The compiled program; skips the test without the plugin of jax[cuda12]."""
    pytest.importorskip("jax_plugins.xla_cuda12")
    sharding = SingleDeviceSharding(h100())
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments)
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).compile()

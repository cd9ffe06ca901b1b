"""Calls of the host: their errors end a program on one device, and do not leave other devices waiting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.devices.mesh import make_row_mesh, make_rows_function
from grpo_jax.errors import ConfigError
from grpo_jax.host_calls import call_host, host_errors

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
calls = []


def half(x):
    calls.append(np.shape(x))
    if np.any(np.asarray(x) == 3):
        raise KeyError("no half of 3")
    return np.asarray(x, np.float32) / 2


def halves(x):
    """Twice, so that other calls follow the one that fails."""
    return call_host(half, SCALAR, x), call_host(half, SCALAR, x + 10)


def test_a_call_gets_the_rows_of_a_vmap_at_once():
    calls.clear()
    first, second = jax.jit(jax.vmap(jax.vmap(halves)))(jnp.arange(4.0, 8.0).reshape(2, 2))
    assert first.tolist() == [[2, 2.5], [3, 3.5]] and second.tolist() == [[7, 7.5], [8, 8.5]]
    assert calls == [(2, 2)] * 2


@pytest.mark.parametrize("num_devices", [1, 2])
def test_an_error_is_raised_as_it_is(num_devices, caplog):
    """With an exchange between the devices after the calls: an error on one left the other waiting, until an abort."""
    rows_function = make_rows_function(halves, make_row_mesh(num_devices))
    first, _ = rows_function(jnp.array([1.0, 2.0]))
    assert first.tolist() == [0.5, 1]
    for _ in range(2):
        with pytest.raises(KeyError, match="no half of 3"):
            rows_function(jnp.array([1.0, 3.0]))
    assert not caplog.records, "JAX prints no traceback"
    assert rows_function(jnp.array([4.0, 5.0]))[0].tolist() == [2, 2.5]


def test_zeros_stand_in_only_where_an_error_is_raised():
    program = jax.jit(halves)
    with pytest.raises(KeyError, match="no half of 3"):
        with host_errors(defer=True):
            first, second = program(3.0)
            assert (float(first), float(second)) == (0, 0)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="no half of 3"):
        jax.block_until_ready(program(3.0))


@pytest.mark.parametrize("raised, error", [(SystemExit(0), ConfigError), (KeyboardInterrupt(), KeyboardInterrupt)])
def test_an_exit_is_an_error_and_an_interruption_one(raised, error):
    def ends(x):
        raise raised

    with pytest.raises(error), host_errors():
        jax.block_until_ready(jax.jit(lambda x: call_host(ends, SCALAR, x))(1.0))

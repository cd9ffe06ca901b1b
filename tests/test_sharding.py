"""Rows over devices: the same numbers wherever a row is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.sharding import over_rows


def row(state):
    """Something with a carry of its own, whose length depends on the row."""
    x, number = state
    return jax.lax.fori_loop(0, number, lambda i, x: jnp.tanh(x) + i, x), x.sum()


@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_rows_are_what_they_are_alone(num_rows):
    states = jax.random.normal(jax.random.key(0), (num_rows, 5)), jnp.arange(num_rows)
    together = jax.jit(over_rows(row, num_rows))(states)
    for i in range(num_rows):
        alone = row(jax.tree.map(lambda leaf, i=i: leaf[i], states))
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-6)
    assert len(together[0].devices()) == (2 if num_rows == 4 else 1)

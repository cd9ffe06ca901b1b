import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.devices.tile_operations import NotOnTiles, tile_shape
from grpo_jax.devices.tiles import Traced

X = jax.random.normal(jax.random.key(0), (20, 3))

FUNCTIONS = {
    "sums": lambda x: (jnp.sum(x), jnp.sum(x, axis=0), jnp.mean(x, axis=1, keepdims=True)),
    "extremes": lambda x: (jnp.max(x, axis=1), jnp.min(x), jnp.argmax(x, axis=1), jnp.argmin(x, axis=0)),
    "truth": lambda x: (jnp.any(x > 1, axis=1), jnp.all(x > -1, axis=0)),
    "cumulative_sums": lambda x: (jnp.cumsum(x, axis=1), jax.lax.cumsum(x, axis=1, reverse=True)),
    "parts": lambda x: (x[:, 1:], x[:, 1], x[:, :1], jnp.split(x, [1], axis=1)),
    "concatenation": lambda x: (jnp.concatenate([x, x[:, :2], x > 0], axis=1), jnp.stack([x[:, 0], x[:, 1]])),
    "padding": lambda x: jnp.pad(x, ((0, 0), (1, 2)), constant_values=7.0),
    "products": lambda x: (x @ x.T, x @ x[0][:, None], x[:, :1] @ x[:1], x.T @ x),
    "softmax": lambda x: jax.nn.log_softmax(x),
    "gradient": jax.grad(lambda x: jnp.sum(jnp.tanh(x @ jnp.ones((3, 20)))[:, 2:] ** 2)),
    "constants": lambda x: (x, jnp.ones(3), ~jnp.array(True)),
}


def to_tile(x, fill):
    """The tile of an array; the entries outside are `fill`."""
    padding = [(0, side - size) for side, size in zip(tile_shape(x.shape), x.shape, strict=True)]
    return jnp.pad(x, padding, constant_values=fill)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("fill", [1e3, jnp.nan])
def test_results_do_not_depend_on_entries_outside_the_array(name, fill):
    expected = FUNCTIONS[name](X)
    traced = Traced(FUNCTIONS[name], X)
    captured = [to_tile(jnp.asarray(leaf), 0.0) for leaf in traced.captured]
    tiles = jax.jit(traced.on_tiles)(*captured, to_tile(X, fill))

    def check(tile, array):
        assert tile.shape == tile_shape(array.shape)
        np.testing.assert_allclose(tile[tuple(map(slice, array.shape))], array, rtol=1e-5, atol=1e-5)

    jax.tree.map(check, tiles, expected)


def test_unused_arguments_and_captured_arrays_are_known():
    statistics = jnp.arange(3.0)

    def function(x, unused):
        jnp.sort(unused)
        return x - statistics

    traced = Traced(function, X, X)
    assert traced.uses_argument == (True, False)
    assert [leaf.shape for leaf in traced.captured] == [(3,)]


@pytest.mark.parametrize("function, operation", [(jnp.sort, "sort"), (lambda x: x.reshape(-1), "reshape")])
def test_other_operations_are_named(function, operation):
    with pytest.raises(NotOnTiles, match=operation):
        Traced(function, X).on_tiles(to_tile(X, 0.0))

"""bfloat16 rounds without a bias, and its steps are close to those of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import Config, Hyperparams, make_init
from grpo_jax.errors import ConfigError
from grpo_jax.updates.opt_state import bfloat16_moments, stochastically_rounded


def test_rounding_gives_neighbours_whose_mean_is_the_number():
    x = jnp.array([1.0, 1.001, -3.3e-9, 0.0, 7.7e12])
    rounded = jax.vmap(lambda key: stochastically_rounded(x, key))(jax.random.split(jax.random.key(0), 4000))
    assert rounded.dtype == jnp.bfloat16
    rounded = np.float64(rounded)
    assert (np.abs(rounded - np.float64(x)) <= 2.0**-7 * np.abs(np.float64(x))).all()
    np.testing.assert_allclose(rounded.mean(axis=0), x, rtol=3e-4)
    assert [len(np.unique(column)) for column in rounded.T] == [1, 2, 2, 1, 2]


def test_an_optimizer_without_moments_is_refused():
    with pytest.raises(ConfigError, match="moments_dtype='bfloat16' has no effect .* 'sgd' with beta1"):
        bfloat16_moments(optax.sgd(0.1)).init(jnp.zeros(3))
    assert bfloat16_moments(optax.sgd(0.1, momentum=0.9)).init(jnp.zeros(3)).state[0].trace.dtype == jnp.bfloat16


def test_adam_in_bfloat16_follows_adam():
    """The gradient's scale falls to a tenth, which a second moment that is rounded to the nearest would not notice."""
    params, num_updates = jnp.zeros(2000), 600
    scale = jnp.where(jnp.arange(num_updates) < 100, 1.0, 0.1)

    def descend(optimizer):
        def update(state, now):
            scale, key = now
            gradient = scale * (1.0 + jax.random.normal(key, params.shape))
            step, state = optimizer.update(gradient, state, params)
            return state, step

        keys = jax.random.split(jax.random.key(1), num_updates)
        return jax.lax.scan(update, optimizer.init(params), (scale, keys))

    adam = optax.adam(0.01, b2=0.999)
    full, steps = jax.jit(lambda: descend(adam))()
    half, half_steps = jax.jit(lambda: descend(bfloat16_moments(adam)))()
    assert {leaf.dtype for leaf in jax.tree.leaves((half.state[0].mu, half.state[0].nu))} == {jnp.dtype("bfloat16")}
    np.testing.assert_allclose(jnp.mean(half.state[0].nu.astype(float)), jnp.mean(full[0].nu), rtol=5e-3)
    np.testing.assert_allclose(half.state[0].nu.astype(float), full[0].nu, rtol=0.25)
    np.testing.assert_allclose(half_steps.mean(axis=1), steps.mean(axis=1), rtol=5e-3, atol=1e-5)


def test_a_config_keeps_the_moments_of_every_optimiser_in_bfloat16_moments():
    small = {"algorithm": "ppo", "num_envs": 4, "num_steps": 4, "num_minibatches": 2}
    for optimizer in ("adam", "muon"):
        config = Config(**small, optimizer=optimizer, moments_dtype="bfloat16")
        state = jax.eval_shape(make_init(config), jax.random.key(0), Hyperparams())
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim} == {"bfloat16"}
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)} == {"float32"}
    with pytest.raises(ConfigError, match="moments_dtype='float16'; use one of float32, bfloat16"):
        Config(**small, moments_dtype="float16")

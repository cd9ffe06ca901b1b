"""A shuffled order is a permutation, uniform, with the valid samples first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.updates.shuffle import shuffled_order


@pytest.mark.parametrize("num_samples", [1, 2, 3, 7, 64, 1000, 70_000])
def test_is_a_permutation_with_the_valid_first(num_samples):
    valid = jax.random.bernoulli(jax.random.key(1), 0.3, (num_samples,))
    order = np.asarray(jax.jit(shuffled_order)(jax.random.key(0), valid))
    assert sorted(order) == list(range(num_samples))
    assert np.all(np.diff(np.asarray(valid)[order].astype(int)) <= 0)


def test_every_order_of_five_is_equally_frequent():
    orders = jax.vmap(lambda key: shuffled_order(key, jnp.ones(5, bool)))(jax.random.split(jax.random.key(0), 60_000))
    counts = np.unique(np.asarray(orders) @ 5 ** np.arange(5), return_counts=True)[1]
    assert len(counts) == 120
    chi_square = np.sum((counts - 500.0) ** 2 / 500.0)
    assert chi_square < 119 + 4 * np.sqrt(2 * 119)  # mean and standard deviation of its distribution


def test_samples_with_equal_random_bits_keep_no_order():
    # 2^20 samples share 2^11 random values: almost every one is tied with hundreds.
    num_samples = 2**20
    order = np.asarray(shuffled_order(jax.random.key(3), jnp.ones(num_samples, bool)))
    position = np.empty(num_samples, int)
    position[order] = np.arange(num_samples)
    for distance in (1, 2, 1024):
        forward = np.mean(position[distance:] > position[:-distance])
        assert abs(forward - 0.5) < 0.02, distance
    # Where a sample lands does not depend on where it was.
    assert abs(np.corrcoef(position, np.arange(num_samples))[0, 1]) < 0.005


def test_different_keys_give_different_orders():
    valid = jnp.ones(100, bool)
    first, second = (np.asarray(shuffled_order(jax.random.key(seed), valid)) for seed in (0, 1))
    assert np.mean(first == second) < 0.1


def test_too_many_samples_are_refused():
    with pytest.raises(ValueError, match="fewer num_envs or num_steps"):
        jax.eval_shape(shuffled_order, jax.random.key(0), jax.ShapeDtypeStruct((2**26 + 1,), bool))

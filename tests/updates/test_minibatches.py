"""A shuffled order is a random permutation, with the valid samples first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.updates.minibatches import shuffled_order


@pytest.mark.parametrize("num_samples", [1, 3, 70_000])
def test_an_order_is_a_permutation_with_the_valid_first(num_samples):
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


def test_a_sample_of_a_large_batch_may_land_anywhere():
    # 2^20 samples share 2^12 random values: almost every one is tied with hundreds, which keep their order.
    num_samples = 2**20
    order = np.asarray(shuffled_order(jax.random.key(3), jnp.ones(num_samples, bool)))
    assert abs(np.corrcoef(order, np.arange(num_samples))[0, 1]) < 0.005
    # A minibatch of a sixteenth has its share of every sixteenth of the batch.
    shares = np.histogram2d(order // (num_samples // 16), np.arange(num_samples) // (num_samples // 16), bins=16)[0]
    np.testing.assert_allclose(shares, num_samples / 256, rtol=0.1)


def test_different_keys_give_different_orders():
    first, second = (np.asarray(shuffled_order(jax.random.key(seed), jnp.ones(100, bool))) for seed in (0, 1))
    assert np.mean(first == second) < 0.1

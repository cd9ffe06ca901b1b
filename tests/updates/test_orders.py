"""Orders of samples: permutations, random in their places, pairs and shares; valid samples come first if asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import GRPO, PPO, Config
from grpo_jax.groups import ANCHORED
from grpo_jax.updates.orders import computed_order, minibatch_order, sorted_order

SIZES = 1, 3, 4099, 8198, 4160, 64_000  # sorted: few, a prime, twice a prime; computed: 64 * 65, 250 * 256


def order_of(algorithm, valid, num_epochs=1):
    """Of one minibatch an epoch, `[num_epochs, n]`."""
    config = Config(algorithm=algorithm, num_epochs=num_epochs, num_minibatches=1)
    order = jax.jit(lambda key: minibatch_order(config, key, valid[None]))(jax.random.key(1))
    return np.asarray(order)[:, 0]


@pytest.mark.parametrize("num_samples", SIZES)
@pytest.mark.parametrize(
    "algorithm", [GRPO, GRPO._replace(start=ANCHORED, live_groups_only=True), PPO], ids=["fresh", "live groups", "all"]
)
def test_an_order_is_a_permutation_with_the_valid_first(algorithm, num_samples):
    valid = jax.random.bernoulli(jax.random.key(2), 0.3, (num_samples,))
    first, second = order_of(algorithm, valid, num_epochs=2)
    assert (np.sort(first) == np.arange(num_samples)).all() and (np.sort(second) == np.arange(num_samples)).all()
    if algorithm is not PPO or num_samples < 4096:
        assert np.all(np.diff(np.asarray(valid)[first].astype(int)) <= 0)
    if num_samples > 3:
        assert np.mean(first == second) < 0.01


@pytest.mark.slow
def test_computed_orders_of_sixty_sizes_are_permutations():
    sizes = [a * b for a in range(64, 364, 10) for b in range(a, a + 200, 100)]
    orders = [jax.jit(computed_order, static_argnums=1)(jax.random.key(n), (n,)) for n in sizes]
    assert all((np.sort(order) == np.arange(len(order))).all() for order in orders)


def test_every_order_of_five_is_equally_frequent():
    orders = jax.vmap(lambda key: sorted_order(key, jnp.ones(5, bool)))(jax.random.split(jax.random.key(0), 60_000))
    counts = np.unique(np.asarray(orders) @ 5 ** np.arange(5), return_counts=True)[1]
    assert len(counts) == 120
    chi_square = np.sum((counts - 500.0) ** 2 / 500.0)
    assert chi_square < 119 + 4 * np.sqrt(2 * 119)  # mean and standard deviation of its distribution


@pytest.mark.parametrize("num_samples", [4096, 4160])
def test_places_neighbours_and_shares_of_computed_orders_are_uniform(num_samples):
    many, bins, half = 2_000, 32, num_samples // 2
    order = np.asarray(jax.jit(computed_order, static_argnums=1)(jax.random.key(0), (many, num_samples)))
    pairs = (order[:, 1:] - order[:, :1]) % num_samples
    for values in (order[:, 0], order[:, half], order[:, -1], pairs[:, 0], pairs[:, num_samples // 64 - 1]):
        counts = np.bincount(values * bins // num_samples, minlength=bins)
        assert np.sum((counts - many / bins) ** 2 / (many / bins)) < bins - 1 + 5 * np.sqrt(2 * (bins - 1))
    shared = np.sum(order[:, :half] < half, axis=1)  # hypergeometric
    variance = num_samples**2 / 16 / (num_samples - 1)
    assert abs(shared.mean() - num_samples / 4) < 5 * np.sqrt(variance / many)
    assert abs(shared.var() / variance - 1) < 5 * np.sqrt(2 / many)


@pytest.mark.parametrize("make", [sorted_order, lambda key, valid: computed_order(key, valid.shape)])
def test_a_sample_of_a_large_batch_may_land_anywhere(make):
    # Of the sort 2^20 samples share 2^12 random values: almost every one is tied with hundreds, which keep their order.
    num_samples = 2**20
    order = np.asarray(jax.jit(make)(jax.random.key(3), jnp.ones(num_samples, bool)))
    assert abs(np.corrcoef(order, np.arange(num_samples))[0, 1]) < 0.005
    # A minibatch of a sixteenth has its share of every sixteenth of the batch.
    shares = np.histogram2d(order // (num_samples // 16), np.arange(num_samples) // (num_samples // 16), bins=16)[0]
    np.testing.assert_allclose(shares, num_samples / 256, rtol=0.1)

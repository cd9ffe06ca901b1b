"""The benchmark's structure on its smallest run; no time is asserted."""

import json

import jax
import numpy as np
import pytest

from experiments import benchmark
from experiments.harness import reference_implementations as reference
from experiments.harness import workloads
from experiments.harness.plain_networks import make_gradients, make_networks
from experiments.harness.reference_implementations import Size


def test_flops_of_the_matrix_products():
    """By hand: 4480 weights of the actor, 4416 of the critic, thrice for a gradient less the first layer."""
    for environment, critic, whole in (("CartPole-v1", True, 227_200), ("CartPole-v1", False, 114_432)):
        config = workloads.make_config(environment, Size(8), critic)
        assert workloads.forward_flops(config) + 4 * workloads.gradient_flops(config) == whole


def test_the_products_of_an_update_are_those_that_its_flops_count():
    """XLA counts the bodies of the loops once: the gradients of one part."""
    config = workloads.make_config("CartPole-v1", Size(64), critic=True)
    weights, samples = make_networks(config, workloads.layer_sizes(config))
    step = jax.jit(make_gradients(config, lambda x: x))
    flops = step.lower(weights, samples).compile().cost_analysis()["flops"]
    products = 512 * workloads.gradient_flops(config)
    assert samples[0].shape == (4, 512, 4) and flops == pytest.approx(products, rel=0.02)
    with jax.enable_x64(True):
        in_float64 = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (weights, samples))
        after = jax.tree.map(np.asarray, step(*in_float64)[0])
    inputs, *output_gradients = (part.reshape(-1, part.shape[-1]) for part in in_float64[1])
    for network, output_gradient, result in zip(in_float64[0], output_gradients, after, strict=True):
        first, second, third = start = network
        for _ in range(16):  # 4 epochs of 4 minibatches
            hidden, into_hidden = inputs @ first, output_gradient @ third.T
            change = inputs.T @ (into_hidden @ second.T), hidden.T @ into_hidden, (hidden @ second).T @ output_gradient
            first, second, third = (old - 1e-9 * g for old, g in zip((first, second, third), change, strict=True))
        for old, new, ours in zip(start, (first, second, third), result, strict=True):
            np.testing.assert_allclose(ours - old, new - old, rtol=1e-7, atol=1e-14)


@pytest.mark.slow
def test_smallest_run(tmp_path):
    out, plot = tmp_path / "results" / "speed.json", tmp_path / "speed.png"
    benchmark.main(
        benchmark.Arguments(
            environments=("CartPole-v1",), num_envs=(4,), num_seeds=(1, 2), repeats=2, seconds=0.0, out=out, plot=plot
        )
    )
    record = json.loads(out.read_text())
    assert plot.stat().st_size > 1000
    names = [row["implementation"] for row in record["results"] if row["num_seeds"] == 2]
    assert names == [name for name in workloads.IMPLEMENTATIONS if name != "rejax PPO" or reference.rejax_version()]
    for row in record["results"]:
        low, middle, high = (row[f"steps_per_second{end}"] for end in ("_low", "", "_high"))
        assert 0 < low <= middle <= high
        assert row["memory_bytes"] > 0

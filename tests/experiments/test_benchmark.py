"""The benchmark's structure on its smallest run; no time is asserted."""

import json

import pytest

from experiments import benchmark
from experiments.harness import reference_implementations as reference
from experiments.harness import workloads
from experiments.harness.reference_implementations import Size


def test_flops_of_the_matrix_products():
    """By hand: 4480 weights of the actor, 4416 of the critic, thrice for a gradient less the first layer."""
    for environment, critic, whole in (("CartPole-v1", True, 227_200), ("CartPole-v1", False, 114_432)):
        config = workloads.make_config(environment, Size(8), critic)
        assert workloads.forward_flops(config) + 4 * workloads.gradient_flops(config) == whole


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

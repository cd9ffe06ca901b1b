"""TrainingWarnings, and what is read of metrics.jsonl."""

import dataclasses
import json
import math

import numpy as np
import pytest

from grpo_jax.environments.spaces import Box, Discrete, MultiDiscrete
from grpo_jax.recording.metrics_file import read_metrics, truncate_metrics
from grpo_jax.recording.training_warnings import DEAD_ITERATIONS, TrainingWarnings
from grpo_jax.runs.run_spec import Setting


def watched(space, **columns):
    metrics = {name.replace("__", "/"): np.array(values, float) for name, values in columns.items()}
    return TrainingWarnings(space)(7, metrics)


def test_a_healthy_run_is_quiet():
    columns = {
        "policy__entropy": [[0.6, np.nan], [0.02, 0.3]],
        "policy__kl_behaviour": [[0.01, np.nan], [0.2, 0.9]],
        "group__zero_variance_fraction": [[0.0, np.nan], [1.0, 0.99]],
        "advantage__abs_mean": [[0.8, np.nan], [0.0, 0.1]],
        "optim__skipped_updates": [[0, np.nan], [0, 0]],
    }
    assert watched(Discrete(2), **columns) == []


@pytest.mark.parametrize(
    "space, entropy, collapsed",
    [
        (Discrete(2), 0.0068, True),
        (Discrete(2), 0.0071, False),
        (MultiDiscrete((2, 4)), 0.0207, True),
        (Box((-1.0,), (1.0,)), 0.0, False),
        (Box((-1.0,), (1.0,)), 1.42 + math.log(0.009), True),
        (Box((-0.1,), (0.1,)), 1.42 + math.log(0.1 * 0.012), False),
        (Box((-3.4028235e38,), (3.4028235e38,)), 1.42 + math.log(0.012), False),
        (Box((-1.0, 0.0), (1.0, 2.0)), 2 * (1.42 + math.log(0.012)), False),
    ],
)
def test_a_collapsed_entropy_depends_on_the_actions(space, entropy, collapsed):
    assert bool(watched(space, policy__entropy=[[entropy]])) == collapsed


def test_each_warning_says_where_and_what_to_try():
    (kl,) = watched(Discrete(2), policy__kl_behaviour=[[0.1, 0.1, 0.1], [0.1, 3.0, 2.0]])
    assert "at iteration 8 in seeds [1, 2]" in kl and "kl_limit" in kl
    (skipped,) = watched(Discrete(2), optim__skipped_updates=[[2.0]])
    assert "at iteration 7." in skipped.replace(",", ".") and "learning_rate" in skipped and "seeds" not in skipped
    (entropy,) = watched(Discrete(2), policy__entropy=np.zeros((1, 40)))
    assert "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, and 30 more]" in entropy and "entropy_coef" in entropy
    assert all(warning.endswith("`grpo-jax docs flat_reward` says more.") for warning in (kl, skipped, entropy))


def test_groups_are_dead_after_long_and_across_chunks_and_reported_once():
    warn = TrainingWarnings(Discrete(2))
    none = {"advantage/abs_mean": np.array([[0.0, np.nan]])}  # NaN: every sample left out
    dead = [none | {"group/zero_variance_fraction": np.array([[1.0, 1.0]])}] * 30
    dead[4] = none | {"group/zero_variance_fraction": np.array([[1.0, 0.9]])}
    warnings = [warn(i, chunk) for i, chunk in enumerate(dead)]
    assert [i for i, messages in enumerate(warnings) if messages] == [DEAD_ITERATIONS - 1]
    assert "in seeds [0]" in warnings[DEAD_ITERATIONS - 1][0] and "group_size" in warnings[DEAD_ITERATIONS - 1][0]
    equal = {"group/zero_variance_fraction": np.ones((30, 1)), "advantage/abs_mean": np.full((30, 1), 0.3)}
    assert TrainingWarnings(Discrete(2))(0, equal) == [], "equal scores with advantages"


def test_a_record_is_read_and_cut_whatever_a_killed_process_left(tmp_path):
    one, other = (Setting({"name": name}, "Probe") for name in "ab")
    runs = [dataclasses.asdict(one), dataclasses.asdict(other)]
    lines = [
        {"run": run, "iteration": i, "environment_steps": [10 * i, 5], "environment/steps": [9, None], "x": [0.1, None]}
        for run in runs
        for i in range(3)
    ]
    path, whole = tmp_path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(whole + '{"run": "b", "iteration": 3, "environ')
    chunk = read_metrics(tmp_path)[other]
    assert chunk.steps.tolist() == [[0, 5], [10, 5], [20, 5]]
    assert chunk.metrics["environment/steps"].tolist() == [[9, 0]] * 3
    assert chunk.metrics["x"].dtype == np.float32 and np.isnan(chunk.metrics["x"][:, 1]).all()
    truncate_metrics(tmp_path, other, 3)
    assert path.read_text() == whole
    truncate_metrics(tmp_path, one, 1)
    assert [(line["run"], line["iteration"]) for line in map(json.loads, path.read_text().splitlines())] == [
        *[(runs[0], 0), (runs[1], 0), (runs[1], 1), (runs[1], 2)]
    ]
    assert set(read_metrics(tmp_path)) == {one, other}

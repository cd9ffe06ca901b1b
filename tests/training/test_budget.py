"""Budgets are counted exactly, beyond what float32 and int32 hold, and spent to the last iteration they allow."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, counted
from small import small_config

from grpo_jax import Hyperparams, make_train, run
from grpo_jax.policies import MLP
from grpo_jax.runs.end_warnings import end_warnings
from grpo_jax.runs.result import RunResult, describe_ends
from grpo_jax.runs.run import Rows
from grpo_jax.training import budget
from grpo_jax.types import StepCount


def progress(**fields):
    """The fields of a state that count."""
    none = {"steps": count(0), "last_steps": np.int32(1), "iteration": np.int32(0), "episodes": count(0)}
    return types.SimpleNamespace(**none | fields)


def count(numbers):
    return StepCount(*(jnp.asarray(part, jnp.int32) for part in np.divmod(np.asarray(numbers, np.int64), 2**31)))


def test_an_iteration_is_allowed_to_the_very_last_step():
    for total in (55, 2**24 + 1, 2**31, 3_000_000_123, 10**13 + 7):
        limit = budget.make_budget(Hyperparams(total_steps=total), np.zeros(1, bool))
        for last in {1, min(total, 64_000), min(total, 2**30)}:  # steps of the last iteration
            made = np.array([0, total - last - 1, total - last, total - last + 1, total])
            made = made[made >= 0]
            allowed = budget.allows_another(limit, progress(steps=count(made), last_steps=np.int32(last)))
            assert allowed.tolist() == [steps + last <= total for steps in made]


def test_episodes_are_limited_to_a_number():
    for limit in (7.0, 7.5, 2.0**33 + 1):
        completed = np.floor(limit) + np.array([-7, -1, 0, 1, 5])
        limits = budget.make_budget(Hyperparams(total_steps=np.inf, max_episodes=limit), np.zeros(1, bool))
        allowed = [bool(budget.allows_another(limits, progress(episodes=count(number)))) for number in completed]
        assert allowed == [number < limit for number in completed]


def test_counts_add_up_beyond_two_billion():
    numbers = np.random.default_rng(0).integers(0, 2**26, size=500)
    total, _ = jax.lax.scan(lambda total, number: (total.plus(number), None), count(0), numbers)
    assert counted(total) == numbers.sum() > 10**10


@pytest.fixture(scope="module")
def short():
    """One-episode groups whose episodes take 3 of at most 64 steps: (config, the run of 1,000 steps)."""
    config = small_config("grpo", Probe(), group_size=4, env_params={"max_steps_in_episode": 64, "lifetime": 3})
    return config, run(config, HYPERPARAMS, KEYS, chunk_length=3)


# Arrays in all runs, and chunks of one length, so that they share programs.
RATES = {"learning_rate": 1.0, "final_learning_rate": 0.0}
HYPERPARAMS = Hyperparams(**RATES, total_steps=np.full(2, 1000.0), max_episodes=np.full(2, np.inf))
KEYS = jax.random.split(jax.random.key(0), 2)


def test_short_episodes_use_their_budget_and_its_schedule(short):
    config, result = short
    assert config.steps_per_iteration == 512 and (result.metrics["environment/steps"] == 24).all()
    assert result.steps[-1].tolist() == [984, 984], "41 iterations of 24 steps"
    np.testing.assert_allclose(result.used, 0.984)
    assert result.ended_by.tolist() == ["total_steps"] * 2
    np.testing.assert_allclose(result.metrics["optim/learning_rate"][:, 0], 1 - 0.024 * np.arange(41), atol=1e-6)


def test_iterations_of_any_length_are_counted_and_scheduled(short):
    config, _ = short
    result = run(config, Hyperparams(**RATES, num_iterations=np.array([5, 2])), KEYS, chunk_length=3)
    assert result.states.iteration.tolist() == [5, 2] and result.ended_by.tolist() == ["num_iterations"] * 2
    np.testing.assert_allclose(result.metrics["optim/learning_rate"][:, 0], [1, 0.8, 0.6, 0.4, 0.2], atol=1e-6)
    np.testing.assert_allclose(result.metrics["optim/learning_rate"][:2, 1], [1, 0.5], atol=1e-6)
    assert result.used.tolist() == [1, 1]
    hyperparams = HYPERPARAMS.replace(total_steps=np.full(2, np.inf), max_episodes=np.array([40.0, 20.0]))
    result = run(config, hyperparams, KEYS, chunk_length=3)  # a schedule over episodes ends with them
    assert result.states.iteration.tolist() == [5, 3] and result.ended_by.tolist() == ["max_episodes"] * 2
    np.testing.assert_allclose(result.metrics["optim/learning_rate"][:, 0], [1, 0.8, 0.6, 0.4, 0.2], atol=1e-6)


def test_the_end_of_a_run_says_what_went_wrong_in_all_of_it(short, monkeypatch):
    config, whole = short
    lines = repr(whole).splitlines()
    assert lines == ["RunResult: 2 seeds, 41 iterations, 98.4% of total_steps used", "  final_return [3, 3]"]
    assert not end_warnings(config, HYPERPARAMS, whole)
    names = "environment/steps", "optim/skipped_updates", "episode/return_mean", "episode/count"
    metrics = {name: np.full((3, 2), value) for name, value in zip(names, (300.0, 1.0, np.nan, 0.0), strict=True)}
    ends = np.array(["stopped", "total_steps"]), np.array([0.5, 0.9])
    result = RunResult(None, metrics, 300 * np.arange(1, 4).repeat(2).reshape(3, 2), 0.0, 0.0, None, *ends)
    monkeypatch.setattr(Rows, "run", lambda rows: result)
    with pytest.warns(UserWarning) as given:
        run(config, HYPERPARAMS, KEYS)
    skipped, ended, left = (str(each.message) for each in given)
    assert skipped.startswith("3 of 3 updates were skipped") and "112 steps" in ended and "after 64." in ended
    assert "10% of total_steps=1000 are left" in left and "num_iterations=3" in left


def test_the_end_of_rows_is_described():
    ended_by = np.array(["total_steps", "stopped", "total_steps"])
    described = describe_ends(ended_by, np.array([0.97, 0.5, 0.99]))
    assert described == "stopped at 50.0% of the budget in 1 of 3 seeds, 98.0% of total_steps used in 2 of 3 seeds"
    assert describe_ends(ended_by, np.ones(3), "rows").endswith("in 2 of 3 rows")
    assert describe_ends(ended_by[:1], np.array([1.004])) == "100.4% of total_steps used"


def test_a_billion_steps_take_the_memory_of_a_million():
    """An iteration leaves a number for each metric, and nothing else."""
    sizes, config = [], small_config("grpo", Probe(), group_size=2, network=MLP(()))
    for steps in (10**6, 10**9):
        train = jax.jit(make_train(config, steps // config.steps_per_iteration))
        memory = train.lower(jax.random.key(0), Hyperparams(total_steps=steps)).compile().memory_analysis()
        sizes.append((memory.temp_size_in_bytes, memory.output_size_in_bytes))
    (temporary, output), (long_temporary, long_output) = sizes
    metrics = jax.eval_shape(train, jax.random.key(0), Hyperparams())[1]
    assert long_temporary < temporary + 10_000
    assert long_output < output + 4 * sum(leaf.size for leaf in metrics.values())

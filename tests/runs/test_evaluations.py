"""Evaluations while training, criteria that stop rows, and callbacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, bits
from small import small_config

from grpo_jax import Evaluate, Hyperparams, Recording, evaluate, reached_return, recorded_run, run
from grpo_jax.commands.harness.study import EvaluationArguments
from grpo_jax.errors import ConfigError
from grpo_jax.recording.metrics_file import read_metrics
from grpo_jax.recording.run_folder import StopSignal
from grpo_jax.runs.evaluations import GREEDY, SAMPLED, Evaluations
from grpo_jax.runs.progress import initial_progress, with_evaluation

CONFIG = small_config("ppo", Probe(), num_envs=4, num_steps=8)
KEYS = jax.random.split(jax.random.key(5), 3)
HYPERPARAMS = Hyperparams(total_steps=jnp.array([10 * 32.0, 7 * 32.0, 10 * 32.0]), learning_rate=1e-2)
EVALUATED = {"evaluate": Evaluate(4, episodes=6), "chunk_length": 2}


@pytest.fixture(scope="module")
def plain():
    return run(CONFIG, HYPERPARAMS, KEYS, chunk_length=2)


@pytest.fixture(scope="module")
def evaluated():
    return run(CONFIG, HYPERPARAMS, KEYS, **EVALUATED)


def test_evaluations_change_nothing_in_training(plain, evaluated):
    assert bits(plain.states) == bits(evaluated.states)
    rest = {name: value for name, value in evaluated.metrics.items() if name not in (SAMPLED, GREEDY)}
    assert bits(rest) == bits(plain.metrics)
    assert len(plain.evaluations.iterations) == 0 and SAMPLED not in plain.metrics


def test_evaluations_come_in_intervals_and_at_the_end(evaluated):
    evaluations = evaluated.evaluations
    assert evaluations.iterations.tolist() == [4, 8, 10]
    assert evaluations.steps.tolist() == [[128, 128, 128], [256, 224, 256], [320, 224, 320]]
    # The second row's budget ends at iteration 7, within the chunk that ends at 8.
    found = [np.flatnonzero(np.isfinite(column)).tolist() for column in evaluated.metrics[SAMPLED].T]
    assert found == [[3, 7, 9], [3, 6], [3, 7, 9]]
    assert np.array_equal(evaluated.metrics[GREEDY][9, [0, 2]], evaluations.greedy[2, [0, 2]])


@pytest.mark.slow
def test_the_last_evaluation_is_that_of_the_final_states(evaluated):
    keys = [jax.random.fold_in(jax.random.fold_in(key, 2**31), 10) for key in KEYS]
    for row, key in enumerate(keys):
        state = jax.tree.map(lambda leaf, row=row: leaf[row], evaluated.states)
        for greedy, returns in ((False, evaluated.evaluations.sampled), (True, evaluated.evaluations.greedy)):
            expected = evaluate(CONFIG, state, key, num_episodes=6, greedy=greedy).returns.mean()
            assert np.isclose(returns[-1, row], expected, rtol=1e-6)


def test_a_run_ends_when_all_rows_have_stopped():
    result = run(CONFIG, HYPERPARAMS, KEYS, evaluate=Evaluate(4, 6, reached_return(-1e9)), chunk_length=2)
    assert len(result.steps) == 4 and result.evaluations.iterations.tolist() == [4]


def returns(*sampled):
    table = np.array(sampled, float)
    steps = np.zeros(table.shape, np.int64)
    return Evaluations(np.arange(len(table)), steps, table, table + 1)


def test_criteria():
    history = returns([1.0, 5.0, np.nan], [3.0, 4.0, np.nan], [2.0, 5.0, np.nan], [3.5, 5.0, np.nan])
    assert reached_return(4.5)(history).tolist() == [False, True, False]
    flags = EvaluationArguments(evaluate_every=1, stop_at_return=4.5).make()
    assert flags.stop_when(history).tolist() == [False, True, False]
    with pytest.raises(ConfigError, match="needs evaluations; set --evaluate-every, such as 10"):
        EvaluationArguments(stop_at_return=4.5).make()


def stop_at(iteration):
    """A callback that stops all rows."""
    return lambda progress, chunk: progress._replace(stopped=np.array(progress.iteration == iteration))


def test_a_run_that_a_callback_ends_is_evaluated_last(evaluated):
    result = run(CONFIG, HYPERPARAMS, KEYS, **EVALUATED, callback=stop_at(6))
    assert result.evaluations.iterations.tolist() == [4, 6] and result.ended_by.tolist() == ["stopped"] * 3
    assert np.flatnonzero(np.isfinite(result.metrics[SAMPLED]).all(axis=1)).tolist() == [3, 5]
    assert np.array_equal(result.metrics[GREEDY][5], result.evaluations.greedy[1])
    np.testing.assert_allclose(result.used, [0.6, 6 / 7, 0.6], rtol=1e-6)


@pytest.mark.slow
def test_a_callback_may_let_a_stopped_run_go_on(plain):
    seen = []
    run(CONFIG, HYPERPARAMS, KEYS, chunk_length=2, callback=lambda *now: seen.append(stop_at(6)(*now)) or seen[-1])
    stopped = seen[-1]._replace(stopped=np.ones(3, bool))
    result = run(CONFIG, HYPERPARAMS, KEYS, chunk_length=2, resume_from=stopped, callback=stop_at(10))
    assert len(result.steps) == 4 and bits(result.states) == bits(plain.states)


def test_a_callback_knows_the_last_call_and_what_is_used():
    seen = []

    def note(progress, chunk):
        seen.append((progress.ended.tolist(), progress.used.round(3).tolist()))

    run(CONFIG, HYPERPARAMS, KEYS, chunk_length=2, callback=note)
    assert [seen[i] for i in (0, 1)] == [([False] * 3, [0, 0, 0]), ([False] * 3, [0.2, 0.286, 0.2])]
    assert seen[-2:] == [([False, True, False], [0.8, 1, 0.8]), ([True] * 3, [1, 1, 1])] and len(seen) == 6


@pytest.mark.slow
def test_a_callback_may_change_the_states_and_stop_rows(plain):
    seen = []

    def callback(progress, chunk):
        seen.append((progress.iteration, None if chunk is None else len(chunk.steps)))
        if progress.iteration != 4:
            return None
        halved = progress.states.hyperparams.learning_rate * 0
        states = progress.states.replace(hyperparams=progress.states.hyperparams.replace(learning_rate=halved))
        return progress._replace(states=states, stopped=np.array([True, False, False]))

    result = run(CONFIG, HYPERPARAMS, KEYS, chunk_length=2, callback=callback)
    assert seen == [(0, None), (2, 2), (4, 2), (6, 2), (8, 2), (10, 2)]
    assert result.states.iteration.tolist() == [4, 7, 10]
    assert bits(result.metrics["policy/entropy"][:4]) == bits(plain.metrics["policy/entropy"][:4])
    assert (result.metrics["optim/learning_rate"][:4, 2] > 0).all()
    assert (result.metrics["optim/learning_rate"][4:, 2] == 0).all()


def of_callback(change):
    return {"callback": lambda progress, chunk: change(progress)}


def one_row(now):
    return now._replace(states=jax.tree.map(lambda x: x[:1], now.states))


MISTAKES = {
    r"evaluate=10 does not say .*; use Evaluate\(every=10\)": lambda: {"evaluate": 10},
    "the callback returned TrainState; return None or": lambda: of_callback(lambda now: now.states),
    r"changed params/actor/Dense_0/bias from float32\[3, 4\] to float32\[1, 4\]; keep": lambda: of_callback(one_row),
    r"the callback returned stopped = bool\[2\], but it must be bool\[3\]": lambda: of_callback(
        lambda now: now._replace(stopped=np.zeros(2, bool))
    ),
    "every=-1 is not a positive integer": lambda: {"evaluate": Evaluate(-1)},
    "episodes=0 is not a positive integer": lambda: {"evaluate": Evaluate(2, 0)},
    r"stop_when=475 is not a function; .*reached_return\(475.0\)": lambda: {"evaluate": Evaluate(2, 2, 475)},
    "threshold=nan .*is not a return": lambda: {"evaluate": Evaluate(2, 2, reached_return(np.nan))},
    "threshold='475' .*is not a return": lambda: {"evaluate": Evaluate(2, 2, reached_return("475"))},
}


@pytest.mark.parametrize("message, arguments", MISTAKES.items())
def test_mistakes(message, arguments):
    with pytest.raises(ConfigError, match=message):
        run(CONFIG, HYPERPARAMS, KEYS, **arguments())


def test_a_criterion_gives_a_bool_for_each_row_or_one_for_all():
    def stopped(value):
        evaluated = with_evaluation(initial_progress({}, 3), np.zeros((3, 2)), lambda evaluations: value)
        return evaluated.stopped.tolist()

    assert stopped(True) == [True] * 3 and stopped(jnp.array([True, False, True])) == [True, False, True]
    for wrong in (None, 1, np.ones(3), np.ones(2, bool), np.ones((1, 3), bool)):
        with pytest.raises(ConfigError, match=r"stop_when returned .*, but it must be bool\[3\]"):
            stopped(wrong)


def recorded(folder, evaluate, interrupt_at=None):
    """The result of a run, or of the rest of it; with an iteration to stop at, as by a signal."""

    def callback(progress, chunk):
        if progress.iteration == interrupt_at:
            raise StopSignal(15)

    given = CONFIG, HYPERPARAMS, KEYS, Recording(folder, 2, resume=True)
    if interrupt_at is None:
        return recorded_run(*given, evaluate=evaluate, console=False)
    with pytest.raises(StopSignal):
        recorded_run(*given, evaluate=evaluate, callback=callback, console=False)


@pytest.mark.slow
def test_an_interrupted_run_stops_where_it_would_have_stopped(plain, tmp_path):
    """One row stops, and the others are as they would be without it."""
    evaluate = Evaluate(4, 6, lambda evaluations: np.array([len(evaluations.iterations) >= 2, False, False]))
    whole = recorded(tmp_path / "whole", evaluate)
    assert whole.states.iteration.tolist() == [8, 7, 10] and whole.steps[-1].tolist() == [256, 224, 320]
    assert np.isnan(whole.metrics["loss/policy"][8:, 0]).all()
    others = [jax.tree.map(lambda leaf: leaf[1:], result.states) for result in (plain, whole)]
    assert bits(others[0]) == bits(others[1])
    recorded(tmp_path / "parts", evaluate, interrupt_at=8)
    parts = recorded(tmp_path / "parts", evaluate)
    assert bits(parts.states) == bits(whole.states) and bits(parts.evaluations) == bits(whole.evaluations)
    assert bits(parts.metrics) == bits(whole.metrics)
    (chunk,) = read_metrics(tmp_path / "parts").values()
    assert np.array_equal(chunk.metrics[SAMPLED], whole.metrics[SAMPLED], equal_nan=True)


@pytest.mark.slow
def test_a_run_is_resumed_with_and_without_evaluations(tmp_path):
    every = Evaluate(4, episodes=6)
    for folder, first, then, evaluated_at in (("added", None, every, [7, 9]), ("left_out", every, None, [3])):
        recorded(tmp_path / folder, first, interrupt_at=6)
        result = recorded(tmp_path / folder, then)
        assert np.flatnonzero(np.isfinite(result.metrics[SAMPLED][:, 0])).tolist() == evaluated_at
        (chunk,) = read_metrics(tmp_path / folder).values()
        assert np.array_equal(chunk.metrics[SAMPLED], result.metrics[SAMPLED], equal_nan=True)

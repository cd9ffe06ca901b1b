"""The train step as a pure function from state to state, and `run`, which drives it to a budget."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, bits, counted

from grpo_jax import Config, Hyperparams, make_init, make_train, make_train_step, run
from grpo_jax.errors import ConfigError
from grpo_jax.policies import MLP


def close(actual, expected, tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), actual, expected)


def types(tree):
    return [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(jax.eval_shape(lambda x: x, tree))]


# --- the train step --------------------------------------------------------------------------------------------------


def test_it_returns_a_state_of_the_same_types(small):
    state, metrics = jax.eval_shape(make_train_step(small.config), small.start)
    assert jax.tree.structure(state) == jax.tree.structure(small.start)
    assert types(state) == types(small.start)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((state, metrics)))
    of_steps = metrics.pop("environment/steps")
    assert (of_steps.shape, of_steps.dtype) == ((), "int32"), "float32 stops counting at 2^24"
    assert {(metric.shape, metric.dtype.name) for metric in metrics.values()} == {((), "float32")}


def test_a_whole_training_is_init_and_train_steps(grpo):
    state, metrics = jax.jit(make_train(grpo.config, 10))(jax.random.key(0), grpo.hyperparams)
    assert state.iteration == 10 and state.steps == grpo.end.steps
    np.testing.assert_array_equal(metrics["environment/steps"], grpo.metrics["environment/steps"])
    close(state.params, grpo.end.params, 1e-4)
    with pytest.raises(ConfigError, match="num_iterations=0 is not a positive integer"):
        make_train(grpo.config, 0)


@pytest.mark.slow
def test_without_jit_it_computes_the_same():
    sizes = {"num_envs": 2, "num_steps": 3, "num_epochs": 1, "num_minibatches": 1, "network": MLP((4,))}
    config = Config(environment=Probe(), algorithm="ppo", env_params={"bonus": 1.0}, **sizes)
    train_step, state = make_train_step(config), jax.jit(make_init(config))(jax.random.key(0), Hyperparams())
    compiled, metrics = jax.jit(train_step)(state)
    with jax.disable_jit():
        plain, plain_metrics = train_step(state)
    close((plain.params, plain.rollout, plain_metrics), (compiled.params, compiled.rollout, metrics), 1e-5)


def test_metrics_are_finite_and_consistent(small):
    of_groups, of_critics = ({name for name in small.metrics if name.startswith(kind)} for kind in ("group/", "value/"))
    assert bool(of_groups) == (small.config.group_size > 1) != bool(of_critics)
    metrics = {name: np.asarray(value) for name, value in small.metrics.items()}
    for name, value in metrics.items():
        assert value.shape == (10,) and np.isfinite(value).all(), name
    assert (metrics["episode/return_min"] <= metrics["episode/return_mean"]).all()
    assert (metrics["episode/return_mean"] <= metrics["episode/return_max"]).all()
    assert (metrics["episode/return_max"] <= small.config.env.max_steps).all()
    # CartPole pays 1 for each step.
    np.testing.assert_allclose(metrics["episode/return_mean"], metrics["episode/length_mean"], rtol=1e-6)
    assert (metrics["policy/entropy"] <= np.log(2) + 1e-6).all() and (metrics["policy/ratio_max"] >= 1).all()
    assert not metrics["optim/skipped_updates"].any()


def test_counters_count(grpo, ppo):
    for small in (grpo, ppo):
        assert small.end.iteration == 10
        assert counted(small.end.episodes) == small.metrics["episode/count"].sum()
        assert counted(small.end.steps) == small.metrics["environment/steps"].sum()
    assert (ppo.metrics["environment/steps"] == 8 * 16).all()
    # Each member of a group plays one episode, in each iteration.
    assert (grpo.metrics["episode/count"] == 8).all()
    np.testing.assert_allclose(grpo.metrics["environment/steps"], 8 * grpo.metrics["episode/length_mean"], rtol=1e-6)


def test_the_learning_rate_falls_linearly_with_the_steps_made(small):
    hyperparams = small.hyperparams
    made = np.concatenate([[0], np.cumsum(small.metrics["environment/steps"])[:-1]])
    share = made / hyperparams.total_steps
    expected = hyperparams.learning_rate * (1 - share) + hyperparams.final_learning_rate * share
    np.testing.assert_allclose(small.metrics["optim/learning_rate"], expected, rtol=1e-5)


def test_learning_rate_0_leaves_the_parameters_bitwise(small):
    start = small.init(jax.random.key(0), small.hyperparams.replace(learning_rate=0.0, final_learning_rate=0.0))
    end, metrics = small.ten(start)
    assert bits(end.params) == bits(start.params) == bits(small.start.params)
    assert bits(small.end.params) != bits(small.start.params)
    assert (metrics["optim/grad_norm"] > 0).all()
    assert np.array_equal(metrics["policy/ratio_max"], np.ones(10))


# --- run -------------------------------------------------------------------------------------------------------------

KEYS = jax.random.split(jax.random.key(3), 3)
MAX_EPISODES = 56
BUDGETS = np.array([600.0, 4000.0, 4000.0])


def kept(chunks):
    """A callback that keeps the chunks."""
    return lambda progress, chunk: chunks.append(chunk) if chunk is not None else None


@pytest.fixture(scope="module")
def driven(grpo):
    """Three rows: the first spends its budget, the others stop at their number of episodes."""
    chunks = []
    hyperparams = grpo.hyperparams.replace(max_episodes=MAX_EPISODES, total_steps=jnp.asarray(BUDGETS))
    result = run(grpo.config, hyperparams, KEYS, callback=kept(chunks), chunk_length=2)
    return result, chunks


def test_rows_stop_by_themselves_and_within_their_budget(grpo, driven):
    result, _ = driven
    made = result.metrics["environment/steps"]
    stopped = (made > 0).sum(0)
    assert np.array_equal(result.states.iteration, stopped)
    assert np.array_equal(result.steps, np.cumsum(made, axis=0)) and result.steps.dtype == np.int64
    assert result.ended_by.tolist() == ["total_steps", "max_episodes", "max_episodes"]
    last = made[stopped[0] - 1, 0]
    assert result.steps[-1, 0] - last + made[stopped[0] - 2, 0] <= BUDGETS[0] < result.steps[-1, 0] + last
    np.testing.assert_allclose(result.used, [result.steps[-1, 0] / BUDGETS[0], 1, 1], rtol=1e-6)
    assert stopped.tolist()[1:] == [MAX_EPISODES // 8] * 2 and stopped[0] < stopped[1]
    assert counted(result.states.episodes).tolist()[1:] == [MAX_EPISODES] * 2
    for name, value in result.metrics.items():
        if name != "environment/steps":
            assert np.isnan(value[stopped[0] :, 0]).all() and np.isfinite(value[: stopped[0], 0]).all(), name


@pytest.mark.slow
def test_a_row_is_the_train_step_again_and_again(grpo, driven):
    result, _ = driven
    step = jax.jit(make_train_step(grpo.config))
    for row in (0, 1):
        hyperparams = grpo.hyperparams.replace(total_steps=BUDGETS[row], max_episodes=MAX_EPISODES)
        state = grpo.init(KEYS[row], hyperparams)
        for iteration in range(int(result.states.iteration[row])):
            state, metrics = step(state)
            assert result.metrics["environment/steps"][iteration, row] == metrics["environment/steps"]
        close(jax.tree.map(lambda leaf, row=row: leaf[row], result.states.params), state.params, 1e-6)


def test_a_stopped_row_stays_bitwise_whatever_the_others_do(grpo, driven):
    """Nor do its bits depend on how many iterations are reported at once: two, and here one."""
    hyperparams = grpo.hyperparams.replace(total_steps=float(BUDGETS[0]), max_episodes=MAX_EPISODES)
    alone = run(grpo.config, hyperparams, KEYS, chunk_length=8)
    assert alone.metrics["environment/steps"].shape[0] < driven[0].metrics["environment/steps"].shape[0]
    first = [jax.tree.map(lambda leaf: leaf[0], result.states) for result in (driven[0], alone)]
    assert bits(first[0]) == bits(first[1])


def test_a_config_of_a_changed_environment_object_is_traced_again():
    environment = Probe()
    configs = [Config(environment, num_envs=4, num_minibatches=1, network=MLP((4,))) for _ in range(2)]
    assert configs[0] == configs[1]
    assert make_train_step(configs[0]) is make_train_step(configs[0])
    assert make_train_step(configs[0]) is not make_train_step(configs[1])  # the object may have changed in between

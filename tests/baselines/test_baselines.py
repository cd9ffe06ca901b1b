"""Baselines against plain loops in float64: who tells what about whom, and that nobody tells about itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import FOREVER, Probe, Recall, acted, check, difference, known_params, known_policy, random_window, standing

from grpo_jax import PPO, Config, make_init, make_train_step, objectives
from grpo_jax.algorithms import KERNEL_GAE, SAME_STEP_CRITIC, SAME_STEP_GAE
from grpo_jax.baselines import KernelHyperparams, Window, kernel_values
from grpo_jax.environments import make_environment
from grpo_jax.errors import ConfigError
from grpo_jax.groups import FRESH
from grpo_jax.objectives import bootstrapped_returns, same_step_leave_one_out
from grpo_jax.policies import MLP
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.updates.batch import make_batch

T, N, F, E = 6, 5, 3, 4  # steps, rollouts, final states of each, elements of a state
DISCOUNT = 0.9
RELATIVE = {"relative": True}


window = functools.partial(random_window, T, N, F, E)


def oracle_return(data, t, n, final):
    """Of rollout n from step t on; `final(f)` is what its final state f is worth."""
    total, factor = 0.0, 1.0
    for s in range(t, T):
        total += factor * float(data["rewards"][s, n])
        factor *= DISCOUNT
        if data["terminated"][s, n]:
            return total
        if data["truncated"][s, n]:
            return total + factor * final(int(data["truncated"][:s, n].sum()))
    return total + factor * final(F - 1)


def oracle_kernel(data, bandwidth):
    x, final_x = (np.asarray(data[name], np.float64) for name in ("features", "final_features"))

    def mean(state, steps, itself, depth):
        others = [(s, j) for s in steps for j in range(N) if j != itself and data["mask"][s, j]]
        if not others:
            return 0.0
        distances = np.array([np.sum((state - x[s, j]) ** 2) for s, j in others])
        near = np.exp(-(distances - distances.min()) / max(bandwidth, 1e-30))
        worth = [oracle_return(data, s, j, lambda f, j=j: final(f, j, depth)) for s, j in others]
        return float(near @ np.array(worth) / near.sum())

    @functools.cache
    def final(f, j, depth):
        return mean(final_x[f, j], range(T // 2), j, depth - 1) if depth else 0.0

    values = [[mean(x[t, i], [t], i, 2) for i in range(N)] for t in range(T)]
    return np.array(values), np.array([[final(f, j, 2) for j in range(N)] for f in range(F)])


@functools.partial(jax.jit, static_argnames="relative")
def kernel(data, bandwidth, **options):
    return kernel_values(Window(**data), discount=DISCOUNT, bandwidth=bandwidth, **options)


same_step = jax.jit(same_step_leave_one_out, static_argnums=2)
returns_to_go = jax.jit(functools.partial(bootstrapped_returns, discount=DISCOUNT))


def assert_values(actual, expected, mask):
    np.testing.assert_allclose(np.where(mask, actual[0], 0), np.where(mask, expected[0], 0), atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(actual[1], expected[1], atol=2e-5, rtol=2e-5)


# --- kernel ----------------------------------------------------------------------------------------------------------


def test_kernel_values_are_those_of_loops():
    data = window()
    for bandwidth in (0.0, 1e-2, 1.5, 1e6, np.inf):
        assert_values(kernel(data, bandwidth), oracle_kernel(data, bandwidth), data["mask"])
    states = {name: (data[name] > 0).astype(np.uint8) * 255 for name in ("features", "final_features")}
    images = {name: x.reshape(*x.shape[:2], 2, 2) for name, x in states.items()}
    assert_values(kernel(data | images, 1e5), oracle_kernel(data | states, 1e5), data["mask"])
    data["features"][..., 1] = data["final_features"][..., 1] = 1e4  # never varies
    mean_distance = 2.0 * np.asarray(data["features"], np.float64)[data["mask"]].var(0).sum()  # of two states
    assert_values(kernel(data, 0.2, relative=True), oracle_kernel(data, 0.2 * mean_distance), data["mask"])


def test_no_rollout_has_a_part_in_its_own_values():
    data = window() | {"truncated": np.zeros((T, N), bool), "terminated": np.zeros((T, N), bool)}
    data["terminated"][-1] = True  # no return is bootstrapped, by what others may have learnt from it
    values, final_values = kernel(data, 1.5)
    rewarded = data | {"rewards": data["rewards"].copy()}
    rewarded["rewards"][:, 4] += 3.0
    elsewhere = data | {name: data[name].copy() for name in ("features", "final_features")}
    elsewhere["features"][3:, 4] += 2.0
    elsewhere["final_features"][:, 4] += 2.0
    for changed, number in ((rewarded, T), (elsewhere, 3)):
        new, new_final = kernel(changed, 1.5)
        np.testing.assert_allclose(new[:number, 4], values[:number, 4], atol=1e-6)
        assert np.abs(new - values)[:, :4].max() > 1e-2
        if changed is rewarded:
            np.testing.assert_allclose(new_final[:, 4], final_values[:, 4], atol=1e-6)


def test_what_is_not_finite_stays_where_it_is():
    data = window() | {"truncated": np.zeros((T, N), bool)}
    data["terminated"][-1] = True
    clean = data | {"rewards": data["rewards"].copy()}
    data["rewards"][4, 3], clean["rewards"][4, 3] = np.nan, 1.0
    values, final_values = kernel(data, 1.5)
    assert np.isfinite(values).all() and np.isfinite(final_values).all()
    np.testing.assert_allclose(values[:, 3], kernel(clean, 1.5)[0][:, 3], atol=1e-6)
    values = same_step(np.float32([[1.0, np.nan, 3.0, 5.0]]), np.ones((1, 4), bool), 4)
    np.testing.assert_array_equal(values, [[4.0, 3.0, 3.0, 2.0]])


@pytest.mark.parametrize("broken, options", [(np.inf, {}), (np.nan, RELATIVE), (1e30, RELATIVE)])
def test_a_state_that_is_not_finite_says_nothing_of_others(broken, options):
    data = window() | {name: window()[name].copy() for name in ("features", "final_features")}
    without, same_final = data | {name: data[name].copy() for name in ("mask", "features")}, np.ones((F, N), bool)
    for t, n in ((0, 0), (2, 3), (5, 1)):
        without["mask"][t, n], without["features"][t, n], data["features"][t, n, 1] = False, 0.0, broken
    data["final_features"][1, 2, 0], same_final[1, 2] = broken, False
    (values, final_values), (others, final_others) = kernel(data, 1.5, **options), kernel(without, 1.5, **options)
    assert np.isfinite(values).all() and np.isfinite(final_values).all()
    assert values[0, 0] == values[2, 3] == values[5, 1] == final_values[1, 2] == 0
    compared = data["mask"] & without["mask"]
    np.testing.assert_allclose(values[compared], others[compared], atol=1e-6)
    np.testing.assert_allclose(final_values[same_final], final_others[same_final], atol=1e-6)


# --- returns ---------------------------------------------------------------------------------------------------------


def test_returns_are_continued_where_they_were_cut():
    data, final_values = window(), np.random.default_rng(5).normal(size=(F, N)).astype(np.float32)
    expected = [[oracle_return(data, t, n, lambda f, n=n: final_values[f, n]) for n in range(N)] for t in range(T)]
    arguments = (data["rewards"], final_values, data["terminated"], data["truncated"])
    np.testing.assert_allclose(returns_to_go(*arguments), expected, rtol=1e-5, atol=1e-6)
    # Where nothing follows an episode, one final value is for all the ends that it may have had.
    single = returns_to_go(arguments[0], final_values[:1], *arguments[2:])
    expected = [[oracle_return(data, t, n, lambda f, n=n: final_values[0, n]) for n in range(N)] for t in range(T)]
    np.testing.assert_allclose(single, expected, rtol=1e-5, atol=1e-6)


# --- in a rollout and in a batch -------------------------------------------------------------------------------------

HYPERPARAMS = KernelHyperparams(discount=0.5, gae_lambda=0.7, kernel_bandwidth=2.0)
probe = make_environment(Probe(), {"bonus": 0.5})  # truncated at the age of 3


@pytest.fixture(scope="module")
def rollout():
    state = standing(probe, known_policy, jax.random.key(0), ages=[0, 1, 2, 0], lifetimes=[FOREVER] * 3 + [2])
    simulator = Simulator(probe, known_policy, known_params((0.0, 0.0)), keep_final=True)
    play = jax.jit(functools.partial(simulator.unroll, num_steps=7, auto_reset=True))
    return jax.tree.map(np.asarray, play(state, jax.random.key(1)))


def test_final_observations_are_of_truncations_and_the_end(rollout):
    end, trajectory = rollout
    assert trajectory.final_observation.shape == (4, 4, 2) and trajectory.final_value.shape == (4, 4)
    number = trajectory.truncated.sum(0)
    assert number.tolist() == [2, 2, 3, 1]
    for b in range(4):
        steps = np.flatnonzero(trajectory.truncated[:, b])
        assert (trajectory.final_observation[: len(steps), b, 0] == 3).all()
        assert (trajectory.final_observation[: len(steps), b, 1] == trajectory.observation[steps, b, 1]).all()
    assert np.array_equal(trajectory.final_observation[-1], end.observation)
    np.testing.assert_array_equal(trajectory.final_value, 10 + 2 * trajectory.final_observation[..., 0])


def batch_of(algorithm, trajectory, hyperparams=HYPERPARAMS, *, environment=None, policy=known_policy, params=None):
    """The batch of a rollout of four members of one group."""
    sizes = {"num_envs": 4, "group_size": 4, "num_steps": 8, "num_minibatches": 1}
    config = Config(environment=environment or Recall(), algorithm=algorithm, **sizes)
    return make_batch(config, policy, acted(params), trajectory, hyperparams)


@functools.partial(jax.jit, static_argnums=1)
def batches(trajectory, algorithm):
    """What the baseline says, and the batch with GAE at lambda 0, at lambda 1, and with plain returns-to-go."""
    algorithm = algorithm._replace(advantage=objectives.gae_advantage, whole_sequences=True)
    plain = algorithm._replace(advantage=objectives.return_minus_value_advantage)
    return (
        algorithm.baseline(trajectory, known_policy, None, HYPERPARAMS, 4),
        *(batch_of(algorithm, trajectory, HYPERPARAMS.replace(gae_lambda=x)) for x in (0.0, 1.0)),
        batch_of(plain, trajectory),
    )


@pytest.mark.parametrize("algorithm", [KERNEL_GAE, SAME_STEP_GAE], ids=["kernel", "same step"])
def test_a_baseline_composes_with_gae_and_with_return_to_go(rollout, algorithm):
    trajectory = rollout[1]._replace(value=None, next_value=None, final_value=None)
    (value, final_value), one_step, whole, plain = batches(trajectory, algorithm)
    following = np.concatenate([value[1:], final_value[-1:]])
    for b in range(4):
        steps = np.flatnonzero(trajectory.truncated[:, b])
        following[steps, b] = final_value[: len(steps), b]
    expected = trajectory.reward + 0.5 * np.where(trajectory.terminated, 0, following) - value
    np.testing.assert_allclose(one_step.advantage, expected, atol=1e-5)
    np.testing.assert_allclose(one_step.value, value, atol=1e-5)
    np.testing.assert_allclose(one_step.target, expected + value, atol=1e-5)
    returns = returns_of(trajectory, final_value)
    np.testing.assert_allclose(whole.advantage, returns - value, atol=1e-5)
    np.testing.assert_allclose(plain.advantage, returns - value, atol=1e-5)


def returns_of(trajectory, final_value):
    """At discount 1/2, in a loop."""
    returns, after = np.zeros((7, 4)), np.asarray(final_value[-1])
    number = np.asarray(trajectory.truncated).sum(0)
    for t in reversed(range(7)):
        number = number - trajectory.truncated[t]
        after = np.where(trajectory.truncated[t], np.asarray(final_value)[number, range(4)], after)
        after = returns[t] = trajectory.reward[t] + 0.5 * np.where(trajectory.terminated[t], 0, after)
    return returns


def test_a_critic_beside_a_baseline_values_what_ends_a_window(rollout):
    trajectory = rollout[1]
    _, _, batch, _ = batches(trajectory, SAME_STEP_CRITIC)
    returns = returns_of(trajectory, trajectory.final_value)
    expected = returns - (returns.sum(1, keepdims=True) - returns) / 3
    np.testing.assert_allclose(batch.advantage, expected, atol=1e-5)
    np.testing.assert_allclose(batch.target, returns, atol=1e-5)
    assert np.array_equal(batch.value, trajectory.value), "the critic's own predictions"


@pytest.mark.parametrize("algorithm", [PPO, SAME_STEP_CRITIC], ids=["critic", "critic and baseline"])
def test_targets_of_a_critic_have_a_trace_of_their_own(rollout, algorithm):
    trajectory = rollout[1]._replace(valid=rollout[1].ended.cumsum(0) - rollout[1].ended < 2)  # two episodes each
    traces = np.array([0.0, 0.3, 0.7, 1.0], np.float32)
    own = HYPERPARAMS.replace(critic_lambda=traces)

    @jax.jit
    def batches(trajectory, own):
        batch = functools.partial(batch_of, algorithm._replace(whole_sequences=True), trajectory)
        axes = jax.tree.map(lambda _: None, HYPERPARAMS).replace(critic_lambda=0)
        return batch(HYPERPARAMS), jax.vmap(batch, in_axes=(axes,))(own)  # all traces in one program

    plain, traced = batches(trajectory, own)
    assert np.array_equal(traced.advantage, np.broadcast_to(plain.advantage, (4, 7, 4)))
    np.testing.assert_allclose(traced.target[2], plain.target, rtol=1e-5)
    for trace, actual in zip(traces, traced.target, strict=True):
        after, expected = trajectory.next_value[-1].astype(float), np.zeros((7, 4))
        for t in reversed(range(7)):
            value = trajectory.next_value[t]
            after = np.where(trajectory.truncated[t] | (t == 6), value, (1 - trace) * value + trace * after)
            after = expected[t] = trajectory.reward[t] + 0.5 * np.where(trajectory.terminated[t], 0, after)
        np.testing.assert_allclose(actual[plain.mask], expected[plain.mask], rtol=1e-5)


def test_nothing_follows_a_limit_that_terminates(rollout):
    trajectory = rollout[1]._replace(terminated=np.zeros_like(rollout[1].ended), truncated=rollout[1].ended)

    @functools.partial(jax.jit, static_argnums=0)
    def batch(limit_terminates, trajectory):
        environment = make_environment(Recall())._replace(limit_terminates=limit_terminates)
        return batch_of(PPO._replace(start=FRESH), trajectory, environment=environment)

    terminated = trajectory._replace(terminated=trajectory.truncated, truncated=trajectory.terminated)
    actual, expected, other = batch(True, trajectory), batch(False, terminated), batch(False, trajectory)
    assert np.array_equal(actual.advantage, expected.advantage)
    assert not np.array_equal(actual.advantage, other.advantage)


# --- train steps, refusals -------------------------------------------------------------------------------------------

SIZES = {"num_envs": 8, "num_steps": 6, "num_epochs": 1, "num_minibatches": 1}


def test_no_gradient_flows_into_values(rollout):
    def of_params(trajectory, policy, params, hyperparams, group_size):
        return tuple(x[..., 0] * jnp.sum(params.bias) for x in (trajectory.observation, trajectory.final_observation))

    trajectory = rollout[1]._replace(value=None, next_value=None, final_value=None)

    def total(params):
        algorithm = KERNEL_GAE._replace(baseline=of_params)
        batch = batch_of(algorithm, jax.tree.map(jnp.asarray, trajectory), params=params)
        return jnp.sum(batch.advantage + batch.value + batch.target)

    gradient = jax.jit(jax.grad(total))(known_params((0.0, 0.0)))
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [KERNEL_GAE, SAME_STEP_CRITIC], ids=["kernel", "critic"])
def test_train_steps_with_memory_and_normalised_observations(algorithm):
    network = {"network": MLP((4,), recurrent="gru", recurrent_size=3), "normalize_observations": True}
    config = Config(environment=Recall(), algorithm=algorithm, group_size=4, **SIZES, **network)
    start = state = jax.jit(make_init(config))(jax.random.key(0), KernelHyperparams())
    step = jax.jit(make_train_step(config))
    for _ in range(2):
        state, metrics = step(state)
    assert metrics["optim/skipped_updates"] == 0 and difference(state.params, start.params)
    assert ("loss/value" in metrics) == (algorithm.critic is not None) and "value/explained_variance" in metrics


def test_what_cannot_be_compared_is_refused():
    for fields, message in (
        ({"algorithm": SAME_STEP_GAE, "group_size": 1}, "group_size is 1"),
        ({"algorithm": KERNEL_GAE, "num_envs": 1}, "num_envs=2"),
        ({"algorithm": KERNEL_GAE._replace(baseline=None)}, "or of a baseline"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(Config(**SIZES | {"environment": Recall()} | fields))
    check(Config(algorithm=KERNEL_GAE, group_size=1, environment=Recall(), **SIZES))

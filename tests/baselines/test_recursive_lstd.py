"""Least-squares values by earlier rollouts: against float64 loops over several rollouts, and in a train step."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Recall, check, random_window

from grpo_jax import Config, Hyperparams, make_init, make_train_step
from grpo_jax.algorithms import RECURSIVE_LSTD_GAE
from grpo_jax.baselines import (
    Baseline,
    Window,
    boosted,
    channel_correlations,
    lstd_baseline,
    observed,
    random_features,
    recursive_lstd_baseline,
    recursive_lstd_values,
    relative_positions,
    scaling_of,
    stateless,
)
from grpo_jax.baselines.lstd import LARGEST_DISCOUNT
from grpo_jax.baselines.recursive_lstd import FEW_FEATURES
from grpo_jax.errors import ConfigError
from grpo_jax.groups import ANCHORED
from grpo_jax.policies import MLP
from grpo_jax.rollouts.collect import collect
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.training.train_step import initial_state
from grpo_jax.types import Trajectory
from grpo_jax.updates.batch import make_batch

T, N, F, E = 9, 6, 3, 4
DISCOUNT, TRACE, RIDGE, DECAY = 0.9, 0.7, 1e-2, 0.6
solve = jax.jit(
    functools.partial(recursive_lstd_values, discount=DISCOUNT, trace=TRACE, ridge=RIDGE, decay=DECAY),
    static_argnames="fit_every",
)


def window(seed):
    """A random window, and the first steps of its episodes; about half of the rollouts begin with one."""
    data = random_window(T, N, F, E, seed)
    ended = data["terminated"] | data["truncated"]
    begins = np.random.default_rng(seed).random((1, N)) < 0.5
    return data | {"is_first": np.concatenate([begins, ended[:-1] & data["mask"][1:]])}


def fold(windows, **options):
    """The values of the last window, and the sums after it."""
    sums, values, final_values = None, None, None
    for data in windows:
        values, final_values, sums = solve(sums, Window(**data), **options)
    return jax.device_get((values, final_values, sums))


def with_one(x):
    return np.concatenate([np.asarray(x, np.float64), np.ones((*x.shape[:2], 1))], axis=-1)


def added(data):
    """What a window adds to A, b and C, in loops over steps."""
    x, final_x = with_one(data["features"]), with_one(data["final_features"])
    matrix, vector, square = np.zeros((E + 1, E + 1)), np.zeros(E + 1), np.zeros(E + 1)
    for n in range(N):
        z = np.zeros(E + 1)
        for t in np.flatnonzero(data["mask"][:, n]):
            z = x[t, n] + DISCOUNT * TRACE * z * (not data["is_first"][t, n])
            if data["truncated"][t, n]:
                after = final_x[data["truncated"][:t, n].sum(), n]
            else:
                after = x[t + 1, n] if t + 1 < T else final_x[-1, n]
            matrix += np.outer(z, x[t, n] - DISCOUNT * after * (not data["terminated"][t, n]))
            vector += z * data["rewards"][t, n]
            square += x[t, n] ** 2
    return matrix, vector, square


def test_values_are_those_of_a_loop_over_earlier_rollouts():
    windows = [window(seed) for seed in range(3)]
    first, second = (added(data) for data in windows[:2])
    matrix, vector, square = (DECAY * old + new for old, new in zip(first, second, strict=True))
    penalty = RIDGE * np.diag(square * np.array([1.0] * E + [1e-6]))
    weights = np.linalg.solve(matrix + penalty, vector)
    values, final_values, sums = fold(windows)
    np.testing.assert_allclose(values, with_one(windows[2]["features"]) @ weights, atol=5e-5)
    np.testing.assert_allclose(final_values, with_one(windows[2]["final_features"]) @ weights, atol=5e-5)
    np.testing.assert_allclose(sums.matrix, DECAY * matrix + added(windows[2])[0], atol=1e-4)
    assert np.isclose(sums.number, sum(DECAY**k * windows[2 - k]["mask"].sum() for k in range(3)))


def test_a_chain_is_exact_from_the_second_rollout_on():
    """Five states in a row, each with a reward; the last one ends the episode."""
    rewards = np.array([1.0, 0.0, 2.0, -1.0, 3.0])
    known = np.zeros(5)
    for s in reversed(range(5)):
        known[s] = rewards[s] + DISCOUNT * (known[s + 1] if s < 4 else 0)
    state = (np.arange(14)[:, None] + np.arange(N)) % 5
    never, one_hot = np.zeros_like(state, bool), np.eye(5, dtype=np.float32)
    data = {"features": one_hot[state], "final_features": one_hot[(14 + np.arange(N)[None]) % 5]}
    data |= {"rewards": rewards[state], "terminated": state == 4, "truncated": never}
    window = Window(**data | {"is_first": state == 0, "mask": ~never})
    values, _, sums = solve(None, window, ridge=1e-6)
    assert (np.asarray(values) == 0).all(), "nothing was known"
    for _ in range(2):
        values, final_values, sums = solve(sums, window, ridge=1e-6)
        np.testing.assert_allclose(values, known[state], atol=1e-5)
        np.testing.assert_allclose(final_values[0], known[(14 + np.arange(N)) % 5], atol=1e-5)


def test_rewards_are_in_the_values_of_the_next_rollout():
    earlier, data, later = (window(seed) for seed in range(3))
    changed = data | {"rewards": data["rewards"] + 10 * data["mask"]}
    assert np.array_equal(fold([earlier, data])[0], fold([earlier, changed])[0])
    assert np.abs(fold([earlier, data, later])[0] - fold([earlier, changed, later])[0]).min() > 0.1


def test_values_have_the_units_of_rewards_alone():
    windows = [window(seed) for seed in range(2)]
    factor = np.array([1e-6, 1.0, 1e3, 1e6], np.float32)
    names = "features", "final_features"
    scaled = [data | {name: data[name] * factor for name in names} for data in windows]
    louder = [data | {"rewards": 1e6 * data["rewards"]} for data in windows]
    plain = fold(windows)[0]
    np.testing.assert_allclose(fold(scaled)[0], plain, atol=1e-4)
    np.testing.assert_allclose(fold(louder)[0], 1e6 * plain, rtol=1e-3, atol=10)


def test_discount_and_eligibility_have_the_same_upper_limit():
    for actual, expected in zip(
        *(jax.tree.leaves(solve(None, Window(**window(0)), discount=each)) for each in (1.0, LARGEST_DISCOUNT)),
        strict=True,
    ):
        assert np.array_equal(actual, expected)


def test_zero_features_and_nonfinite_numbers_change_nothing():
    windows = [window(seed) for seed in range(2)]
    plain = fold(windows)[0]
    wide = [
        data | {k: np.concatenate([data[k], 0 * data[k]], axis=-1) for k in ("features", "final_features")}
        for data in windows
    ]
    np.testing.assert_allclose(fold(wide)[0], plain, atol=1e-5)
    windows[0]["features"][3, 5, 1], windows[0]["rewards"][6, 3] = np.nan, np.inf
    windows[1]["features"][0, 0, 0] = np.inf
    values, final_values, sums = fold(windows)
    assert np.isfinite(values).all() and np.isfinite(final_values).all() and values[0, 0] == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(sums))


def test_a_rollout_whose_sums_overflow_is_left_out():
    windows = [window(seed) for seed in range(3)]
    plain = fold([windows[0], windows[2]])
    windows[1]["rewards"] = np.full((T, N), 3e38, np.float32)
    for actual, expected in zip(fold(windows)[:2], plain[:2], strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_a_rollout_that_makes_old_sums_overflow_is_left_out():
    data = window(0)
    sums = solve(None, Window(**data))[2]._replace(vector=np.full(E + 1, 3e38, np.float32))
    data["rewards"] = np.full((T, N), 4e36, np.float32) * np.sign(data["features"][..., 0])
    assert all(np.isfinite(leaf).all() for leaf in solve(sums, Window(**data), decay=1.0)[2])


def config(**fields):
    sizes = dict(num_envs=6, num_steps=6, num_epochs=1, num_minibatches=1, network=MLP((4,)))
    return Config(environment=Recall(), **{"algorithm": RECURSIVE_LSTD_GAE} | sizes | fields)


def test_a_train_step_keeps_the_sums_of_its_rollouts():
    """As a scan over rows of different decays; a decay of 0 keeps the steps of the last rollout alone."""
    train_step = make_train_step(config())

    def run(key, decay):
        begun = make_init(config())(key, Hyperparams(value_decay=decay))
        return begun.baseline, *jax.lax.scan(lambda state, _: train_step(state), begun, length=3)

    keys = jax.random.split(jax.random.key(0), 2)
    begun, state, metrics = jax.jit(jax.vmap(run))(keys, jnp.array([0.0, 0.5]))
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(begun))
    np.testing.assert_allclose(state.baseline.sums.number, [36, 36 * 1.75])
    assert (metrics["optim/skipped_updates"] == 0).all()
    assert (metrics["value/explained_variance"][:, 0] == 0).all(), "values are 0 in the first rollout"


def on_a_line(seed, scale=1.0):
    """A rollout of 40 steps of 50 environments, each step an episode that is paid |position|."""
    position = np.random.default_rng(seed).uniform(-1, 1, (40, 50)).astype(np.float32)
    always = np.ones_like(position, bool)
    parts = {
        "observation": scale * position[..., None],
        "final_observation": np.zeros((1, 50, 1), np.float32),
        "reward": np.abs(position),
        "terminated": always,
        "truncated": ~always,
        "valid": always,
        "episode_length": np.ones_like(position),
    }
    return Trajectory(**dict.fromkeys(Trajectory._fields) | parts)


def values_on_a_line(rollouts, **options):
    """The values of the last rollout, and the state after it."""
    baseline = recursive_lstd_baseline(**options)
    apply = jax.jit(lambda rollout, state: baseline.apply(rollout, state, None, None, Hyperparams(), 1))
    state = baseline.init(rollouts[0], None, None)
    for rollout in rollouts:
        values, _, state = apply(rollout, state)
    return jax.device_get((values, state))


def test_random_features_express_nonlinear_values():
    rollouts = [on_a_line(seed) for seed in range(2)]
    errors = [
        np.abs(values_on_a_line(rollouts, num_random_features=number)[0] - rollouts[1].reward).max()
        for number in (0, None)
    ]
    assert errors[0] > 0.45 and errors[1] < 0.05


def test_random_features_ignore_the_units_of_observations():
    plain, scaled = ([on_a_line(seed, scale) for seed in range(2)] for scale in (1.0, 1000.0))
    np.testing.assert_allclose(values_on_a_line(plain)[0], values_on_a_line(scaled)[0], atol=1e-2)


def test_random_features_keep_the_scaling_of_the_first_rollout():
    first = on_a_line(0)
    wide = first._replace(observation=10 * first.observation)
    position = np.asarray(first.observation, np.float64).reshape(-1)
    for rollouts in ([first], [first, wide]):
        _, state = values_on_a_line(rollouts)
        np.testing.assert_allclose(state.scaling.mean, [position.mean()], atol=1e-6)
        np.testing.assert_allclose(state.scaling.deviation, [position.std()], rtol=1e-5)


@pytest.mark.parametrize("value", [0.1, 123.456, 1e18])
def test_the_deviation_of_an_element_that_does_not_vary_is_1(value):
    scaling = jax.jit(scaling_of)(jnp.full((37, 61, 1), value), jnp.ones((37, 61), bool))
    np.testing.assert_allclose(scaling.mean, [value], rtol=1e-5)
    assert scaling.deviation == 1, "not what is left of rounding"


def test_the_deviation_of_huge_elements_is_finite():
    observation = np.float32(1.8e19) * np.tile(np.float32([-1, 1]), 200)[:, None]
    np.testing.assert_allclose(jax.jit(scaling_of)(observation, np.ones(400, bool)).deviation, [1.8e19], rtol=1e-5)


def test_a_negative_number_of_random_features_is_refused():
    with pytest.raises(ValueError, match="num_random_features=-3 .* use 0"):
        recursive_lstd_baseline(num_random_features=-3)


def test_random_features_of_constants_and_nonfinite_numbers():
    observation = np.float32([[[1.0, 2.0], [1.0, 4.0]], [[1.0, np.nan], [1.0, 6.0]]])
    features = jax.jit(random_features, static_argnums=2)
    scaling = jax.jit(scaling_of)(observation, np.array([[True, True], [True, False]]))
    np.testing.assert_allclose(scaling, [[1, 3], [1, 1]])
    x = np.asarray(features(observation, scaling, 5))
    assert x.shape == (2, 2, 5) and np.isnan(x[1, 0]).all() and np.isfinite(x[1, 1]).all() and (x[0] >= 0).all()
    far = np.asarray(features(np.float32([[1e30, 0.0], [1e35, 0.0]]), scaling, 5))
    assert np.isfinite(far).all() and np.array_equal(far[0], far[1])


def test_only_every_so_many_environments_are_in_the_sums():
    """The values of all states are those by the sums over a half of the environments."""
    windows = [window(seed) for seed in range(2)]
    halves = [{name: values[:, ::2] for name, values in data.items()} for data in windows]
    values, final_values, sums = fold(windows, fit_every=2)
    half_values, half_final_values, half_sums = fold(halves)
    for actual, expected in zip(sums, half_sums, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    np.testing.assert_allclose(values[:, ::2], half_values, atol=1e-5)
    np.testing.assert_allclose(final_values[:, ::2], half_final_values, atol=1e-5)
    assert (np.abs(values[:, 1::2]).max(axis=0) > 0).all()
    with pytest.raises(ValueError, match="fit_every=0 .* use 1"):
        fold(windows, fit_every=0)


@pytest.mark.parametrize(
    ("shape", "reach"),
    [
        pytest.param((2, 3, 5, 4, 3), 2, id="odd and even periods"),
        pytest.param((5, 4, 2), 1, id="one image"),
        pytest.param((13, 5, 4, 3, 2), 0, id="more images than a part has"),
        pytest.param((70, 1, 2, 2), 3, id="beyond the image"),
    ],
)
def test_channel_correlations_count_pairs_at_each_offset(shape, reach):
    images = np.random.default_rng(0).random(shape) < 0.3
    actual = np.asarray(jax.jit(channel_correlations, static_argnums=1)(images, reach))
    height, width, channels = shape[-3:]
    around = np.pad(images, [(0, 0)] * (len(shape) - 3) + [(reach, reach)] * 2 + [(0, 0)]).astype(int)
    expected = [
        np.sum(images[..., i] * around[..., y : y + height, x : x + width, j], axis=(-2, -1))
        for i, j in itertools.combinations(range(channels), 2)
        for y, x in np.ndindex(2 * reach + 1, 2 * reach + 1)
    ]
    np.testing.assert_allclose(actual, np.stack(expected, axis=-1), atol=1e-5)


def test_a_nonfinite_channel_spoils_no_other_pair_or_image():
    images = np.random.default_rng(0).random((70, 3, 2, 3), np.float32)
    correlate = jax.jit(channel_correlations, static_argnums=1)
    expected = np.array(correlate(images, 1)).reshape(70, 3, 9)
    images[5, 1, 0, 0], images[66, 2, 1, 0] = np.nan, np.inf
    expected[[5, 66], :2] = np.nan  # the pairs (0, 1) and (0, 2)
    np.testing.assert_allclose(np.reshape(correlate(images, 1), (70, 3, 9)), expected, rtol=1e-6)


def test_channel_correlations_keep_double_precision():
    images = np.random.default_rng(0).random((3, 2, 2, 2))
    with jax.enable_x64(True):
        actual = np.asarray(jax.jit(channel_correlations, static_argnums=1)(images, 1))
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual[:, 4], np.prod(images, axis=-1).sum((1, 2)), rtol=1e-14)


def test_relative_positions_show_where_two_things_lie():
    """An episode of one step is paid if one thing is right above the other: no sum of pixels tells."""

    def rollout(seed):
        rng = np.random.default_rng(seed)
        places = rng.integers(0, 4, (40, 50, 2, 2))
        image = np.zeros((40, 50, 4, 4, 2), bool)
        for index in np.ndindex(40, 50, 2):
            image[*index[:2], *places[index], index[2]] = True
        paid = (places[:, :, 1] - places[:, :, 0] == [1, 0]).all(-1)
        final = np.zeros((1, 50, 4, 4, 2), bool)
        return on_a_line(seed)._replace(observation=image, final_observation=final, reward=paid.astype(np.float32))

    rollouts = [rollout(seed) for seed in range(2)]
    paid = np.asarray(rollouts[1].reward)
    errors = [
        np.mean((values_on_a_line(rollouts, features=features, num_random_features=0)[0] - paid) ** 2) / paid.var()
        for features in (observed, relative_positions)
    ]
    assert errors[0] > 0.9 and errors[1] < 0.05


def test_channels_are_needed_for_relative_positions():
    with pytest.raises(ValueError, match=r"channels of images.*\(2, 3, 4, 1\); use `observed`"):
        channel_correlations(jnp.zeros((2, 3, 4, 1)), 1)
    baseline = recursive_lstd_baseline(features=relative_positions)
    with pytest.raises(ConfigError, match=r"images, \[height, width, channels\], but their shape is \(2,\)"):
        check(config(algorithm=RECURSIVE_LSTD_GAE._replace(baseline=baseline)))


def test_many_numbers_have_no_random_features_unless_asked():
    state = jax.eval_shape(make_init(config(frame_stack=FEW_FEATURES)), jax.random.key(0), Hyperparams()).baseline
    assert state.scaling is None and state.sums.vector.shape == (2 * FEW_FEATURES + 1,)


def test_observations_of_too_many_numbers_are_refused():
    with pytest.raises(ConfigError, match="4900 features.*at most 4096.*lstd_baseline"):
        check(config(frame_stack=2450))


def counting(before, after):
    """A baseline of zeros with this state before the first rollout, and this one after each."""

    def apply(trajectory, state, *_):
        return jnp.zeros_like(trajectory.reward), jnp.zeros(trajectory.final_observation.shape[:2]), after

    return Baseline(lambda *_: jax.tree.map(jnp.asarray, before), apply)


REFUSED = {
    "two": (Baseline(lambda *_: jnp.zeros(()), lambda *_: (0, 0)), "values and the next state, but returned 2 results"),
    "dtype": (counting(1, jnp.float32(0.5)), r"state's baseline is int32\[\] before .* but float32\[\] after it; both"),
    "shape": (counting(np.ones(1), jnp.ones(2)), r"float32\[1\] before an iteration, but float32\[2\] after it"),
    "structure": (counting([1], [jnp.int32(1)] * 2), "baseline/1 is missing before an iteration, but int32"),
}


@pytest.mark.parametrize(("baseline", "message"), REFUSED.values(), ids=REFUSED)
def test_a_baseline_whose_state_does_not_fit_is_refused(baseline, message):
    with pytest.raises(ConfigError, match=message):
        check(config(algorithm=RECURSIVE_LSTD_GAE._replace(baseline=baseline)))


def test_decays_beyond_1_are_refused():
    with pytest.raises(ConfigError, match="value_decay=1.5 must be between 0 and 1"):
        Hyperparams(value_decay=1.5).check()


def test_a_second_baseline_sees_one_window_at_a_time():
    """It returns the number of environments that it sees."""

    def number(trajectory, *_):
        seen = jnp.full_like(trajectory.reward, trajectory.reward.shape[1])
        return seen, jnp.full(trajectory.final_observation.shape[:2], 0.0)

    both = boosted(recursive_lstd_baseline(), stateless(number))
    algorithm = RECURSIVE_LSTD_GAE._replace(baseline=both, start=ANCHORED)
    one = config(algorithm=algorithm, group_size=2, regroup_every=3)

    @jax.jit
    def trial(key):
        state = initial_state(one, key, Hyperparams())
        _, trajectory = collect(one, Simulator(one.env, one.policy, state.params), state.rollout, key, key)
        batch, baseline = make_batch(one, one.policy, state, trajectory, Hyperparams())
        return batch.value, baseline

    value, (first, _) = trial(jax.random.key(0))
    assert (value == 6).all(), "not 12, those of both windows"
    assert first.sums.number == 36


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "fields"),
    [
        ({"start": ANCHORED}, {"group_size": 2, "regroup_every": 3}),
        ({}, {"network": MLP((4,), recurrent="gru", recurrent_size=3)}),
    ],
    ids=["windows", "gru"],
)
def test_a_boosted_baseline_keeps_the_sums_of_the_first(slots, fields):
    both = boosted(recursive_lstd_baseline(), lstd_baseline())
    algorithm = RECURSIVE_LSTD_GAE._replace(baseline=both, **slots)
    one = config(algorithm=algorithm, **fields)
    state = jax.jit(make_init(one))(jax.random.key(0), Hyperparams(value_decay=1.0))
    for k in range(3):
        assert state.baseline[0].sums.number == 36 * k
        state, metrics = jax.jit(make_train_step(one))(state)
    assert metrics["optim/skipped_updates"] == 0 and np.isfinite(metrics["value/explained_variance"])

"""The door for environments: what its trial refuses, wrappers, early truncations, objects of any class."""

import dataclasses
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments.classic_control import CartPole
from gymnax.wrappers import purerl
from probes import Probe, ProbeParams, difference
from small import begin, small_config

import grpo_jax
from grpo_jax import Hyperparams, make_init, make_train_step, recorded_run
from grpo_jax.environments import Discrete, make_environment
from grpo_jax.errors import ConfigError
from grpo_jax.policies import MLP
from grpo_jax.rollouts.rollout import Simulator

KEY = jax.random.key(0)


class Plain:
    """Observes its time, and pays 1. Subclasses break one part."""

    default_params = ProbeParams()

    def action_space(self, params):
        return Discrete(2)

    def reset_env(self, key, params):
        return jnp.zeros(1), {"time": jnp.int32(0), "luck": jax.random.uniform(key)}

    def step_env(self, key, state, action, params):
        state = state | {"time": state["time"] + 1}
        return jnp.full(1, state["time"], float), state, self.reward(state), state["time"] >= 9, {}

    def reward(self, state):
        return 1.0

    def is_truncated(self, state, params):
        return state["time"] >= params.max_steps_in_episode


def with_step(change):
    return {"step_env": lambda self, *arguments: change(Plain.step_env(self, *arguments))}


def after(observation, **changes):
    """A step with another observation, or other entries of the state."""
    return with_step(lambda step: (observation, step[1] | changes, *step[2:]))


def starting(start, step):
    """A state with an entry that is `start` after a reset and `step` after a step."""

    def reset_env(self, key, params):
        return jnp.zeros(1), Plain.reset_env(self, key, params)[1] | {"inner": start}

    return {"reset_env": reset_env} | after(jnp.zeros(1), inner=step)


REFUSED = [
    ({"reward": lambda self, state: jnp.ones(1)}, r"the reward of 'Own' is float32\[1\]"),
    ({"reward": lambda self, state: None}, "the reward of 'Own' is None"),
    ({"reward": lambda self, state: 1j}, r"the reward of 'Own' is complex64\[\]"),
    (with_step(lambda step: (*step[:3], jnp.ones(1, bool), {})), r"terminated of 'Own' is bool\[1\]"),
    (with_step(lambda step: step[:4]), "step_env of 'Own' returns 4 values; return the 5"),
    (with_step(lambda step: (*step[:2], step[3], step[2], {})), "returns terminated before the reward; swap"),
    ({"reset_env": lambda *_: jnp.zeros(1)}, "reset_env of 'Own' returns .*Tracer; return the 2 values"),
    (with_step(lambda step: (*step[:4], [1])), "the info of 'Own' is list"),
    ({"reward": lambda self, state: 1.0 if state["time"] else 0.0}, "step_env of 'Own'.*write jnp.where"),
    ({"action_space": lambda *_: Discrete(0)}, "num_actions=0 is not a positive integer"),
    ({"action_space": Discrete(2)}, "action_space of 'Own' is a value; write a method"),
    ({"default_params": lambda self: ProbeParams()}, "default_params of 'Own' must be"),
    ({"action_mask": lambda *_: jnp.ones(3, bool)}, r"action_mask of 'Own' has shape \(3,\)"),
    ({"action_mask": lambda *_: jnp.zeros(2, bool)}, "action_mask of 'Own' has no legal action after a reset"),
    (starting(jnp.zeros(3), jnp.zeros(4)), r"'inner' of type float32\[3\] .* float32\[4\] after a step"),
    (starting({"count": 0}, {"count": 0.5}), r"'inner/count' of type int32\[\] .* float32\[\].*same dtype"),
    (starting({"a": 0}, {"a": 0, "b": 1}), r"'inner/b': missing after a reset, int32\[\] after a step"),
    (starting("text", "text"), "the state of 'Own' fails with TypeError: Value 'text' .*flax.struct.dataclass"),
    (after({"place": jnp.zeros(1)}), "the observation of 'Own' has 'place': missing after a reset, float32"),
]


def test_what_does_not_keep_the_interface_is_refused_by_name_and_part():
    for parts, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            make_environment(type("Own", (Plain,), parts)())


def test_numbers_of_a_wider_kind_keep_the_dtype_of_the_reset():
    cases = (0.0, 3, jnp.float32), (1, True, jnp.int32), (jnp.int32(0), jnp.int8(3), jnp.int32), (0.0, 2.5, jnp.float32)
    for start, step, dtype in cases:
        env = make_environment(type("Own", (Plain,), starting(start, step))())
        state, _ = env.reset(KEY, env.params)
        moved = env.step(KEY, state, 0, env.params).state["inner"]
        assert moved == step and moved.dtype == dtype == state["inner"].dtype and not moved.weak_type


class Times(purerl.GymnaxWrapper):
    """Another reward, at the level of gymnax's wrappers."""

    def __init__(self, env, factor):
        super().__init__(env)
        self.factor = factor

    def step(self, key, state, action, params=None):
        observation, state, reward, *others = self._env.step(key, state, action, params)
        return observation, state, self.factor * reward, *others


class TimesEnv(purerl.GymnaxWrapper):
    """Another reward, at the level of the parts that are called here."""

    def step_env(self, key, state, action, params):
        observation, state, reward, *others = self._env.step_env(key, state, action, params)
        return observation, state, 5 * reward, *others


class HelpedByWrapper(CartPole):
    """Holds a wrapper around itself."""

    def __init__(self):
        self.helper = Times(self, 2.0)


class OverridesStep(CartPole):
    def step(self, key, state, action, params=None):
        return super().step(key, state, action, params)


@dataclasses.dataclass
class Held:
    """A wrapper that is a dataclass, and has the environment under another name."""

    base: Any
    reset = property(lambda self: self.base.reset)

    def __getattr__(self, part):
        if part.startswith("__") or part == "base":
            raise AttributeError(part)
        return getattr(self.base, part)

    def step(self, *arguments):
        observation, state, reward, *others = self.base.step(*arguments)
        return observation, state, reward + 6, *others


def cart_pole():
    return gymnax.make("CartPole-v1")[0]


WRAPPED = [
    (lambda: Times(cart_pole(), 10.0), 10.0, "Times(CartPole-v1)"),
    (lambda: Times(Times(cart_pole(), 2.0), 3.0), 6.0, "Times(Times(CartPole-v1))"),
    (lambda: TimesEnv(cart_pole()), 5.0, "TimesEnv(CartPole-v1)"),
    (lambda: Times(HelpedByWrapper(), 8.0), 8.0, "Times(CartPole-v1)"),
    (lambda: Times(TimesEnv(Plain()), 2.0), 10.0, "Times(TimesEnv(Plain))"),
    (lambda: Held(purerl.LogWrapper(cart_pole())), 7.0, "Held(LogWrapper(CartPole-v1))"),
]


@pytest.mark.parametrize("wrapped, reward, name", WRAPPED)
def test_a_wrapper_does_what_it_says(wrapped, reward, name):
    env = make_environment(wrapped(), {"max_steps_in_episode": 3})
    (state, _), step = jax.jit(env.reset)(KEY, env.params), jax.jit(env.step)
    for t in range(3):
        moved = step(KEY, state, t % 2, env.params)
        state = moved.state
        assert (moved.reward, moved.truncated) == (reward, t == 2), "no reset, and the limit of the environment inside"
    assert env.name == name and not env.truncates_early


def test_wrappers_of_gymnax_change_observations_and_states():
    breakout = gymnax.make("Breakout-MinAtar")[0]
    flat = make_environment(purerl.FlattenObservationWrapper(breakout))
    assert flat.observation == jax.ShapeDtypeStruct((400,), jnp.float32), "only gymnax's own are known to be bits"
    sticky = make_environment(purerl.StickyActionWrapper(breakout, 1.0))
    state, _ = sticky.reset(KEY, sticky.params)
    assert sticky.step(KEY, state, 2, sticky.params).state.last_action == 0, "the first action sticks"


def test_what_would_go_round_a_wrapper_is_refused():
    for environment, message in (
        (TimesEnv(Times(cart_pole(), 2.0)), "would go round Times.CartPole-v1.; define reset and step"),
        (OverridesStep(), "OverridesStep overrides step, which is not called, .*override step_env"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_environment(environment)


class OutOfBounds(Probe):
    """Truncated at its limit, or where a uniform number of the step is small."""

    def is_truncated(self, state, params):
        return super().is_truncated(state, params) | (jnp.sin(1e4 * state.mark * state.time) < -0.3)


GRU = MLP((4,), recurrent="gru", recurrent_size=3)


@pytest.mark.parametrize("network", [MLP((4,)), pytest.param(GRU, marks=pytest.mark.slow)])
def test_an_early_truncation_is_bootstrapped_from_its_true_final_observation(network):
    config = small_config("ppo", OutOfBounds(), num_envs=4, num_steps=24, network=network)
    env, state = config.env, begin(config)
    simulator = Simulator(env, config.policy, state.params)
    play = jax.jit(lambda start: simulator.unroll(start, KEY, num_steps=24, auto_reset=True)[1])
    played = jax.tree.map(np.asarray, play(state.rollout))
    assert played.truncated.sum(axis=0).max() > 24 // env.max_steps, "more often than the limit alone"
    assert np.isfinite(played.next_value).all()
    goes_on = ~played.ended[:-1]
    np.testing.assert_allclose(played.next_value[:-1][goes_on], played.value[1:][goes_on], rtol=1e-5, atol=1e-6)
    if network.recurrent is None:
        t, b = np.argwhere(played.truncated)[0]
        final = played.observation[t, b] + np.array([1.0, 0.0], np.float32)  # the next age, and the same mark
        value = config.policy.step(state.params, final[None], config.policy.initial_carry(state.params, 1))[1]
        np.testing.assert_allclose(played.next_value[t, b], value[0], rtol=1e-5)
    after, metrics = jax.jit(make_train_step(config))(state)
    assert metrics["optim/skipped_updates"] == 0 and difference(after.params, state.params)


def test_a_baseline_without_a_place_for_early_ends_is_refused():
    with pytest.raises(ConfigError, match="may truncate an episode before max_steps_in_episode, but"):
        jax.eval_shape(make_init(small_config("kernel_gae", OutOfBounds(), num_steps=8)), KEY, Hyperparams())


def own(**parts):
    """A Plain environment, of which some parts are others."""
    return type("Own", (Plain,), parts)()


def test_it_is_found_whether_the_steps_alone_decide_a_truncation():
    for is_truncated, early in (
        (lambda self, state, params: state["time"] >= params.max_steps_in_episode, False),
        (lambda self, state, params: 2 * state["time"] >= params.max_steps_in_episode, True),
        (lambda self, state, params: state["time"] >= 3, True),
        (lambda self, state, params: state["luck"] < 0.2, True),
        (lambda self, state, params: jnp.zeros((), bool), False),
    ):
        for on_host in (False, True):
            assert make_environment(own(is_truncated=is_truncated, on_host=on_host)).truncates_early == early


@dataclasses.dataclass
class Unhashable(Plain):
    """Equal by its fields, which are arrays: neither hash nor == work."""

    weights: Any = dataclasses.field(default_factory=lambda: np.arange(3.0))


def test_an_environment_that_is_a_dataclass_with_arrays_trains_records_loads_and_acts(tmp_path):
    config, folder, keys = small_config("grpo", Unhashable(), group_size=4), tmp_path / "run", jax.random.split(KEY, 1)
    recorded_run(config, Hyperparams(total_steps=64), keys, folder, console=False)
    policy = grpo_jax.load(folder, config=small_config("grpo", Unhashable(), group_size=4))
    assert policy.act(np.zeros(1)) in (0, 1)
    assert grpo_jax.evaluate(policy.config, policy.state(KEY), KEY, num_episodes=2).returns.tolist() == [3, 3]

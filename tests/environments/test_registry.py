"""Environments by name, by path and as objects, and the errors for those that cannot be made."""

import jax.numpy as jnp
import pytest
from gymnax.environments import spaces
from probes import Probe, ProbeParams

from grpo_jax.environments import Discrete, make_environment


class WithSpace(Probe):
    def __init__(self, space):
        self.space = space

    def action_space(self, params):
        return self.space


class Dictionary(Probe):
    def reset_env(self, key, params):
        observation, state = super().reset_env(key, params)
        return {"here": observation}, state


class Masked(WithSpace):
    def action_mask(self, state, params):
        return jnp.ones(2, bool)


@pytest.mark.parametrize("path", ["probes:Probe", "test_registry:a_probe", "test_registry:make_probe"])
def test_an_environment_of_ones_own_is_named_by_its_path(path):
    env = make_environment(path, {"lifetime": 2})
    assert (env.name, env.action_space, env.params["lifetime"]) == (path, Discrete(2), 2)


class Counting:
    """Observes an integer of unknown range."""

    default_params = ProbeParams()

    def action_space(self, params):
        return Discrete(2)

    def reset_env(self, key, params):
        return jnp.int32(0), jnp.int32(0)

    def step_env(self, key, state, action, params):
        return state + 1, state + 1, 1.0, False, {}

    def is_truncated(self, state, params):
        return state >= params.max_steps_in_episode


class Faulty(Probe):
    """Its constructor raises an error."""

    def __init__(self):
        raise TypeError("a mistake of its own")


def test_an_error_in_a_constructor_is_not_hidden():
    with pytest.raises(TypeError, match="a mistake of its own"):
        make_environment("test_registry:Faulty")


a_probe = Probe()


def make_probe():
    return Probe()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("CartPole-v2",), "unknown environment 'CartPole-v2': did you mean 'CartPole-v1'"),
        (("cartpole",), "did you mean 'CartPole-v1'"),
        (("breakout-minatar",), "did you mean 'Breakout-MinAtar'"),
        (("???",), "known: .*CartPole-v1"),
        (("CartPole-v1", {"max_steps": 20}), "no parameter 'max_steps': did you mean 'max_steps_in_episode'"),
        (("CartPole-v1", {"Gravity": 20}), "did you mean 'gravity'"),
        (("Acrobot-v1", {"available_torque": (1.0, 2.0)}), "available_torque has shape .3,., but was given"),
        (("CartPole-v1", {"max_steps_in_episode": 0}), "leaves no step"),
        ((3,), "does not have gymnax's interface: it lacks default_params"),
        ((WithSpace(spaces.Dict({"a": spaces.Discrete(2)})),), "use Discrete, Box or a Tuple of Discrete"),
        ((Dictionary(),), "must be one array"),
        ((Masked(spaces.Box(-1.0, 1.0, (2,))),), "action_mask, which only Discrete actions can have"),
        ((Counting(),), "observes an integer of unknown range"),
        ((".relative:Name",), "cannot import '.relative'.*not a module name"),
        (("no_such_module:Name",), "cannot import 'no_such_module'.*No module named"),
        (("probes:Prob",), "'probes' has no 'Prob': did you mean 'Probe'"),
        (("test_registry:WithSpace",), "cannot call 'WithSpace' without arguments.*'space'"),
        (("MNISTBandit-bsuite",), "needs data that could not be downloaded"),
    ],
)
def test_errors_name_the_nearest_correct_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_environment(*arguments)

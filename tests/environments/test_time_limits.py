"""An environment that terminates at its time limit is told so, once; no other environment is."""

import warnings

import gymnax
import pytest
from probes import Echo, Parts, Probe, Questions

from grpo_jax import Config
from grpo_jax.environments import make_environment
from grpo_jax.policies import MLP


class BeforeVersion1(Probe):
    """The template of gymnax before 1.0: a step is done at the time limit too."""

    @property
    def name(self):
        return "BeforeVersion1"

    def is_terminated(self, state, params):
        return super().is_terminated(state, params) | (state.time >= params.max_steps_in_episode)


class PythonLimit(BeforeVersion1):
    """It needs the limit as a Python number."""

    def is_terminated(self, state, params):
        return state.time >= range(params.max_steps_in_episode)[-1] + 1


class Finite(BeforeVersion1):
    """The limit is part of the task."""

    limit_terminates = True


class ExactlyAsLong(Probe):
    """Its episodes are as long as the limit allows, and terminate there."""

    @property
    def default_params(self):
        return super().default_params.replace(lifetime=3)


class Limited(Probe):
    """The limit is used, but not for terminations."""

    def step_env(self, key, state, action, params):
        observation, *rest = super().step_env(key, state, action, params)
        return observation / params.max_steps_in_episode, *rest


@pytest.mark.parametrize("make", [BeforeVersion1, PythonLimit])
def test_termination_at_the_limit_is_told_once(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        config = Config(environment=make(), num_envs=4, num_minibatches=1, group_size=2, network=MLP(()))
        Config(environment=make(), num_envs=8, num_minibatches=1, group_size=2, network=MLP(()))
    assert config.env.max_steps == 3
    (message,) = [str(warning.message) for warning in caught if "time limit" in str(warning.message)]
    assert "'BeforeVersion1' terminates at the time limit" in message
    assert "leave 'time >= params.max_steps_in_episode' out of its terminated" in message
    assert "'limit_terminates = True'" in message


@pytest.mark.parametrize(
    "environment",
    [Probe(), Echo(), Parts(), Questions(), Finite(), ExactlyAsLong(), Limited(), gymnax.make("CartPole-v1")[0]],
    ids=lambda environment: type(environment).__name__,
)
def test_no_other_environment_is_warned_about(environment):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_environment(environment)
        make_environment(environment, {"max_steps_in_episode": 1})

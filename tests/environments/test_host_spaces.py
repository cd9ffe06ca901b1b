"""Spaces of gymnasium, as observations and actions of environments on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.environments import Box, Discrete, HostEnvironment, MultiDiscrete, make_environment

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces


class Everything(gymnasium.Env):
    """Observes and takes what spaces allow, and checks the actions."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), 0.5, False, False, {}


NESTED = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (5, 4, 3), np.uint8),
        "deep": spaces.Tuple(
            [spaces.Discrete(3, start=-1), spaces.MultiBinary(2), spaces.Box(-1, 1, (2,), np.float64)]
        ),
        "counts": spaces.MultiDiscrete([2, 3]),
    }
)


@pytest.mark.parametrize(
    "space, expected, action",
    [
        (spaces.Discrete(300, start=-7), Discrete(300), jnp.int32(299)),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), MultiDiscrete((2, 3, 4, 5)), jnp.array([1, 2, 3, 4])),
        (spaces.MultiBinary(3), MultiDiscrete((2, 2, 2)), jnp.array([1, 0, 1])),
        (spaces.Box(-2, 2, (2, 1), np.float64), Box((-2.0, -2.0), (2.0, 2.0)), jnp.array([0.3, -2.0])),
    ],
)
def test_spaces_of_gymnasium(space, expected, action):
    env = make_environment(HostEnvironment(lambda: Everything(NESTED, space), max_steps=3))
    assert env.action_space == expected
    state, first = env.reset(jax.random.key(0), {})
    moved = env.step(None, state, action, {})
    for observation in (first, moved.observation):
        index, bits, real = observation["deep"]
        assert index.shape == (3,) and index.sum() == 1, "one-hot"
        assert (bits.dtype, real.dtype, observation["image"].dtype) == (jnp.int8, jnp.float32, jnp.uint8)
        assert observation["counts"].shape == (2,) and observation["image"].shape == (5, 4, 3)
    assert moved.reward == 0.5 and moved.state.time == 1

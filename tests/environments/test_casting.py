"""States and observations whose types differ between a reset and a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from grpo_jax.environments import Discrete, make_environment
from grpo_jax.errors import ConfigError


@struct.dataclass
class Params:
    max_steps_in_episode: int = 5


class Changing:
    """Returns the given states and observations from a reset and from a step."""

    default_params, name = Params(), "Changing"

    def __init__(self, reset, step, observed=(0.0, 0.0)):
        self.reset, self.step = reset, step
        self.observations = jax.tree.map(jnp.asarray, observed)

    def action_space(self, params):
        return Discrete(2)

    def reset_env(self, key, params):
        return self.observations[0], {"time": 0, "inner": self.reset}

    def step_env(self, key, state, action, params):
        return self.observations[1], {"time": state["time"] + 1, "inner": self.step}, 0.0, False, {}

    def is_truncated(self, state, params):
        return state["time"] >= params.max_steps_in_episode


@pytest.mark.parametrize(
    "reset, step, message",
    [
        (jnp.zeros(3), jnp.zeros(4), r"'inner' of type float32\[3\] after a reset, but float32\[4\] after a step"),
        (jnp.zeros(3), jnp.zeros(()), r"float32\[3\] after a reset, but float32\[\] .*same shape"),
        ({"count": 0}, {"count": 0.5}, r"'inner/count' of type int32\[\] .* float32\[\] after a step; .*same dtype"),
        (False, 1, r"'inner' of type bool\[\] .* int32\[\]"),
        (jnp.zeros(2, jnp.uint32), jax.random.key(0), r"'inner' of type uint32\[2\] .* key<fry>\[\]"),
        (
            {"a": 0},
            {"a": 0, "b": 1},
            "the state of 'Changing' has 'inner/b' only after a step; return the same structure",
        ),
        ({"a": 0, "c": 0}, {"b": 1, "c": 0}, "'inner/a' only after a reset, 'inner/b' only after a step"),
        ((0, 1), [0, 1], "the structure .* after a reset, but .* after a step"),
    ],
)
def test_types_that_change_are_found_and_their_leaf_is_named(reset, step, message):
    with pytest.raises(ConfigError, match=message):
        make_environment(Changing(reset, step))


@pytest.mark.parametrize(
    "after, message",
    [
        (jnp.zeros(3), r"the observation of 'Changing' has type float32\[2\] after a reset, but float32\[3\]"),
        ({"place": jnp.zeros(2)}, "the observation of 'Changing' has 'place' only after a step"),
    ],
)
def test_observations_that_change_are_found_too(after, message):
    with pytest.raises(ConfigError, match=message):
        make_environment(Changing(0, 0, (jnp.zeros(2), after)))


@pytest.mark.parametrize(
    "reset, step, dtype",
    [(0.0, 3, jnp.float32), (1, True, jnp.int32), (jnp.int32(0), jnp.int8(3), jnp.int32), (np.float32(0), 2.5, None)],
)
def test_numbers_of_a_wider_kind_keep_the_dtype_of_the_reset(reset, step, dtype):
    env = make_environment(Changing(reset, step))
    state, _ = env.reset(jax.random.key(0), env.params)
    after = env.step(jax.random.key(0), state, 0, env.params).state
    assert after["inner"] == step and after["inner"].dtype == (dtype or jnp.float32) == state["inner"].dtype
    assert not after["inner"].weak_type

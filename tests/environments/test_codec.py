"""One codec: environments get and show what is in their spaces, in rollouts, `act`, exports, stacks, on the host."""

import functools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnax.environments import spaces as gymnax_spaces
from probes import Probe
from small import small_config

from grpo_jax import Config, Hyperparams
from grpo_jax.commands.export import make_program, save_arrays, save_numpy
from grpo_jax.commands.harness import exported_policy
from grpo_jax.environments import Box, Discrete, HostEnvironment, MultiDiscrete, make_environment
from grpo_jax.environments.casting import exact_leaves
from grpo_jax.errors import ConfigError
from grpo_jax.observations import channels_first
from grpo_jax.policies.normalization import Normalizer
from grpo_jax.recording.trained_policy import TrainedPolicy
from grpo_jax.types import by_path

KEY = jax.random.key(0)


class Taking(Probe):
    """Takes actions in a space, observes their sum, and keeps the last one."""

    def __init__(self, space):
        self.space = space

    def action_space(self, params):
        return self.space

    def step_env(self, key, state, action, params):
        _, state, *others = super().step_env(key, state, 0, params)
        total = sum(jnp.sum(part) for part in jax.tree.leaves(action))
        return jnp.stack([jnp.asarray(total, jnp.float32), 0.0]), state, *others


class OnHost(gymnasium.Env):
    """Takes and observes what spaces allow, and checks the actions."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), float(np.sum(action)), False, False, {}


class Derived(spaces.Discrete):
    """A class of one's own is known by the one that it is derived from."""


gym, gymnax_ = spaces, gymnax_spaces
SPACES = {
    "gymnax Box of a number": (gymnax_.Box(-2.0, 2.0, ()), Box((-2.0,), (2.0,)), [1.5], 1.5),
    "gymnax Box": (gymnax_.Box(0.0, jnp.inf, (2, 1)), Box((0.0,) * 2, (np.inf,) * 2), [0.5, 1], [[0.5], [1]]),
    "Discrete": (gym.Discrete(3, start=-1), Discrete(3), 2, 1),
    "Derived": (Derived(300, start=5), Discrete(300), 299, 304),
    "MultiBinary": (gym.MultiBinary((1, 3)), MultiDiscrete((2,) * 3), [1, 0, 1], [[1, 0, 1]]),
    "MultiDiscrete": (gym.MultiDiscrete([[2, 3]], start=[[4, -5]]), MultiDiscrete((2, 3)), [1, 2], [[5, -3]]),
    "Box of float64": (gym.Box(-2, 2, (2, 1), np.float64), Box((-2.0,) * 2, (2.0,) * 2), [0.25, -2], [[0.25], [-2]]),
}
"""A space, its canonical form, an action in that, and the same one in the space."""


@pytest.mark.parametrize("case", SPACES)
def test_an_action_arrives_as_its_space_has_it(case):
    space, canonical, action, own = SPACES[case]
    env, total = make_environment(Taking(space)), np.sum(own)
    assert env.action_space == canonical

    @jax.jit
    def play(action):
        state, _ = env.reset(KEY, env.params)
        batch = jax.vmap(env.codec.decode)(jnp.stack([action] * 2))
        return env.codec.decode(action), batch, env.step(KEY, state, action, env.params).observation

    taken, batch, observed = play(np.array(action))
    assert np.asarray(taken).tolist() == own and taken.shape == space.shape and observed[0] == total
    np.testing.assert_array_equal(batch, np.stack([taken] * 2))
    if isinstance(space, gymnasium.Space):
        host = make_environment(HostEnvironment(lambda: OnHost(gym.Discrete(2), space), max_steps=3))
        assert host.action_space == canonical
        moved = jax.jit(lambda action: host.step(None, host.reset(KEY, {})[0], action, {}))(np.array(action))
        assert moved.reward == total and moved.state.time == 1


def test_other_spaces_are_refused_by_name():
    whole_numbers = gym.Box(0, 10, (2,), np.int32), gymnax_.Box(0, 10, (2,), jnp.int32)
    nested = gym.Dict(a=gym.Discrete(2)), gymnax_.Tuple([gymnax_.Discrete(2)])
    for space in (*whole_numbers, *nested, gym.Text(3), 3, type("Mine", (), {"n": 3})()):
        with pytest.raises(ConfigError, match="actions of '.*' in .* are not supported; use Discrete"):
            make_environment(Taking(space))


NESTED = gym.Dict(
    image=gym.Box(0, 255, (5, 4, 3), np.uint8),
    deep=gym.Tuple([gym.Discrete(3, start=-1), gym.MultiBinary(2), gym.Box(-1, 1, (2,), np.float64)]),
    counts=gym.MultiDiscrete([2, 3]),
)


def policy_of(environment, **fields):
    """An untrained policy, which acts."""
    config = small_config("ppo", environment, num_envs=2, num_steps=4, **fields)
    parts = Normalizer(None, None), Hyperparams(), {}, np.float32(0), np.int64(0), np.int32(0)
    return TrainedPolicy("run", config, jax.jit(config.policy.init)(KEY), *parts)


def test_a_policy_takes_and_gives_what_an_environment_on_the_host_does(tmp_path, monkeypatch):
    space = gym.MultiDiscrete([2, 3], start=[-4, 5])
    policy = policy_of(HostEnvironment(lambda: OnHost(NESTED, space), max_steps=3))
    observation = policy.config.env.observation
    assert observation["deep"][0].shape == (3,), "one-hot"
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(observation)]
    assert dtypes == [jnp.int32, jnp.float32, jnp.int8, jnp.float32, jnp.uint8]
    NESTED.seed(0)
    seen = NESTED.sample()
    assert space.contains(np.asarray(policy.act(seen), space.dtype))
    both = policy.act(jax.tree.map(lambda *x: np.stack(x), seen, NESTED.sample()), KEY)
    assert both.shape == (2, 2) and (both >= np.array([-4, 5])).all()
    program = make_program(policy, greedy=True)
    batch = jax.tree.map(lambda x: jnp.asarray(x)[None], seen)
    np.testing.assert_array_equal(program.function(batch)[0], policy.act(seen))
    save_arrays(policy, tmp_path)
    save_numpy(policy, tmp_path)
    monkeypatch.setattr(exported_policy, "__file__", tmp_path / "policy.py")
    np.testing.assert_array_equal(exported_policy.act(seen), policy.act(seen))
    assert program.arguments["observation"]["deep"][0].dtype == jnp.int32


def test_a_policy_with_masks_does_not_act_without_one():
    legal = {"action_mask": lambda self, state, params: jnp.array([True, False])}
    policy = policy_of(type("Own", (Taking,), legal)(gym.Discrete(2)))
    with pytest.raises(ConfigError, match=r"write policy.act\(observation, action_mask=mask\)"):
        policy.act(np.zeros(2))
    with pytest.raises(ConfigError, match="no legal action"):
        policy.act(np.zeros((2, 2)), action_mask=np.array([[True, False], [False, False]]))
    assert policy.act(np.zeros(2), action_mask=np.int8([0, 1])) == 1


def test_a_policy_of_gymnax_takes_its_integers():
    lake = policy_of("FrozenLake-misc")
    env = lake.config.env
    assert env.codec.given == jax.ShapeDtypeStruct((), jnp.int32) and env.observation.shape == (16,)
    np.testing.assert_array_equal(env.codec.encode(jnp.array(3)), np.eye(16)[3])
    assert lake.act(3).shape == () and lake.act(np.full(5, 3)).shape == (5,)
    with pytest.raises(ConfigError, match="has .*0.5.*type is int32"):
        lake.act(0.5)
    jitted = jax.jit(lambda x: lake.act(x))
    assert jitted(jnp.array(3)) == lake.act(3)
    with pytest.raises(ConfigError, match="is float32, but its type is int32; convert it"):
        jitted(jnp.zeros(()))


def test_what_loses_digits_alone_is_cast():
    given = {"real": jax.ShapeDtypeStruct((2,), jnp.float32), "byte": jax.ShapeDtypeStruct((), jnp.uint8)}
    real, byte = reversed(exact_leaves(given, {"byte": 7.0, "real": [1 / 3, np.inf]}, "it", single=True))
    assert (byte, byte.dtype, real.dtype) == (7, np.uint8, np.float32) and real.tolist() == [np.float32(1 / 3), np.inf]


def test_codecs_have_the_types_of_double_precision():
    for wide in (True, False):
        with jax.enable_x64(wide):
            env = make_environment(Taking(gym.Box(-1, 1, (2, 3), np.float64)))
            assert jax.eval_shape(env.codec.decode, jnp.zeros(6)).dtype == (jnp.float64 if wide else jnp.float32)
            step = jax.jit(lambda: env.step(KEY, env.reset(KEY, env.params)[0], jnp.ones(6), env.params))  # noqa: B023
            assert step().observation[0] == 6 and step().reward.dtype == jnp.float32


# --- images with their channels first --------------------------------------------------------------------------------


class Image(Probe):
    def __init__(self, shape):
        self.shape = shape

    def get_obs(self, state, params=None, key=None):
        image = jnp.arange(np.prod(self.shape)).reshape(self.shape) % 50
        return (image + state.time).astype(jnp.uint8)


IMAGES = {(4, 36, 40): 4, (1, 28, 28): 1, (4, 48, 40, 3): 12, (36, 40, 4): 4, (10, 10, 4): 4, (5, 7, 21): 21}
"""The channels of images of these shapes."""


def test_a_convolution_reads_channels_where_they_are():
    for shape, channels in IMAGES.items():
        config = Config(environment=Image(shape), algorithm="ppo", num_envs=4, num_steps=4)
        params = by_path(jax.eval_shape(config.policy.init, KEY))
        assert {x.shape[0] for path, x in params.items() if "Conv_0/kernel" in path} == {9 * channels}


def test_the_same_image_gives_the_same_values_wherever_its_channels_are():
    first, last = Image((4, 36, 40)), Image((36, 40, 4))
    last.get_obs = lambda *arguments, **named: jnp.moveaxis(first.get_obs(*arguments, **named), 0, -1)
    assert channels_first((4, 36, 40)) and not channels_first((36, 40, 4))
    one, other = (small_config("ppo", each, network="cnn") for each in (first, last))
    params, images = jax.jit(one.policy.init)(KEY), np.random.default_rng(0).integers(0, 255, (3, 4, 36, 40), np.uint8)

    @functools.partial(jax.jit, static_argnums=0)
    def act(policy, images):
        return policy.step(params, images, policy.initial_carry(params, 3))[:2]

    outputs = act(one.policy, images), act(other.policy, np.moveaxis(images, 1, -1))
    jax.tree.map(np.testing.assert_array_equal, *outputs)

"""Environments and policies about which everything is known, so that tests can say what must come out.

The environments have gymnax's interface: `Config(environment=Probe())` takes them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces

from grpo_jax.distributions import categorical
from grpo_jax.environments import parameters_of_groups
from grpo_jax.groups import reset_groups
from grpo_jax.networks import Policy
from grpo_jax.spaces import Box, Discrete, MultiDiscrete

FOREVER = 99


@struct.dataclass
class ProbeState(environment.EnvState):
    lifetime: int
    mark: jax.Array
    time: int


@struct.dataclass
class ProbeParams(environment.EnvParams):
    max_steps_in_episode: int = 3
    lifetime: int = FOREVER
    """The episode terminates at this age; it is truncated at `max_steps_in_episode`."""
    bonus: float = 0.0
    """A step pays 1, and this much more for action 1."""
    nan_below: float = -1.0
    """Episodes with a smaller mark pay NaN."""


class Probe(environment.Environment):
    """Counts. Observes its age and its mark, a uniform number drawn by each reset and kept through the episode."""

    @property
    def name(self):
        return "Probe"

    @property
    def default_params(self):
        return ProbeParams()

    def reset_env(self, key, params):
        state = ProbeState(lifetime=params.lifetime, mark=jax.random.uniform(key), time=0)
        return self.get_obs(state), state

    def step_env(self, key, state, action, params):
        state = state.replace(time=state.time + 1)
        reward = jnp.where(state.mark < params.nan_below, jnp.nan, 1.0 + params.bonus * action)
        return self.get_obs(state), state, reward, self.is_terminated(state, params), {}

    def get_obs(self, state, params=None, key=None):
        return jnp.stack([jnp.asarray(state.time, jnp.float32), state.mark])

    def is_terminated(self, state, params):
        return state.time >= state.lifetime

    def action_space(self, params):
        return spaces.Discrete(2)


class Echo(Probe):
    """One step that pays 1 if the action says whether the mark is above a half."""

    @property
    def name(self):
        return "Echo"

    @property
    def default_params(self):
        return ProbeParams(max_steps_in_episode=1)

    def step_env(self, key, state, action, params):
        observation, state, _, terminated, info = super().step_env(key, state, action, params)
        return observation, state, jnp.float32(action == (state.mark > 0.5)), terminated, info


class KnownParams(NamedTuple):
    """Parameters of `known_policy`."""

    logits: jax.Array  # [num_actions], whatever is observed
    weights: jax.Array  # [features] of the linear value
    bias: jax.Array  # scalar


def _known_forward(params, observations):
    distribution = jnp.broadcast_to(params.logits, (*observations.shape[:-1], params.logits.shape[0]))
    return distribution, observations @ params.weights + params.bias


known_policy = Policy(
    init=None,
    initial_carry=lambda num_envs: jnp.zeros(num_envs, jnp.int32),
    step=lambda params, observations, carry: (*_known_forward(params, observations), carry + 1),
    sequence=_known_forward,
    distribution=categorical(2),
    has_critic=True,
)
"""Acts on constant logits, values linearly, and remembers how many steps it has made since its memory was reset."""


def random_policy(space):
    """Uniform actions in a space, without critic or memory; log-probabilities are 0."""

    def sample(parameters, key):
        shape = parameters.shape[:1]
        match space:
            case Discrete(num_actions):
                return jax.random.randint(key, shape, 0, num_actions)
            case MultiDiscrete(num_actions):
                return jax.random.randint(key, (*shape, len(num_actions)), 0, jnp.array(num_actions))
            case Box(low, high):
                return jax.random.uniform(key, (*shape, len(low)), minval=jnp.array(low), maxval=jnp.array(high))

    def mode(parameters):
        return jax.tree.map(jnp.zeros_like, sample(parameters, jax.random.key(0)))

    family = categorical(1)._replace(sample=sample, mode=mode, log_prob=lambda parameters, action: parameters[..., 0])
    return Policy(
        init=None,
        initial_carry=lambda num_envs: (),
        step=lambda params, observations, carry: (jnp.zeros((observations.shape[0], 1)), None, carry),
        sequence=None,
        distribution=family,
        has_critic=False,
    )


def known_params(logits, *, weights=(2.0, 0.0), bias=10.0):
    """V = 10 + 2 age in a `Probe`, unless told otherwise."""
    return KnownParams(*(jnp.asarray(x, jnp.float32) for x in (logits, weights, bias)))


def standing(env, policy, key, *, ages, lifetimes):
    """Where `Probe` environments of the given ages stand, each with its own lifetime in the current episode."""
    ages, lifetimes = jnp.asarray(ages, jnp.int32), jnp.asarray(lifetimes, jnp.int32)
    params = parameters_of_groups(env, None, ages.size, 1)
    state = reset_groups(policy, env, params, key, ages.size, 1)
    return state._replace(
        environment=state.environment.replace(time=ages, lifetime=lifetimes),
        observation=state.observation.at[:, 0].set(ages),
        policy_carry=ages,
        episode_return=ages.astype(jnp.float32),
        episode_length=ages,
    )


def bits(tree):
    """The leaves of a tree as (path, dtype, bytes): equal if and only if the trees are, to the last bit."""
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        leaves.append((jax.tree_util.keystr(path), str(leaf.dtype), np.asarray(leaf).tobytes()))
    return leaves


def difference(a, b):
    """The paths of the leaves that differ in any bit; empty for equal trees."""
    return [path for (path, *x), (_, *y) in zip(bits(a), bits(b), strict=True) if x != y]

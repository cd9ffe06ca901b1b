"""Environments and policies about which everything is known, so that tests can say what must come out.

The environments have gymnax's interface: `Config(environment=Probe())` takes them.
"""

import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces

from grpo_jax import Hyperparams, make_init
from grpo_jax.environments import Environment, group_parameters
from grpo_jax.environments.environment import transition
from grpo_jax.environments.spaces import Box, Discrete, MultiDiscrete
from grpo_jax.observations import leading_shape
from grpo_jax.policies import Policy
from grpo_jax.policies.distributions import categorical
from grpo_jax.rollouts.rollout import Simulator

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

    PARAMS = ProbeParams()

    name = "Probe"

    @property
    def default_params(self):
        return self.PARAMS

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

    name = "Echo"
    PARAMS = ProbeParams(max_steps_in_episode=1)

    def step_env(self, key, state, action, params):
        observation, state, _, terminated, info = super().step_env(key, state, action, params)
        return observation, state, jnp.float32(action == (state.mark > 0.5)), terminated, info


class Recall(Echo):
    """Shows whether the mark is above a half at its first step, and pays 1 if the action at its third says so."""

    name = "Recall"
    PARAMS = ProbeParams(max_steps_in_episode=4, lifetime=3)

    def step_env(self, key, state, action, params):
        observation, state, reward, terminated, info = super().step_env(key, state, action, params)
        return observation, state, jnp.where(state.time == 3, reward, 0.0), terminated, info

    def get_obs(self, state, params=None, key=None):
        shown = jnp.where(state.time == 0, jnp.sign(state.mark - 0.5), 0.0)
        return jnp.stack([jnp.asarray(state.time, jnp.float32), shown])


class OneOrThirty(Probe):
    """Three of four episodes last one step, where action 0 pays 1; the others 30, where action 1 pays 0.15 each.

    All observations are equal. Always action 1 returns 30 * 0.15 / 4 = 1.125 in the mean, always action 0 returns 0.75.
    """

    MEAN_LENGTH = (3 * 1 + 30) / 4

    name = "OneOrThirty"
    PARAMS = ProbeParams(max_steps_in_episode=100)

    def step_env(self, key, state, action, params):
        is_long = state.mark >= 0.75
        state = state.replace(time=state.time + 1)
        reward = jnp.where(is_long, 0.15 * (action == 1), 1.0 * (action == 0))
        return self.get_obs(state), state, reward, state.time >= jnp.where(is_long, 30, 1), {}

    def get_obs(self, state, params=None, key=None):
        return jnp.zeros(1)


class PartsState(NamedTuple):
    position: jax.Array
    velocity: jax.Array
    luck: jax.Array
    time: jax.Array


class Parts:
    """Observes a nested dict. A step pays 1 if it pushes the next position towards 0, and the luck of the episode.

    The luck is -1 or 1, whatever the actions, and the privileged part of the observation shows it: V of the best policy
    at discount 1/2 is 2 * (1 + luck), since only the limit ends an episode.
    """

    default_params = ProbeParams(max_steps_in_episode=4)

    def action_space(self, params):
        return Discrete(2)

    def reset_env(self, key, params):
        key_place, key_luck = jax.random.split(key)
        position, velocity = jax.random.uniform(key_place, (2, 1), minval=-1.0)
        luck = jax.random.rademacher(key_luck, (1,), jnp.float32)
        state = PartsState(position, velocity, luck, jnp.zeros((), jnp.int32))
        return self.look(state), state

    def step_env(self, key, state, action, params):
        position, push = state.position + state.velocity, 2 * action - 1
        reward = state.luck[0] + (push * position[0] < 0)
        state = PartsState(position, 0.5 * push - 0.5 * position, state.luck, state.time + 1)
        return self.look(state), state, reward, False, {}

    def is_truncated(self, state, params):
        return state.time >= params.max_steps_in_episode

    def look(self, state):
        privileged = {"luck": state.luck, "is_lucky": state.luck > 0, "time": state.time[None]}
        return {"position": state.position, "velocity": state.velocity, "privileged": privileged}


@struct.dataclass
class QuestionState(environment.EnvState):
    kind: jax.Array
    cue: jax.Array
    time: int


class Questions(Probe):
    """Episodes of five kinds, which the observation names. At discount 1/2 their values are known:

    kind 0, constant value: one step, which pays 1: V = 1.
    kind 1, discounting: two steps, the second pays 1: V = 1/2, 1.
    kind 2, action: one step, which pays the action: V = 1 for the best policy.
    kind 3, memory: two steps, the second pays 1 if its action is the cue that the first shows: V = 1/2, 1 for the best
      policy with memory, and half of that for any without.
    kind 4, truncation: every step pays 1, and nothing but the limit of 4 steps ends it: V = 2, at all of them.
    """

    def __init__(self, image=False):
        self.image = image

    name = "Questions"
    PARAMS = ProbeParams(max_steps_in_episode=4)

    def reset_env(self, key, params):
        draws = jax.random.randint(key, (2,), 0, jnp.array([5, 2]))
        state = QuestionState(kind=draws[0], cue=draws[1], time=0)
        return self.get_obs(state), state

    def step_env(self, key, state, action, params):
        last = state.time == (state.kind % 2)
        pays = jnp.stack([1, last, action, last & (action == state.cue), 1]).astype(jnp.float32)
        after = state.replace(time=state.time + 1)
        return self.get_obs(after), after, pays[state.kind], last & (state.kind < 4), {}

    def get_obs(self, state, params=None, key=None):
        two_steps = state.kind % 2 == 1
        shown = jnp.where((state.kind == 3) & (state.time == 0), 2 * state.cue - 1, 0)
        features = jnp.stack([*(state.kind == jnp.arange(5)), two_steps & (state.time == 1), shown])
        features = features.astype(jnp.float32)
        return jnp.zeros(16).at[:7].set(features).reshape(4, 4) if self.image else features


class CopyState(NamedTuple):
    prompt: jax.Array
    time: jax.Array
    right: jax.Array


NUM_TOKENS, EQUALS, END = 7, 5, 6


def copy_task(length=3, max_steps=None):
    """Tokens: the prompt is 1 to `length` digits below 5, on the left of a padded window; to be written again, and END.

    Pays 1 with END after all the digits and no others. The first observation is EQUALS.
    """
    max_steps = max_steps or length + 1

    def reset(key, params):
        key_digits, key_length = jax.random.split(key)
        digits = jax.random.randint(key_digits, (length,), 0, 5)
        used = jnp.arange(length) < jax.random.randint(key_length, (), 1, length + 1)
        nothing = jnp.zeros((), jnp.int32)
        return CopyState(jnp.where(used, digits, -1), nothing, jnp.array(True)), jnp.int32(EQUALS)

    def step(key, state, action, params):
        number = jnp.sum(state.prompt >= 0)
        wanted = jnp.where(state.time < number, state.prompt[jnp.minimum(state.time, length - 1)], END)
        right = state.right & (action == wanted)
        state = CopyState(state.prompt, state.time + 1, right)
        ended = action == END
        return transition(state, jnp.int32(action), ended & right, ended, state.time >= max_steps)

    return Environment(
        name="copy",
        reset=reset,
        step=step,
        params={},
        observation=jax.ShapeDtypeStruct((), jnp.int32),
        action_space=Discrete(NUM_TOKENS),
        action_mask=None,
        max_steps=max_steps,
        prompt=lambda state, params: state.prompt,
    )


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
    initial_carry=lambda params, num_envs, prompt=None: jnp.zeros(num_envs, jnp.int32),
    step=lambda params, observations, carry: (*_known_forward(params, observations), carry + 1),
    sequence=lambda params, observations, carry, starts: _known_forward(params, observations),
    distribution=categorical(2),
    has_critic=True,
    has_carry=False,
)
"""Acts on constant logits, values linearly, and remembers how many steps it has made since its memory was reset."""


def acted(params, *, reference_params=None, opt_state=None):
    """What `make_batch` and `update_epochs` read of a train state."""
    return types.SimpleNamespace(params=params, reference_params=reference_params, opt_state=opt_state)


def check(config, hyperparams=None):
    """Traces `init`, which raises ConfigError if the parts of the config do not fit."""
    jax.eval_shape(make_init(config), jax.random.key(0), hyperparams or Hyperparams())


def random_policy(space):
    """Uniform actions in a space, without critic or memory; log-probabilities are 0."""

    def noise(key, shape):
        match space:
            case Discrete(num_actions):
                return jax.random.randint(key, shape, 0, num_actions)
            case MultiDiscrete(num_actions):
                return jax.random.randint(key, (*shape, len(num_actions)), 0, jnp.array(num_actions))
            case Box(low, high):
                return jax.random.uniform(key, (*shape, len(low)), minval=jnp.array(low), maxval=jnp.array(high))

    family = categorical(1)._replace(
        noise=noise,
        from_noise=lambda parameters, action: action,
        mode=lambda parameters: jax.tree.map(jnp.zeros_like, noise(jax.random.key(0), parameters.shape[:1])),
        log_prob=lambda parameters, action: parameters[..., 0],
    )
    return Policy(
        init=None,
        initial_carry=lambda params, num_envs, prompt=None: (),
        step=lambda params, observations, carry: (jnp.zeros((*leading_shape(observations, 1), 1)), None, carry),
        sequence=None,
        distribution=family,
        has_critic=False,
        has_carry=False,
    )


def random_play(env, num_envs, num_steps):
    """The function from a key to what a random policy does: the states before and after, and the trajectory."""
    simulator = Simulator(env, random_policy(env.action_space), ())

    @jax.jit
    def play(key):
        start = simulator.reset(group_parameters(env, None, num_envs, 1), key, num_envs)
        return start, *simulator.unroll(start, key, num_steps=num_steps, auto_reset=True)

    return play


def known_params(logits, *, weights=(2.0, 0.0), bias=10.0):
    """V = 10 + 2 age in a `Probe`, unless told otherwise."""
    return KnownParams(*(jnp.asarray(x, jnp.float32) for x in (logits, weights, bias)))


def standing(env, policy, key, *, ages, lifetimes):
    """Where `Probe` environments of the given ages stand, each with its own lifetime in the current episode."""

    @jax.jit
    def stand(key, ages, lifetimes):
        params = group_parameters(env, None, ages.size, 1)
        state = Simulator(env, policy, None).reset(params, key, ages.size)
        return state._replace(
            environment=state.environment.replace(time=ages, lifetime=lifetimes),
            observation=state.observation.at[:, 0].set(ages),
            policy_carry=ages,
            episode_return=ages.astype(jnp.float32),
            episode_length=ages,
            discounted_return=ages.astype(jnp.float32),
        )

    return stand(key, *(x if isinstance(x, jax.Array) else np.array(x, np.int32) for x in (ages, lifetimes)))


def counted(count):
    """The number that a `StepCount` stands for."""
    return np.asarray(count.high, np.int64) * 2**31 + np.asarray(count.low)


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


def random_window(num_steps, num_envs, num_finals, num_features, seed=0):
    """Random numbers; some rollouts terminate, some are truncated, once or twice; one is over early."""
    rng, shape = np.random.default_rng(seed), (num_steps, num_envs)
    terminated, truncated, mask = np.zeros(shape, bool), np.zeros(shape, bool), np.ones(shape, bool)
    terminated[2, 0] = truncated[1, 1] = truncated[4, 1] = truncated[-1, 2] = terminated[3, 4] = True
    mask[4:, 4] = False
    return {
        "features": rng.normal(size=(*shape, num_features)).astype(np.float32),
        "final_features": rng.normal(size=(num_finals, num_envs, num_features)).astype(np.float32),
        "rewards": np.where(mask, rng.normal(size=shape), 0).astype(np.float32),
        "terminated": terminated,
        "truncated": truncated,
        "mask": mask,
    }

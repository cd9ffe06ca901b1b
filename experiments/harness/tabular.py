"""Small decision processes whose policy gradient can be computed exactly, with gymnax's interface."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from grpo_jax.environments import spaces

SURVIVAL = 0.85
"""Probability that an episode goes on after a step, so that the mean episode has about seven."""


@struct.dataclass
class State:
    at: jax.Array
    time: jax.Array


@struct.dataclass
class Params:
    max_steps_in_episode: int = 60  # 0.85^60 = 6e-5 of the episodes would be longer


class Tabular(NamedTuple):
    """A finite process of `S` states and `A` actions; the transition probabilities and that of ending sum to 1.

    The fields are nested tuples, so that it is hashable as a `Config` has to be.
    """

    name: str
    transitions: tuple  # [S, A, S]
    rewards: tuple  # [S, A, S + 1] for each next state; the last one for the end
    starts: tuple  # [S] probability of starting there

    @property
    def default_params(self) -> Params:
        return Params()

    def action_space(self, params: Params) -> spaces.Discrete:
        return spaces.Discrete(len(self.transitions[0]))

    def reset_env(self, key, params):
        state = State(at=_sample(key, jnp.array(self.starts)), time=jnp.zeros((), jnp.int32))
        return self._observation(state), state

    def step_env(self, key, state, action, params):
        onward = jnp.array(self.transitions)[state.at, action]
        # A single uniform number decides, so that it can be shared by the members of a group.
        to = _sample(key, jnp.append(onward, 1.0 - jnp.sum(onward)))
        reward = jnp.array(self.rewards)[state.at, action, to]
        ended = to == len(self.starts)
        after = State(at=jnp.where(ended, state.at, to), time=state.time + 1)
        return self._observation(after), after, reward, ended, {}

    def is_truncated(self, state, params):
        return state.time >= params.max_steps_in_episode

    def _observation(self, state):
        return jax.nn.one_hot(state.at, len(self.starts))


def _sample(key: jax.Array, probabilities: jax.Array) -> jax.Array:
    """The index where the cumulative sum passes one uniform number."""
    return jnp.minimum(
        jnp.searchsorted(jnp.cumsum(probabilities), jax.random.uniform(key), side="right"), len(probabilities) - 1
    )


class Exact(NamedTuple):
    """Exact values of a policy in a `Tabular` process."""

    expected_return: jax.Array  # scalar
    values: jax.Array  # [S]
    episode_length: jax.Array  # scalar, expected


def solve(process: Tabular, policy: jax.Array) -> Exact:
    """Values of the policy `[S, A]`, differentiable: v = (I - P)^-1 r.

    P[s, s'] = sum_a policy[s, a] transitions[s, a, s'], and r[s] the expected reward of the next step.
    """
    transitions, rewards, starts = (jnp.array(part) for part in (process.transitions, process.rewards, process.starts))
    ending = 1.0 - jnp.sum(transitions, axis=-1, keepdims=True)
    reward = jnp.sum(policy * jnp.sum(jnp.concatenate([transitions, ending], axis=-1) * rewards, axis=-1), axis=-1)
    onward = jnp.eye(len(starts)) - jnp.einsum("sa,sat->st", policy, transitions)
    values = jnp.linalg.solve(onward, reward)
    return Exact(starts @ values, values, starts @ jnp.linalg.solve(onward, jnp.ones_like(reward)))


def policy_table(process: Tabular, policy, params) -> jax.Array:
    states = jnp.eye(len(process.starts))
    return jax.nn.softmax(policy.step(params, states, policy.initial_carry(params, len(states)))[0])


def exact_gradient(process: Tabular, policy, params) -> tuple[dict, Exact]:
    """The gradient of the expected return of an episode with respect to the parameters, and the exact values."""

    def expected_return(params):
        exact = solve(process, policy_table(process, policy, params))
        return exact.expected_return, exact

    return jax.grad(expected_return, has_aux=True)(params)


def _nested(array: np.ndarray) -> tuple:
    return tuple(_nested(row) for row in array) if array.ndim > 1 else tuple(float(x) for x in array)


def corridor(length: int = 6) -> Tabular:
    """Steps left and right, with slips; only the right end is rewarded, so that rewards come late."""
    transitions, rewards = np.zeros((length, 2, length)), np.zeros((length, 2, length + 1))
    for at in range(length):
        for action, step in ((0, -1), (1, 1)):
            for slip, probability in ((step, 0.9), (-step, 0.1)):
                transitions[at, action, np.clip(at + slip, 0, length - 1)] += SURVIVAL * probability
    rewards[:, :, length - 1] = 1.0
    starts = np.eye(length)[0]
    return Tabular("corridor", _nested(transitions), _nested(rewards), tuple(starts.tolist()))


def garnet(num_states: int = 8, num_actions: int = 3, branching: int = 3) -> Tabular:
    """Random transitions to a few states, and random rewards: there is no structure that favours an estimator."""
    rng = np.random.default_rng(0)
    transitions = np.zeros((num_states, num_actions, num_states))
    for at in range(num_states):
        for action in range(num_actions):
            to = rng.choice(num_states, branching, replace=False)
            transitions[at, action, to] = SURVIVAL * rng.dirichlet(np.ones(branching))
    rewards = rng.normal(size=(num_states, num_actions, num_states + 1))
    return Tabular("random", _nested(transitions), _nested(rewards), (1.0 / num_states,) * num_states)


def lottery(num_states: int = 6) -> Tabular:
    """States of very different values, entered at random, and actions that hardly matter: a baseline removes noise."""
    transitions = np.full((num_states, 2, num_states), SURVIVAL / num_states)
    rewards = np.zeros((num_states, 2, num_states + 1))
    rewards += np.linspace(-3, 3, num_states)[:, None, None]
    rewards[:, 1] += 0.5
    return Tabular("lottery", _nested(transitions), _nested(rewards), (1.0 / num_states,) * num_states)


PROCESSES: tuple[Callable[[], Tabular], ...] = (corridor, garnet, lottery)

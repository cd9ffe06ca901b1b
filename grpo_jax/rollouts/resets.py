"""New episodes within a rollout: start states for every environment whose episode ends."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.devices.mesh import envs_are_split
from grpo_jax.environments import Environment
from grpo_jax.observations import leading_shape
from grpo_jax.rollouts.scan import any_in_all_rows
from grpo_jax.types import PyTree, RolloutState

MAX_BYTES = 2**28
"""The most memory of start states that are drawn for several steps of a loop at once, of all environments of a row."""


class StartStates(NamedTuple):
    """The start states of the new episodes in a rollout, some of which are drawn ahead and carried through its loop."""

    # (episode [B], num_steps) -> take: (ahead, ended [B] bool, episode [B]) -> ahead, (states, observations), each leaf
    # [B, ...], in the next `num_steps` steps
    before_steps: Callable
    ahead: PyTree = ()  # before the first step, each leaf [B, ...]


def make_start_states(
    environment: Environment, start: RolloutState, key: jax.Array, num_draws: int, num_starts: int | None = None
) -> StartStates:
    """Start states for the environments whose episodes end; the n-th of one depends only on the key, its place and n.

    A reset is many small operations, and few episodes end at any one step. With `num_draws` that many start states of
    each environment are drawn at once, behind a branch, when an episode ends and none is left for the next. The branch
    is faster on a CPU; on a GPU it forces a sync, and environments that are split over devices would have to agree on
    it: there one is drawn for every step, for all steps of an iteration of the loop at once. The numbers are the same.

    With `num_starts` all start states are drawn before the rollout, and those of an environment are used in turn:
    episode n starts from state n modulo `num_starts`. Then there is neither a branch nor a draw at any step.

    Args:
      environment: the environment.
      start: the state before the rollout, with the parameters of the `B` environments.
      key: of all start states.
      num_draws: start states that are drawn at once; 0: one is drawn for every step.
      num_starts: start states of each environment in this rollout; None: a new one for every episode.

    Returns:
      The states and observations that `take` gives environments whose episode has not ended have no meaning.
    """

    num_envs = start.num_envs

    def draw(params, index):
        return environment.reset(jax.random.fold_in(key, index), params)

    def draw_many(first, number):
        episodes = first[:, None] + jnp.arange(number)[None]
        indices = episodes * num_envs + jnp.arange(num_envs)[:, None]  # each start state has its own
        return jax.vmap(jax.vmap(draw, in_axes=(None, 0)))(start.environment_params, indices)

    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((start.environment, start.observation)))
    if num_starts is None and (not num_draws or envs_are_split()):

        def before_steps(first, num_steps):
            if num_steps * num_bytes > MAX_BYTES:
                return lambda ahead, ended, episode: (ahead, _at_few(draw_many(episode, 1), 0, 1))
            drawn = draw_many(first, num_steps)
            return lambda ahead, ended, episode: (ahead, _at_few(drawn, episode - first, num_steps))

        return StartStates(before_steps)
    zeros = jnp.zeros(start.num_envs, jnp.int32)
    if num_starts is not None:
        drawn = draw_many(zeros, num_starts)
        return StartStates(lambda *_: lambda ahead, ended, episode: (ahead, _at(drawn, episode % num_starts)))

    def take(ahead, ended, episode):
        is_short = any_in_all_rows(ended & (episode >= ahead[1] + num_draws))
        ahead = jax.lax.cond(is_short, lambda: (draw_many(episode, num_draws), episode), lambda: ahead)
        return ahead, _at(ahead[0], episode - ahead[1])

    # Nothing is drawn yet: the first end of an episode replaces these copies.
    copies = jax.tree.map(lambda x: jnp.stack([x] * num_draws, axis=1), (start.environment, start.observation))
    return StartStates(lambda *_: take, (copies, zeros - num_draws))


def _at_few(drawn: PyTree, index: jax.Array, number: int) -> PyTree:
    """As `_at` for few draws, by comparisons, which a GPU makes within the step: it would write a gather's indices."""
    draws = [jax.tree.map(lambda leaf, n=n: leaf[:, n], drawn) for n in range(number)]
    return functools.reduce(lambda chosen, n: select(index >= n, draws[n], chosen), range(1, number), draws[0])


def _at(drawn: PyTree, index: jax.Array) -> PyTree:
    """`[B, D, ...]` to `[B, ...]`, by an index `[B]`."""
    return jax.vmap(lambda x, n: jax.tree.map(lambda leaf: leaf.at[n].get(mode="clip"), x))(drawn, index)


def new_episodes(
    environment: PyTree, observation: PyTree, policy_carry: PyTree, environment_params: PyTree = None
) -> RolloutState:
    """The rollout state of environments in these start states, before their first step."""
    zeros = jnp.zeros(leading_shape(observation, 1))
    return RolloutState(
        environment=environment,
        observation=observation,
        policy_carry=policy_carry,
        episode_return=zeros,
        episode_length=zeros.astype(jnp.int32),
        discounted_return=zeros,
        environment_params=environment_params,
    )


def advance_where(alive: jax.Array, state: RolloutState, next_state: RolloutState) -> RolloutState:
    """`next_state` where `alive`, `[B]` bool, and `state` in the environments whose episode is over.

    The policy's carry is the next one everywhere: nothing reads it once an episode is over, and selecting would copy a
    transformer's cache at every step.
    """
    chosen = select(alive, next_state._replace(policy_carry=()), state._replace(policy_carry=()))
    return chosen._replace(policy_carry=next_state.policy_carry)


def select(condition: jax.Array, when_true: PyTree, when_false: PyTree) -> PyTree:
    """`where` on every leaf, `[..., B, ...]`, by a condition `[..., B]`."""

    def pick(a, b):
        return jnp.where(condition.reshape(condition.shape + (1,) * (b.ndim - condition.ndim)), a, b)

    return jax.tree.map(pick, when_true, when_false)

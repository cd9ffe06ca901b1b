"""New episodes within a rollout: start states drawn for every environment whose episode ends."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.devices.mesh import envs_are_split
from grpo_jax.environments import Environment
from grpo_jax.observations import leading_shape
from grpo_jax.types import PyTree, RolloutState


def make_start_states(
    environment: Environment, environment_params: PyTree, keys: jax.Array, num_draws: int, num_starts: int | None = None
) -> Callable[[jax.Array, jax.Array], tuple[PyTree, PyTree]]:
    """Makes `start_states(ended, num_ended) -> states, observations`, which starts the next episodes of a rollout.

    The start state after the n-th end of an environment is a function of its key and n alone. Few episodes end at any
    one step, so drawing a start state for every environment at every step is mostly wasted. With `num_draws` the first
    start states of each environment are drawn before the rollout, and later ones only at a step that needs one. That
    branch pays on a CPU. It makes a GPU's host wait; environments that are split over devices would have to agree on
    it; and `vmap` computes both sides of it (on a CPU `over_rows` maps instead). The numbers are the same.

    With `num_starts` all start states are drawn before the rollout, and those of an environment are used in turn:
    episode n starts from state n modulo `num_starts`. Then there is neither a branch nor a draw at any step.

    Args:
      environment, environment_params: the environment, and its parameters, each leaf `[B, ...]`.
      keys: `[B]`; environments with equal keys get equal start states.
      num_draws: start states that are drawn before the rollout; 0: one is drawn at every step.
      num_starts: start states of each environment in this rollout; None: a new one for every episode.

    Returns:
      A function of `ended`, `[B]` bool, the environments whose episode ends at this step, and `num_ended`, `[B]` int32,
      their episodes that ended before. It returns states and observations, each leaf `[B, ...]`; those of the other
      environments have no meaning.
    """

    def draw(num_ended):
        return jax.vmap(environment.reset)(jax.vmap(jax.random.fold_in)(keys, num_ended), environment_params)

    if num_starts is None and (not num_draws or envs_are_split()):
        return lambda ended, num_ended: draw(num_ended)

    num_drawn = num_starts or num_draws
    drawn = jax.vmap(draw)(jnp.broadcast_to(jnp.arange(num_drawn)[:, None], (num_drawn, keys.shape[0])))
    if num_starts == 1:
        only = jax.tree.map(lambda leaf: leaf[0], drawn)
        return lambda ended, num_ended: only
    take = jax.vmap(lambda draws, n: jax.tree.map(lambda leaf: leaf.at[n].get(mode="clip"), draws), in_axes=(1, 0))
    if num_starts is not None:
        return lambda ended, num_ended: take(drawn, num_ended % num_starts)

    def start_states(ended, num_ended):
        needs_more = jnp.any(ended & (num_ended >= num_draws))
        return jax.lax.cond(needs_more, draw, functools.partial(take, drawn), num_ended)

    return start_states


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


def advance_where(alive: jax.Array, before: RolloutState, after: RolloutState) -> RolloutState:
    """`after` where `alive`, `[B]` bool, and `before` in the environments whose episode is over.

    The policy's carry is that of `after` everywhere: nothing reads it once an episode is over, and selecting would copy
    a transformer's cache at every step.
    """
    moved = select(alive, after._replace(policy_carry=()), before._replace(policy_carry=()))
    return moved._replace(policy_carry=after.policy_carry)


def select(condition: jax.Array, when_true: PyTree, when_false: PyTree) -> PyTree:
    """`where` on every leaf, `[..., B, ...]`, by a condition `[..., B]`."""

    def pick(a, b):
        return jnp.where(condition.reshape(condition.shape + (1,) * (b.ndim - condition.ndim)), a, b)

    return jax.tree.map(pick, when_true, when_false)

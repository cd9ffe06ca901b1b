"""Rollouts: one scan over steps, `B` environments wide, that serves every environment and every policy."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.devices.mesh import envs_are_split
from grpo_jax.environments import Environment
from grpo_jax.environments.environment import threefry
from grpo_jax.objectives.advantages import next_values
from grpo_jax.policies import Policy
from grpo_jax.policies.sampling import mask_actions
from grpo_jax.types import PyTree, RolloutState, Trajectory

NUM_RESET_DRAWS = 8
"""Start states that a CPU draws ahead for each environment of a rollout: see `_start_states`."""

MAX_BLOCK = 128
"""Steps whose randomness is drawn together. A generator is many small operations, which on a CPU cost as much for one
step as for many; a long episode's randomness all at once would be most of what an evaluation keeps."""


def unroll(
    policy: Policy,
    environment: Environment,
    params: PyTree,
    state: RolloutState,
    key: jax.Array,
    *,
    num_steps: int,
    auto_reset: bool,
    greedy: bool | jax.Array = False,
    first_action: jax.Array | None = None,
    num_sharing: int = 1,
    discount: float | jax.Array = 1.0,
    keep_final: bool = False,
) -> tuple[RolloutState, Trajectory]:
    """Acts for `num_steps` in every environment and records what happened.

    With `auto_reset` an environment whose episode ends starts another, from a start state that is drawn for this
    episode alone: each has the environment's own distribution and is independent of all others.

    Without `auto_reset` an environment whose episode ends stays as it is: the steps after are not `valid`, have
    reward 0 and change nothing but what the policy remembers.

    Truncation is exact: the critic's value of the true final observation is in `next_value`. Within `num_steps` an
    episode can be truncated at most ceil(num_steps / max_steps) times, so that many observations, and what the policy
    remembered at each, are kept for each environment, and valued in one pass after the rollout. Of an environment that
    truncates earlier than its limit, more often than that, the further ones are NaN: better no update than a wrong one.

    Args:
      policy, environment: what acts, and where.
      params: of the policy.
      state: where the environments stand.
      key: of all randomness in this rollout.
      num_steps: `T`.
      auto_reset: whether episodes follow each other.
      greedy: take the distribution's mode in place of a sample; `[B]` says in which environments.
      first_action: `[B]` or `[B, D]` taken at the first step, whatever the policy would; None: its own.
      num_sharing: neighbouring environments that share all randomness but that of their actions (common random
        numbers); 1: none do.
      discount: of `discounted_return`.
      keep_final: whether the trajectory keeps the final observations, for a baseline to value.

    Returns:
      Where the environments stand afterwards, and the trajectory `[T, B]`.
    """
    num_envs = state.episode_length.shape[0]
    num_slots = num_finals(environment, num_steps, auto_reset) - 1 if policy.has_critic or keep_final else 0
    key_reset, key_blocks = jax.random.split(key)
    # Constant, so no part of what the scan carries.
    environment_params, state = state.environment_params, state._replace(environment_params=None)
    if auto_reset:
        reset_keys = jax.random.split(threefry(key_reset), num_envs // num_sharing)
        reset_keys = jnp.repeat(reset_keys, num_sharing, axis=0)
        start_states = _start_states(environment, environment_params, reset_keys, num_steps)
    act = functools.partial(_step, policy, environment, params, environment_params, greedy, discount)

    def step(carry, now):
        (noise, environment_keys), is_first = now
        state, alive, num_ended, final, num_truncated = carry
        environment_keys = jnp.repeat(environment_keys, num_sharing, axis=0)
        given = None if first_action is None else (is_first, first_action)
        after, output = act(state, alive, noise, environment_keys, given)
        ended, truncated = output["terminated"] | output["truncated"], output["truncated"]
        slot = truncated & (num_truncated == jnp.arange(num_slots)[:, None])
        final = _select(slot, (after.observation, after.policy_carry), final)
        num_truncated = num_truncated + truncated
        if auto_reset:
            start, observation = start_states(ended, num_ended)
            memory = policy.initial_carry(params, num_envs)
            fresh = begun_episodes(start, observation, memory, environment_params=None)
            after = _select(ended, fresh, after)
        else:
            stays = _select(alive, after._replace(policy_carry=()), state._replace(policy_carry=()))
            # Nothing reads what the policy remembers after the end, and a cache is not to be copied at every step.
            after = stays._replace(policy_carry=after.policy_carry)
            alive = alive & ~ended
        return (after, alive, num_ended + ended, final, num_truncated), output

    def randomness(key, length):
        key_actions, key_environment = jax.random.split(key)
        noise = _checked_noise(policy.distribution.noise(key_actions, (length, num_envs)), (length, num_envs))
        return noise, jax.random.split(threefry(key_environment), (length, num_envs // num_sharing))

    none_yet = jax.tree.map(
        lambda leaf: jnp.zeros((num_slots, *leaf.shape), leaf.dtype), (state.observation, state.policy_carry)
    )
    nothing = jnp.zeros(num_envs, jnp.int32)
    start = (state, jnp.ones(num_envs, bool), nothing, none_yet, nothing)
    (end, _, _, final, _), outputs = _scan_in_blocks(step, start, key_blocks, num_steps, randomness)
    last = (end.observation, end.policy_carry)
    final = jax.tree.map(lambda many, one: jnp.concatenate([many, one[None]]), final, last)
    final_value = next_value = None
    if policy.has_critic:
        final_value = jax.vmap(lambda observation, carry: policy.step(params, observation, carry)[1])(*final)
        next_value = next_values(outputs["value"], final_value, outputs["truncated"])
    carry = jax.tree.map(lambda leaf: leaf[None], policy.sequence_carry(state.policy_carry))
    end = end._replace(environment_params=environment_params)
    trajectory = Trajectory(next_value=next_value, carry=carry, **outputs)
    if keep_final:
        observation, carry = final
        trajectory = trajectory._replace(
            final_observation=observation, final_carry=policy.sequence_carry(carry), final_value=final_value
        )
    shape = num_steps, num_envs
    if greedy is not False:
        trajectory = trajectory._replace(greedy=jnp.broadcast_to(greedy, shape))
    if first_action is not None:
        trajectory = trajectory._replace(given=jnp.broadcast_to(jnp.arange(num_steps)[:, None] == 0, shape))
    return end, trajectory


def _start_states(
    environment: Environment, environment_params: PyTree, keys: jax.Array, num_steps: int
) -> Callable[[jax.Array, jax.Array], tuple[PyTree, jax.Array]]:
    """What episodes start from: `(ended, num_ended) -> (states, observations)`, each `[B]` and `[B, ...]`.

    The start state after the n-th end of an environment is a function of its key and n alone. To draw one for every
    environment at every step, where few episodes end, is much work in vain. A CPU therefore draws the first
    `NUM_RESET_DRAWS` of each environment ahead, and draws at a step only if one is needed that is further on.
    Accelerators, where a branch makes the host wait, and environments that are split over devices, where the devices
    would have to agree on it, draw at every step, and so does a CPU under `vmap`, which makes both sides of a branch
    (`over_rows` maps there). The numbers are the same.
    """

    def draw(num_ended):
        return jax.vmap(environment.reset)(jax.vmap(jax.random.fold_in)(keys, num_ended), environment_params)

    if jax.default_backend() != "cpu" or envs_are_split():
        return lambda ended, num_ended: draw(num_ended)

    num_draws = min(NUM_RESET_DRAWS, num_steps)
    drawn = jax.vmap(draw)(jnp.broadcast_to(jnp.arange(num_draws)[:, None], (num_draws, keys.shape[0])))
    take = jax.vmap(lambda draws, n: jax.tree.map(lambda leaf: leaf.at[n].get(mode="clip"), draws), in_axes=(1, 0))

    def start_states(ended, num_ended):
        needs_more = jnp.any(ended & (num_ended >= num_draws))
        return jax.lax.cond(needs_more, draw, functools.partial(take, drawn), num_ended)

    return start_states


def num_finals(environment: Environment, num_steps: int, auto_reset: bool) -> int:
    """How many observations of an environment no later step of its rollout begins with.

    One stands after the window. Where episodes follow each other, there are also as many as can be truncated; where
    nothing follows an episode, its final observation stands until the next step, which begins with it.
    """
    return 1 + (-(-num_steps // environment.max_steps) if auto_reset else 0)


def begun_episodes(
    environment: PyTree, observation: jax.Array, policy_carry: PyTree, environment_params: PyTree
) -> RolloutState:
    """Environments in their start states, with no step made."""
    nothing = jnp.zeros(observation.shape[0])
    return RolloutState(
        environment=environment,
        observation=observation,
        policy_carry=policy_carry,
        episode_return=nothing,
        episode_length=nothing.astype(jnp.int32),
        discounted_return=nothing,
        environment_params=environment_params,
    )


def block_length(num_steps: int) -> int:
    """The largest divisor of `num_steps` up to `MAX_BLOCK`."""
    return max(length for length in range(1, min(num_steps, MAX_BLOCK) + 1) if num_steps % length == 0)


def _scan_in_blocks(step: Callable, start: PyTree, key: jax.Array, num_steps: int, draw: Callable):
    """`lax.scan` of `step(carry, (randomness, is_first))`, whose randomness is drawn a block of steps at a time.

    `draw(key, length)` gives that of a block, each leaf `[length, ...]`.
    """
    length = block_length(num_steps)
    num_blocks = num_steps // length

    def block(carry, now):
        key, is_first = now
        return jax.lax.scan(step, carry, (draw(key, length), is_first & (jnp.arange(length) == 0)))

    blocks = jax.random.split(key, num_blocks), jnp.arange(num_blocks) == 0
    end, outputs = jax.lax.scan(block, start, blocks, unroll=num_blocks == 1)
    return end, jax.tree.map(lambda leaf: leaf.reshape(num_steps, *leaf.shape[2:]), outputs)


def _checked_noise(noise: PyTree, shape: tuple[int, int]) -> PyTree:
    """The noise, if it is of each step and environment: otherwise some would share theirs unnoticed."""
    for leaf in jax.tree.leaves(noise):
        if jnp.shape(leaf)[:2] != shape:
            raise ValueError(
                f"the distribution's noise(key, {shape}) returned shape {jnp.shape(leaf)}, and each array should begin "
                f"with {shape}; noise=jax.random.split gives a key for each sample"
            )
    return noise


def _step(
    policy, environment, params, environment_params, greedy, discount, state, alive, noise, keys, first_action
) -> tuple[RolloutState, dict[str, PyTree]]:
    """One step of every environment: where it leads before any reset, and what the trajectory keeps of it."""
    distribution, value, policy_carry = policy.step(params, state.observation, state.policy_carry)
    action_mask = None
    if environment.action_mask is not None:
        action_mask = jax.vmap(environment.action_mask)(state.environment, environment_params)
    if policy.support is not None:
        action_mask = policy.support(mask_actions(distribution, action_mask))
    distribution = mask_actions(distribution, action_mask)
    family = policy.distribution
    action = family.from_noise(distribution, noise)
    if greedy is not False:  # the compiler would compute the modes all the same
        action = _select(jnp.broadcast_to(greedy, alive.shape), family.mode(distribution), action)
    if first_action is not None:
        action = jnp.where(*first_action, action)
    moved = jax.vmap(environment.step)(
        keys,
        state.environment,
        family.to_environment(action),
        environment_params,
    )
    reward = jnp.where(alive, moved.reward, 0.0)
    after = state._replace(
        environment=moved.state,
        observation=moved.observation,
        policy_carry=policy_carry,
        episode_return=state.episode_return + reward,
        episode_length=state.episode_length + alive,
        discounted_return=reward + discount * state.discounted_return,
    )
    return after, {
        "observation": state.observation,
        "action": action,
        "reward": reward,
        "terminated": moved.terminated & alive,
        "truncated": moved.truncated & alive,
        "valid": alive,
        "log_prob": family.log_prob(distribution, action),
        "distribution": distribution,
        "value": value,
        "action_mask": action_mask,
        "reward_parts": moved.reward_parts,
        "episode_return": after.episode_return,
        "episode_length": after.episode_length,
        "discounted_return": after.discounted_return,
    }


def _select(condition, when_true, when_false):
    """Leaf by leaf `where`, the condition `[..., B]` broadcast over what follows its axes."""

    def pick(a, b):
        return jnp.where(condition.reshape(condition.shape + (1,) * (b.ndim - condition.ndim)), a, b)

    return jax.tree.map(pick, when_true, when_false)

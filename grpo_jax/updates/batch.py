"""From a trajectory to samples: rewards, baselines, advantages, masks and weights, computed once."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.algorithms import Algorithm
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives import divergences, exact_kl_to_reference
from grpo_jax.objectives.returns import gae_advantage, next_values
from grpo_jax.policies import Policy, combine, partition
from grpo_jax.policies.sampling import mask_actions
from grpo_jax.policies.scoring import score
from grpo_jax.rollouts.groups import one_carry_per_group
from grpo_jax.types import Batch, PyTree, Trajectory, Whole


def kept_whole(
    algorithm: Algorithm, policy: Policy, group_size: int, *, share_prompts: bool, shuffle_blocks: int = 1
) -> Whole:
    """The parts that stay together: what a slot compares, and the steps and members that share a carry."""
    return Whole(
        sequences=algorithm.whole_sequences or policy.has_carry,
        members=group_size if share_prompts else 1,
        minibatches=algorithm.whole_minibatches,
        blocks=shuffle_blocks,
    )


def make_batch(
    algorithm: Algorithm,
    policy: Policy,
    params: PyTree,
    trajectory: Trajectory,
    reference_params: PyTree,
    hyperparams: Hyperparams,
    group_size: int,
    *,
    num_windows: int = 1,
    share_prompts: bool = False,
    shuffle_blocks: int = 1,
    limit_terminates: bool = False,
    baseline_state: PyTree = None,
) -> tuple[Batch, PyTree]:
    """The samples of a trajectory, with all that stays fixed during the epochs, and a stateful baseline's next state.

    Advantages are relative to the values of the algorithm's baseline, or without one to those of the critic.

    Args:
      algorithm: its slots `reward`, `baseline`, `advantage` and `reduce` are called, in this order.
      policy: the network and its distribution.
      params: parameters of the behaviour policy.
      trajectory: `[T, B]`.
      reference_params: of the reference policy; those that stay frozen may be left out, as in a `partition`. None for
        an algorithm without one. A recurrent reference policy starts each rollout from its initial carry, also where
        the rollout begins in mid-episode.
      hyperparams: every coefficient.
      group_size: members of a group.
      num_windows: parts of `B` in which the groups started anew. A baseline sees one window at a time: later windows
        contain the consequences of the actions in earlier ones.
      share_prompts: keep groups whole and give each one carry, that of their common prompt.
      shuffle_blocks: blocks of environments that are shuffled apart, as in `Config`.
      limit_terminates: the value after a truncated episode is 0, as in `Environment`.
      baseline_state: what a stateful baseline returned for the previous rollout; None or zeros for the first one. It
        values each window by itself; the next state is that of all of them at once.

    Returns:
      The batch, `[1, T * B]` single steps, or `[T, B]` where sequences are kept whole; and the next state of a stateful
      baseline, None without one. No gradient flows through either.

    Raises:
      ValueError: a slot returned the wrong shape, or lacks something that it needs.
    """
    whole = kept_whole(algorithm, policy, group_size, share_prompts=share_prompts, shuffle_blocks=shuffle_blocks)
    if whole.members > 1:
        trajectory = one_carry_per_group(trajectory, whole.members)
    reference = _Reference()
    if algorithm.reference is not None:
        reference_params = combine(reference_params, partition(policy, params)[1])
        reference = _run_reference(algorithm, policy, reference_params, trajectory)
    if algorithm.reward is not None:
        reward = algorithm.reward(trajectory, _kl_to_reference(trajectory, reference.log_prob), hyperparams)
        trajectory = trajectory._replace(reward=check_shape("reward", reward, trajectory.reward))

    played = trajectory
    if limit_terminates:
        trajectory = trajectory._replace(terminated=played.ended, truncated=jnp.zeros_like(played.truncated))
    compared = trajectory
    if algorithm.baseline is not None:
        arguments = policy, params, hyperparams, group_size
        compared, baseline_state = _with_baseline(algorithm, trajectory, arguments, num_windows, baseline_state)
    advantage = check_shape("advantage", algorithm.advantage(compared, hyperparams, group_size), trajectory.reward)
    target = None if compared.value is None else advantage + compared.value
    if algorithm.baseline is not None and trajectory.value is not None:
        # With both a critic and a baseline, the critic's targets come from its own values.
        target = gae_advantage(trajectory, hyperparams, group_size) + trajectory.value

    mask = _training_mask(algorithm, played, advantage, group_size)
    weight = check_shape("reduce", algorithm.reduce(mask), mask)
    if trajectory.given is not None:
        # Each action was imposed on one member, but the policy takes it with its probability.
        weight *= group_size * jnp.exp(trajectory.log_prob)
    batch = Batch(
        observation=trajectory.observation,
        action=trajectory.action,
        log_prob=trajectory.log_prob,
        distribution=trajectory.distribution,
        reference_distribution=reference.distribution,
        reference_log_prob=reference.log_prob,
        reference_features=reference.features,
        advantage=advantage,
        mask=mask,
        weight=weight,
        value=compared.value if trajectory.value is None else trajectory.value,
        target=target,
        action_mask=trajectory.action_mask,
        is_first=trajectory.is_first,
        carry=trajectory.carry,
        whole=whole,
    )
    if not whole.sequences:
        batch = jax.tree.map(lambda leaf: _single_steps(leaf, shuffle_blocks), batch)
    return jax.lax.stop_gradient((batch, baseline_state))


def _single_steps(leaf: jax.Array, num_blocks: int) -> jax.Array:
    """`[T, B, ...]` to `[1, T * B, ...]`, one block of environments after the other."""
    leaf = leaf.reshape(leaf.shape[0], num_blocks, -1, *leaf.shape[2:])
    return jnp.swapaxes(leaf, 0, 1).reshape(1, -1, *leaf.shape[3:])


class _Reference(NamedTuple):
    """The reference policy on a trajectory, as in a `Batch`."""

    distribution: PyTree = None
    log_prob: jax.Array | None = None
    features: jax.Array | None = None


def _run_reference(algorithm: Algorithm, policy: Policy, params: PyTree, trajectory: Trajectory) -> _Reference:
    carry = jax.tree.map(lambda leaf: leaf[0], trajectory.carry)
    is_first = trajectory.is_first.at[0].set(True)  # the carry is the behaviour policy's
    inputs = params, trajectory.observation, carry, is_first
    if policy.logits_chunk is not None:
        features = policy.features(*inputs)
        log_prob = score(policy, params, features, trajectory.action).log_prob
        return _Reference(None, log_prob, features if exact_kl_to_reference in algorithm.penalties else None)
    distribution = mask_actions(policy.sequence(*inputs)[0], trajectory.action_mask)
    return _Reference(distribution, policy.distribution.log_prob(distribution, trajectory.action))


def _kl_to_reference(trajectory: Trajectory, reference_log_prob: jax.Array | None) -> jax.Array | None:
    """`[T, B]`: the estimate k1, 0 where the environment acted; None without a reference."""
    if reference_log_prob is None:
        return None
    kl = divergences.k1(trajectory.log_prob, reference_log_prob)
    return kl if trajectory.imposed is None else jnp.where(trajectory.imposed, 0.0, kl)


def _with_baseline(algorithm: Algorithm, trajectory: Trajectory, arguments: tuple, num_windows: int, state: PyTree):
    """The trajectory with the baseline's values for the critic's, and a stateful baseline's next state."""
    if algorithm.stateful_baseline:
        arguments += (state,)
        value, final_value, state = _baseline_results(algorithm, trajectory, arguments)
    if num_windows > 1 or not algorithm.stateful_baseline:
        value, final_value = _by_window(
            lambda window: _baseline_results(algorithm, window, arguments)[:2], trajectory, num_windows
        )
    value = check_shape("baseline", value, trajectory.reward)
    following = next_values(value, final_value, trajectory.truncated)
    return trajectory._replace(value=value, next_value=following), state


def _baseline_results(algorithm: Algorithm, trajectory: Trajectory, arguments: tuple) -> tuple:
    """Values and final values, and a stateful baseline's next state; raises ValueError for fewer or more."""
    results = tuple(algorithm.baseline(trajectory, *arguments))
    expected = ["values", "final values", *(["next state"] if algorithm.stateful_baseline else [])]
    if len(results) != len(expected):
        raise ValueError(
            f"with stateful_baseline={algorithm.stateful_baseline} the slot 'baseline' should return "
            f"{' and '.join(expected)}, but returned {len(results)} results"
        )
    return results


def _by_window(function: Callable, trajectory: Trajectory, num_windows: int) -> PyTree:
    """The function of each window of a trajectory `[T, W * B]`, side by side again."""
    if num_windows == 1:
        return function(trajectory)
    windows = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], num_windows, -1, *leaf.shape[2:]), trajectory)
    values = jax.vmap(function, in_axes=1, out_axes=1)(windows)
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], -1), values)


def _training_mask(algorithm: Algorithm, trajectory: Trajectory, advantage: jax.Array, group_size: int) -> jax.Array:
    """`[T, B]` bool: the steps to train on."""
    mask = trajectory.acted
    if trajectory.greedy is not None:
        mask &= ~trajectory.greedy
    if algorithm.filter_overlong:
        mask &= jnp.any(trajectory.terminated, axis=0, keepdims=True)
    if trajectory.given is not None:
        mask &= trajectory.given  # the later steps only show how good the given action was
    if algorithm.live_groups_only:
        mask &= live_groups(advantage, mask, group_size)[None]
    return mask


def live_groups(advantage: jax.Array, mask: jax.Array, group_size: int) -> jax.Array:
    """`[B]` bool: members of the groups in which some advantage is not 0."""
    is_live = jnp.any(mask & (advantage != 0), axis=0).reshape(-1, group_size)
    return jnp.repeat(jnp.any(is_live, axis=1), group_size)


def check_shape(slot: str, value: jax.Array, like: jax.Array) -> jax.Array:
    """The value of a slot; raises ValueError if its shape is wrong."""
    if jnp.shape(value) != like.shape:
        raise ValueError(f"the slot {slot!r} returned shape {jnp.shape(value)}, but should return {like.shape}")
    return value

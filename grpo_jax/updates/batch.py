"""From a trajectory to samples: rewards, baselines, advantages, masks and weights, computed once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.algorithms import Algorithm
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives import divergences
from grpo_jax.objectives.returns import gae_advantage, next_values
from grpo_jax.policies import Policy
from grpo_jax.policies.sampling import mask_actions
from grpo_jax.rollouts.groups import one_carry_per_group
from grpo_jax.types import Batch, PyTree, Trajectory, Whole


def kept_whole(algorithm: Algorithm, policy: Policy, group_size: int, *, share_prompts: bool) -> Whole:
    """What no minibatch tears apart: what a slot compares, and the steps and members that one carry is for."""
    return Whole(
        sequences=algorithm.whole_sequences or policy.has_carry,
        members=group_size if share_prompts else 1,
        minibatches=algorithm.whole_minibatches,
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
) -> Batch:
    """The samples of a trajectory; all that stays fixed during the epochs is computed here, once.

    `params` are those that acted. A baseline sees one of the windows at a time: the later ones know what came of the
    actions of the earlier. Advantages are relative to the values of the algorithm's baseline; where it has a
    critic too, the critic's own predictions are what `Batch.value` holds.
    A reference policy with memory starts each rollout from its initial carry: in a window that begins in the middle of
    an episode it has not seen what came before.
    """
    whole = kept_whole(algorithm, policy, group_size, share_prompts=share_prompts)
    if whole.members > 1:
        trajectory = one_carry_per_group(trajectory, whole.members)
    reference_distribution = None
    if algorithm.reference is not None:
        reference_distribution, _ = policy.sequence(
            reference_params,
            trajectory.observation,
            jax.tree.map(lambda leaf: leaf[0], trajectory.carry),
            trajectory.is_first.at[0].set(True),
        )
        reference_distribution = mask_actions(reference_distribution, trajectory.action_mask)
    if algorithm.reward is not None:
        kl = None
        if reference_distribution is not None:
            reference_log_prob = policy.distribution.log_prob(reference_distribution, trajectory.action)
            kl = divergences.k1(trajectory.log_prob, reference_log_prob)
        reward = algorithm.reward(trajectory, kl, hyperparams)
        trajectory = trajectory._replace(reward=_shaped("reward", reward, trajectory.reward))

    compared = trajectory
    if algorithm.baseline is not None:
        value, final_value = _of_each_window(
            lambda window: algorithm.baseline(window, policy, params, hyperparams, group_size), trajectory, num_windows
        )
        value = _shaped("baseline", value, trajectory.reward)
        compared = trajectory._replace(value=value, next_value=next_values(value, final_value, trajectory.truncated))
    advantage = _shaped("advantage", algorithm.advantage(compared, hyperparams, group_size), trajectory.reward)
    target = None if compared.value is None else advantage + compared.value
    if algorithm.baseline is not None and trajectory.value is not None:  # the critic learns of its own states alone
        target = gae_advantage(trajectory, hyperparams, group_size) + trajectory.value
    mask = trajectory.valid
    if trajectory.greedy is not None:
        mask &= ~trajectory.greedy
    if algorithm.filter_overlong:
        mask &= jnp.any(trajectory.terminated, axis=0)
    if trajectory.given is not None:
        mask &= trajectory.given  # what the policy did afterwards only tells the value of the action that was given
    if algorithm.live_groups_only:
        mask &= live_groups(advantage, mask, group_size)
    weight = _shaped("reduce", algorithm.reduce(mask), mask)
    if trajectory.given is not None:
        # One member of the group took each action, which the policy takes with its probability.
        weight *= group_size * jnp.exp(trajectory.log_prob)
    batch = Batch(
        observation=trajectory.observation,
        action=trajectory.action,
        log_prob=trajectory.log_prob,
        distribution=trajectory.distribution,
        reference_distribution=reference_distribution,
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
        batch = jax.tree.map(lambda leaf: leaf.reshape(1, -1, *leaf.shape[2:]), batch)
    return jax.lax.stop_gradient(batch)


def _of_each_window(function: Callable, trajectory: Trajectory, num_windows: int) -> PyTree:
    """What the function makes of each window of a trajectory `[T, W * B]`, side by side again."""
    if num_windows == 1:
        return function(trajectory)
    windows = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], num_windows, -1, *leaf.shape[2:]), trajectory)
    values = jax.vmap(function, in_axes=1, out_axes=1)(windows)
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], -1), values)


def live_groups(advantage: jax.Array, mask: jax.Array, group_size: int) -> jax.Array:
    """`[B]` bool: members of the groups that say of some step that it was better or worse than another."""
    says = jnp.any(mask & (advantage != 0), axis=0).reshape(-1, group_size)
    return jnp.repeat(jnp.any(says, axis=1), group_size)


def _shaped(slot: str, value: jax.Array, like: jax.Array) -> jax.Array:
    """The value, if the slot that made it kept to its shape."""
    if jnp.shape(value) != like.shape:
        raise ValueError(f"the slot {slot!r} returned shape {jnp.shape(value)}, and should return {like.shape}")
    return value

"""From a trajectory to samples: scores, advantages, targets, masks and weights, computed once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.algorithms import Algorithm
from grpo_jax.config import Config
from grpo_jax.groups import one_carry_per_group
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives import divergences
from grpo_jax.objectives.returns import gae_advantage, next_values
from grpo_jax.objectives.slots import bound
from grpo_jax.policies import Policy, combine, partition
from grpo_jax.policies.sampling import mask_actions, score
from grpo_jax.precision import above_rounding
from grpo_jax.types import Batch, PyTree, TrainState, Trajectory
from grpo_jax.updates.lengths import first_steps


def make_batch(
    config: Config,
    policy: Policy,
    state: TrainState,
    trajectory: Trajectory,
    hyperparams: Hyperparams,
    length: int | None = None,
) -> Batch:
    """The samples of a trajectory, with all that stays fixed during the epochs.

    Advantages are relative to the values of the algorithm's baseline, or without one to the critic's.

    Args:
      config: the slots `reward`, `baseline`, `advantage` and `reduce` of its algorithm are called, in this order. A
        baseline sees one window at a time: later windows contain the consequences of the actions in earlier ones.
      policy: as it acted.
      state: its `params` acted. A recurrent reference policy, with `reference_params`, starts each rollout from its
        initial carry, also where the rollout begins in mid-episode.
      trajectory: `[T, B]`.
      hyperparams: every coefficient.
      length: steps from this one on are not valid, and the reference policy does not read them; None: it reads all.

    Returns:
      The batch, `[1, T * B]` single steps, or `[T, B]` where sequences are kept whole. No gradient flows through it.

    Raises:
      ValueError: a slot returned the wrong shape, or lacks something that it needs.
    """
    algorithm, group_size = config.algorithm, config.group_size

    # Scores: the rewards, and the values of states that they are compared with.
    if config.share_prompts:
        trajectory = one_carry_per_group(trajectory, group_size)
    reference = _run_reference(config, policy, state, trajectory, length)
    played = _with_reward(config, trajectory, reference, hyperparams)
    trajectory = played
    if config.env.limit_terminates:  # as if each end were terminal
        trajectory = played._replace(terminated=played.ended, truncated=jnp.zeros_like(played.truncated))
    compared = _with_baseline(config, policy, state, trajectory, hyperparams)

    # Advantages and targets.
    advantage = check_shape("advantage", algorithm.advantage(compared, hyperparams, group_size), trajectory.reward)
    target = _targets(config, trajectory, compared, advantage, hyperparams)
    advantage = _above_rounding(algorithm, advantage, compared)

    # Masks and weights.
    mask = _training_mask(algorithm, played, advantage, group_size)
    weight = check_shape("reduce", bound(algorithm.reduce, hyperparams)(mask), mask)

    batch = Batch(
        observation=trajectory.observation,
        action=trajectory.action,
        log_prob=trajectory.log_prob,
        distribution=trajectory.distribution,
        advantage=advantage,
        mask=mask,
        weight=weight,
        value=compared.value if trajectory.value is None else trajectory.value,
        target=target,
        action_mask=trajectory.action_mask,
        is_first=trajectory.is_first,
        carry=trajectory.carry,
        extras=trajectory.extras,
        whole_sequences=config.keeps_sequences,
        whole_minibatches=algorithm.whole_minibatches,
        **reference,
    )
    if not config.keeps_sequences:
        batch = jax.tree.map(lambda leaf: _single_steps(leaf, config.shuffle_blocks), batch)
    return jax.lax.stop_gradient(batch)


def _single_steps(leaf: jax.Array, num_blocks: int) -> jax.Array:
    """`[T, B, ...]` to `[1, T * B, ...]`, one block of environments after the other."""
    leaf = leaf.reshape(leaf.shape[0], num_blocks, -1, *leaf.shape[2:])
    return jnp.swapaxes(leaf, 0, 1).reshape(1, -1, *leaf.shape[3:])


def _run_reference(
    config: Config, policy: Policy, state: TrainState, trajectory: Trajectory, length: int | None
) -> dict[str, PyTree]:
    """The fields of a `Batch` that the reference policy gives, 0 from step `length` on; none without one."""
    algorithm = config.algorithm
    if algorithm.reference is None:
        return {}
    params = combine(state.reference_params, partition(policy, state.params)[1])
    num_steps, trajectory = len(trajectory.reward), first_steps(trajectory, length)
    carry = jax.tree.map(lambda leaf: leaf[0], trajectory.carry)
    is_first = trajectory.is_first.at[0].set(True)  # the carry is the behaviour policy's
    inputs = params, trajectory.observation, carry, is_first
    if policy.logits_chunk is None:
        distribution = mask_actions(policy.sequence(*inputs)[0], trajectory.action_mask)
        log_prob = policy.distribution.log_prob(distribution, trajectory.action)
        fields = {"reference_distribution": distribution, "reference_log_prob": log_prob}
    else:
        features = policy.features(*inputs)
        scores = score(policy, params, features, trajectory.action, trajectory.action_mask)
        fields = {"reference_log_prob": scores.log_prob}
    return jax.tree.map(lambda x: jnp.zeros_like(x, shape=(num_steps, *x.shape[1:])).at[: len(x)].set(x), fields)


def _with_reward(config: Config, trajectory: Trajectory, reference: dict, hyperparams: Hyperparams) -> Trajectory:
    """The trajectory with the rewards of the slot `reward`, which sees the estimate k1 of the KL to the reference."""
    if config.algorithm.reward is None:
        return trajectory
    kl = None
    if reference:
        kl = divergences.k1(trajectory.log_prob, reference["reference_log_prob"])
        kl = kl if trajectory.forced is None else jnp.where(trajectory.forced, 0.0, kl)  # where the environment acted
    reward = config.algorithm.reward(trajectory, kl, hyperparams)
    return trajectory._replace(reward=check_shape("reward", reward, trajectory.reward))


def _with_baseline(
    config: Config, policy: Policy, state: TrainState, trajectory: Trajectory, hyperparams: Hyperparams
) -> Trajectory:
    """The trajectory with the values of the baseline, if there is one, for the critic's."""
    if config.algorithm.baseline is None:
        return trajectory

    def values(window):
        results = config.algorithm.baseline(window, policy, state.params, hyperparams, config.group_size)
        if len(results) != 2:
            raise ValueError(f"the slot 'baseline' should return values and final values, not {len(results)} results")
        return results

    whole = config.num_windows == 1
    value, final_value = values(trajectory) if whole else _by_window(values, trajectory, config.num_windows)
    value = check_shape("baseline", value, trajectory.reward)
    return trajectory._replace(value=value, next_value=next_values(value, final_value, trajectory.truncated))


def _targets(
    config: Config, trajectory: Trajectory, compared: Trajectory, advantage: jax.Array, hyperparams: Hyperparams
) -> jax.Array | None:
    """The critic's targets `[T, B]`: advantage plus value; beside a baseline or at `critic_lambda`, of its values."""
    algorithm, trace = config.algorithm, hyperparams.critic_lambda
    if algorithm.critic is not None and (algorithm.baseline is not None or trace is not None):
        own = hyperparams if trace is None else hyperparams.replace(gae_lambda=trace)
        return gae_advantage(trajectory, own, config.group_size) + trajectory.value
    return None if compared.value is None else advantage + compared.value


def _above_rounding(algorithm: Algorithm, advantage: jax.Array, trajectory: Trajectory) -> jax.Array:
    """The advantage, or 0 where rounding alone may have made it from values that are returns of other rollouts.

    A minibatch of states whose visits all had the same return has only such advantages, which `normalize` would scale.
    """
    value, valid = trajectory.value, trajectory.valid
    if value is None or (algorithm.baseline is None and algorithm.critic is not None):
        return advantage
    mean_value = jnp.mean(jnp.abs(value), where=valid & jnp.isfinite(value))
    mean_size = jnp.mean(jnp.sum(jnp.abs(trajectory.reward), axis=0, where=valid))
    return above_rounding(advantage, value, mean_value, mean_size)


def _by_window(function: Callable, trajectory: Trajectory, num_windows: int) -> PyTree:
    """The function of each window of a trajectory `[T, W * B]`, side by side again."""
    windows = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], num_windows, -1, *leaf.shape[2:]), trajectory)
    values = jax.vmap(function, in_axes=1, out_axes=1)(windows)
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], -1), values)


def trains_on_all_steps(config: Config) -> bool:
    """Whether `_training_mask` leaves out no step, so that every sample of a batch is valid."""
    algorithm, environment = config.algorithm, config.env
    leaves_out = algorithm.greedy_member or algorithm.filter_overlong or algorithm.live_groups_only
    all_are_valid = algorithm.start.auto_reset and not environment.can_diverge
    return all_are_valid and environment.forced_action is None and not leaves_out


def _training_mask(algorithm: Algorithm, trajectory: Trajectory, advantage: jax.Array, group_size: int) -> jax.Array:
    """`[T, B]` bool: the steps to train on."""
    mask = trajectory.acted
    if trajectory.greedy is not None:
        mask &= ~trajectory.greedy
    if algorithm.filter_overlong:
        mask &= jnp.any(trajectory.terminated, axis=0, keepdims=True)
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

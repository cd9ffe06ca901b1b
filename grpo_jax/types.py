"""The values that pass from folder to folder: `T` steps of `B` environments, time-major, `[T, B, ...]`.

Groups lie side by side along `B`: member `i` of group `g` is environment `g * group_size + i`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from grpo_jax.errors import describe_arrays
from grpo_jax.hyperparams import Hyperparams

PyTree = Any
Metrics = dict[str, jax.Array]


def by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as "params/actor/Dense_0/kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def first_difference(tree: PyTree, other: PyTree) -> tuple[str, str, str] | None:
    """The path of the first leaf that differs in shape or dtype, and both leaves in words; None for trees alike."""
    leaves, others = ({path: describe_arrays(leaf) for path, leaf in by_path(each).items()} for each in (tree, other))
    for path in {**leaves, **others}:
        if leaves.get(path) != others.get(path):
            return path, leaves.get(path, "missing"), others.get(path, "missing")
    return None


class RolloutState(NamedTuple):
    """The state of `B` environments between two rollouts: a value, so that it can be copied, regrouped and saved."""

    environment: PyTree  # environment states, each leaf [B, ...]
    observation: PyTree  # each leaf [B, ...]; one array is a tree too
    policy_carry: PyTree  # carry of the policy, each leaf [B, ...]; a policy without one has no leaves
    episode_return: jax.Array  # [B] sum of the rewards of the current episode
    episode_length: jax.Array  # [B] number of steps of the current episode
    discounted_return: jax.Array  # [B] sum of discount^age * reward, where the latest reward has age 0
    environment_params: PyTree  # traced parameters of the environments, each leaf [B, ...]; resets keep them

    @property
    def num_envs(self) -> int:
        """`B`."""
        return self.episode_length.shape[0]


class RewardParts(NamedTuple):
    """The `K` parts of a reward, which is their weighted sum."""

    values: jax.Array  # [..., K]
    weights: jax.Array  # [..., K]
    rewarded: jax.Array | None = None  # [..., K] bool: the part applied to the step; None: all did

    @property
    def total(self) -> jax.Array:
        """`[...]`: the reward."""
        return (self.values * self.weights).sum(axis=-1)


class Trajectory(NamedTuple):
    """One rollout of `T` steps in `B` environments, time-major. What a run lacks, as values without a critic, is None.

    Attributes:
      observation: each leaf `[T, B, ...]`.
      action: `[T, B]` or `[T, B, D]`, as sampled: before a real action is scaled and clipped.
      reward, reward_parts: `[T, B]`, 0 where not valid; its parts, `[T, B, K]`, where the environment reports them.
      terminated, truncated: `[T, B]` bool: the step led to a terminal state; the time limit ended the episode.
      valid: `[T, B]` bool: False once the episode has diverged, or has ended and no other follows in this rollout.
      log_prob, distribution: `[T, B, ...]` of the action, and parameters of its distribution (not with `logits_chunk`).
      value, next_value: `[T, B]` of a critic, of the observation and the true next one, also at a truncation.
      episode_return, episode_length: `[T, B]` sum of rewards and number of steps of the episode, with this one.
      discounted_return: `[T, B]` as in `RolloutState`, including this step's reward.
      carry: of the behaviour policy before the first step, each leaf `[1, B, ...]`, or `[1, num_groups, ...]`.
      action_mask: `[T, B, num_actions]` bool: legal actions, as bits with `logits_chunk` (`jnp.packbits`).
      final_observation, final_value: `[F, B, ...]`, for baselines: the last observation of each truncated episode, in
        order, then the one after the rollout, and the critic's value there.
      greedy, forced: `[T, B]` bool: the action is the most probable one; the environment itself took it.
      diverged: `[T, B]` bool: the step led to NaN or inf.
      extras: each `[T, B, ...]`, the entries of `info` that `Config.extras` names.
    """

    observation: PyTree
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    valid: jax.Array
    log_prob: jax.Array
    distribution: PyTree
    value: jax.Array | None
    next_value: jax.Array | None
    episode_return: jax.Array
    episode_length: jax.Array
    discounted_return: jax.Array
    carry: PyTree
    action_mask: jax.Array | None = None
    reward_parts: RewardParts | None = None
    final_observation: PyTree = None
    final_value: jax.Array | None = None
    greedy: jax.Array | None = None
    forced: jax.Array | None = None
    diverged: jax.Array | None = None
    extras: dict[str, jax.Array] | None = None

    @property
    def is_first(self) -> jax.Array:
        """`[T, B]` bool: the step was the first of its episode."""
        return self.episode_length == 1

    @property
    def acted(self) -> jax.Array:
        """`[T, B]` bool: the step is valid, and its action is not the environment's own."""
        return self.valid if self.forced is None else self.valid & ~self.forced

    @property
    def ended(self) -> jax.Array:
        """`[T, B]` bool: the step was the last of its episode."""
        return self.terminated | self.truncated


class Batch(struct.PyTreeNode):
    """The samples of an update, `[S, N]`: `S` is 1 for single steps and `T` for whole sequences."""

    observation: PyTree  # each leaf [S, N, ...]
    action: jax.Array  # [S, N] or [S, N, D]
    log_prob: jax.Array  # [S, N] under the behaviour policy
    distribution: PyTree  # [S, N, ...] of the behaviour policy; None with logits_chunk
    advantage: jax.Array  # [S, N]
    mask: jax.Array  # [S, N] bool: samples to train on
    weight: jax.Array  # [S, N] in the loss of the whole batch
    value: jax.Array | None  # [S, N] the critic's during the rollout, or without a critic the baseline's
    target: jax.Array | None  # [S, N] regression target of the critic: advantage plus the value it is relative to
    is_first: jax.Array  # [S, N] bool: first steps of episodes
    carry: PyTree  # carry of the behaviour policy before the first step, [1, N, ...] or [1, N / group_size, ...]
    action_mask: jax.Array | None = None  # [S, N, num_actions] bool, or bits, as in Trajectory
    reference_log_prob: jax.Array | None = None  # [S, N] under the reference policy; None without one
    reference_distribution: PyTree = None  # [S, N, ...] of the reference policy; None without one, or with logits_chunk
    extras: dict[str, jax.Array] | None = None  # each [S, N, ...], of the trajectory
    # What a slot may compare, as the update does not split it. No arrays, and so known while tracing.
    whole_sequences: bool = struct.field(pytree_node=False, default=False)
    whole_minibatches: bool = struct.field(pytree_node=False, default=False)


class Prediction(NamedTuple):
    """The outputs of the current parameters for a batch, each `[S, N]`."""

    log_prob: jax.Array
    entropy: jax.Array
    value: jax.Array | None  # None without a critic
    kl_behaviour: jax.Array  # KL(behaviour || policy), exact or, with logits_chunk, estimated
    kl_reference: jax.Array | None  # KL(policy || reference), in the same way; None without a reference
    reference_log_prob: jax.Array | None  # None without a reference
    params: PyTree = None  # the current parameters that are trained
    compute_features: Callable[[], jax.Array] | None = None

    @property
    def features(self) -> jax.Array:
        """`[S, N, F]`: the input of the actor's head, computed only where a slot reads it.

        Raises:
          ValueError: the policy has none.
        """
        if self.compute_features is None:
            raise ValueError("this policy, a custom network, has no features; give make_pure_policy features=...")
        return self.compute_features()


class StepCount(NamedTuple):
    """The whole number `high * 2^31 + low`, exact up to 2^62: one int32 would overflow after 2^31 steps."""

    high: jax.Array  # int32
    low: jax.Array  # int32, never negative

    def plus(self, number: jax.Array) -> "StepCount":
        """The sum with a number of at most 2^31 - 1."""
        low = self.low + number.astype(jnp.int32)  # negative after an overflow
        return StepCount(self.high + (low < 0).astype(jnp.int32), low & (2**31 - 1))

    def at_most(self, other: "StepCount") -> jax.Array:
        """Whether it is not more than another one."""
        return (self.high < other.high) | ((self.high == other.high) & (self.low <= other.low))

    def as_float(self) -> jax.Array:
        """The number, rounded to float32."""
        return self.high.astype(jnp.float32) * 2.0**31 + self.low.astype(jnp.float32)


class TrainState(struct.PyTreeNode):
    """The whole state of a run, arrays only: vmap it, shard it, donate it, save it, resume from it."""

    params: PyTree
    reference_params: PyTree  # the trained ones; None for an algorithm without a reference policy
    opt_state: PyTree  # of the optimiser, for the trained parameters
    rollout: RolloutState
    normalizer: PyTree  # statistics of observations and returns; None where they are not normalised
    key: jax.Array
    kl_coef: jax.Array  # float32; hyperparams.kl_coef unless a controller adapts it
    entropy_coef: jax.Array  # float32; hyperparams.entropy_coef unless a controller adapts it
    entropy: jax.Array  # float32, mean of the last iteration if a controller follows it; infinity before
    iteration: jax.Array  # int32, completed train steps
    steps: StepCount  # environment steps so far
    last_steps: jax.Array  # int32, of the last iteration; before the first, the most that one makes
    episodes: StepCount  # completed episodes so far
    hyperparams: Hyperparams

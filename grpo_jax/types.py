"""The arrays that flow between the layers. `T` steps, `B` environments, group-major; `[T, B, ...]` is time-major."""

import dataclasses
from typing import Any, NamedTuple

import jax
from flax import struct

from grpo_jax.hyperparams import Hyperparams

PyTree = Any
Metrics = dict[str, jax.Array]


class RolloutState(NamedTuple):
    """Where `B` environments stand between two rollouts: a value, so that it can be copied, regrouped and saved."""

    environment: PyTree  # environment states, each leaf [B, ...]
    observation: jax.Array  # [B, ...]
    policy_carry: PyTree  # memory of the policy, each leaf [B, ...]; no leaves without memory
    episode_return: jax.Array  # [B] reward so far in the current episode
    episode_length: jax.Array  # [B] steps so far in the current episode
    discounted_return: jax.Array  # [B] sum, over the current episode so far, of reward times discount^age
    environment_params: PyTree  # traced parameters of the environments, each leaf [B, ...]; no reset changes them


class RewardParts(NamedTuple):
    """What a reward is the weighted sum of; `K` parts."""

    values: jax.Array  # [..., K]
    weights: jax.Array  # [..., K]


class Trajectory(NamedTuple):
    """One rollout of `T` steps in `B` environments, time-major."""

    observation: jax.Array  # [T, B, ...]
    action: jax.Array  # [T, B] or [T, B, D], as sampled: real ones before they are squashed, scaled and clipped
    reward: jax.Array  # [T, B]; 0 where not valid
    terminated: jax.Array  # [T, B] bool: the episode ended by itself, nothing follows
    truncated: jax.Array  # [T, B] bool: a time limit cut the episode, more would have followed
    valid: jax.Array  # [T, B] bool: False after the end of a one-episode member
    log_prob: jax.Array  # [T, B] of the action, under the behaviour policy
    distribution: PyTree  # [T, B, ...] parameters of the behaviour policy's action distribution
    value: jax.Array | None  # [T, B] of the critic, None without one
    next_value: jax.Array | None  # [T, B] of the true next observation, also where a time limit cut the episode
    episode_return: jax.Array  # [T, B] return of the current episode up to and with this step
    episode_length: jax.Array  # [T, B] steps of the current episode up to and with this step
    discounted_return: jax.Array  # [T, B] as in RolloutState, with this step's reward
    carry: PyTree  # memory of the policy before the first step, each leaf [1, B, ...], or [1, num_groups, ...]
    action_mask: jax.Array | None = None  # [T, B, num_actions] bool: the legal ones; None where all always are
    reward_parts: RewardParts | None = None  # each [T, B, K]; None where the environment does not tell them
    # What no later step begins with, for a baseline to value: in the order of truncation the true final observations
    # of truncated episodes, and last what stands after the window; None without a baseline.
    final_observation: jax.Array | None = None  # [F, B, ...]
    final_carry: PyTree = None  # memory of the policy there, each leaf [F, B, ...]
    final_value: jax.Array | None = None  # [F, B] of the critic there, None without one
    greedy: jax.Array | None = None  # [T, B] bool: the action is the most probable one; None where all are sampled
    given: jax.Array | None = None  # [T, B] bool: the action was imposed, not sampled; None where none was

    @property
    def is_first(self) -> jax.Array:
        """`[T, B]` bool: the step was the first of its episode."""
        return self.episode_length == 1

    @property
    def ended(self) -> jax.Array:
        """`[T, B]` bool: the step was the last of its episode."""
        return self.terminated | self.truncated


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Whole:
    """What stays together when a batch is shuffled and split, so that a slot may compare its parts. Static."""

    sequences: bool = False  # the steps of a rollout, which lie along S in order
    members: int = 1  # neighbouring sequences that have one carry between them: a group with one prompt, or 1
    minibatches: bool = False  # the samples of a gradient step, which is never accumulated over parts


class Batch(NamedTuple):
    """What an update learns from: `[S, N]` samples, `S` = 1 for loose steps, `S` = T for whole sequences."""

    observation: jax.Array  # [S, N, ...]
    action: jax.Array  # [S, N] or [S, N, D]
    log_prob: jax.Array  # [S, N] behaviour policy
    distribution: PyTree  # [S, N, ...] behaviour policy
    reference_distribution: PyTree  # [S, N, ...] reference policy; None without one
    advantage: jax.Array  # [S, N]
    mask: jax.Array  # [S, N] bool
    weight: jax.Array  # [S, N] in the loss of the whole batch
    value: jax.Array | None  # [S, N] behaviour critic, or without one the baseline
    target: jax.Array | None  # [S, N] advantage plus what it is relative to: what the critic regresses on
    is_first: jax.Array  # [S, N] bool: first steps of episodes
    carry: PyTree  # memory of the behaviour policy before the first step, [1, N, ...], or one for each group
    action_mask: jax.Array | None = None  # [S, N, num_actions] bool: the legal ones; None where all always are
    whole: Whole = Whole()


class Prediction(NamedTuple):
    """What the current parameters say of a batch, each `[S, N]`."""

    log_prob: jax.Array
    entropy: jax.Array
    value: jax.Array | None
    kl_behaviour: jax.Array  # exact KL(behaviour || policy)
    kl_reference: jax.Array | None  # exact KL(policy || reference)
    reference_log_prob: jax.Array | None


class Count(NamedTuple):
    """The whole number `units * unit + rest`, where `unit` is the most that one iteration adds, at most 2^30.

    Exact as long as `units` is an int32: for 2^31 iterations.
    """

    units: jax.Array  # int32
    rest: jax.Array  # int32, below the unit


@struct.dataclass
class TrainState:
    """Everything a run is, arrays only: vmap it, shard it, donate it, save it, resume from it."""

    params: PyTree
    reference_params: PyTree  # None for an algorithm without a reference policy
    optimizer: PyTree
    rollout: RolloutState
    normalizer: PyTree  # statistics of observations and returns, None where they are not normalised
    key: jax.Array
    kl_coef: jax.Array  # float32, hyperparams.kl_coef unless a controller adapts it
    iteration: jax.Array  # int32, completed train steps
    steps: Count  # environment steps made
    episodes: Count  # episodes completed
    hyperparams: Hyperparams

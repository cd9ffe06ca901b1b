"""Checks of a `Config` when it is made: the error says what is wrong, why, and what to write instead.

They compare fields and trace nothing. What needs a trace is in `training.checks`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax

from grpo_jax.devices.execution_plan import resolve_plan
from grpo_jax.environments.spaces import Discrete
from grpo_jax.errors import ConfigError, as_count, nearest
from grpo_jax.importing import is_own
from grpo_jax.policies import Architecture
from grpo_jax.policies.architecture import DTYPES

if TYPE_CHECKING:
    from grpo_jax.config import Config

MAX_SAMPLES = 2**26
"""Samples of a batch. With more, fewer than five random bits would be left beside the index: see `updates.shuffle`."""

NAMES = {
    "optimizer": ("adam", "adamw", "sgd", "rmsprop", "muon"),
    "schedule": ("constant", "linear", "cosine"),
}
"""The values of these fields that are names; others are import paths or functions."""

BUILT_IN_FIELDS = (
    *("hidden_sizes", "activation", "layer_norm", "conv_channels", "recurrent", "recurrent_size", "shared_critic"),
    *("critic_hidden_sizes", "critic_activation", "hidden_scale", "actor_scale", "critic_scale", "transformer"),
    "actor_observation",
)
"""The fields of the networks that have a name."""

_ACTIVATIONS = ("tanh", "relu", "gelu", "silu", "elu", "leaky_relu", "sigmoid", "softplus")
_COUNTS = (
    *("num_envs", "group_size", "num_steps", "starts_per_rollout", "regroup_every", "num_kept_groups"),
    *("num_epochs", "num_minibatches", "num_microbatches", "logits_chunk", "shuffle_blocks"),
    *("conv_channels", "recurrent_size", "frame_stack"),
)

MAX_STEPS = 2**30
"""The most environment steps of an iteration, so that int32 holds two iterations' (see `types.StepCount`)."""


def check_counts(config: Config) -> None:
    """Makes counts Python integers, before anything is computed from them; None stands for a field left out."""
    for field in _COUNTS:
        value = getattr(config, field)
        if value is not None:
            object.__setattr__(config, field, as_count(field, value))
    for field in ("hidden_sizes", "critic_hidden_sizes"):
        sizes = getattr(config, field)
        if sizes is None and field == "critic_hidden_sizes":
            continue
        try:
            object.__setattr__(config, field, tuple(as_count(field, size) for size in sizes))
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"{field}={sizes!r} must be positive integers, such as (64, 64)") from error
    if not isinstance(config.transformer, Architecture):
        raise ConfigError(f"transformer={config.transformer!r} must be an Architecture, such as Architecture(width=16)")
    for field in ("hidden_scale", "actor_scale", "critic_scale"):
        value = getattr(config, field)
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"{field}={value!r} is not a gain of initial weights: use a number such as 1.0, or 0")


def check_config(config: Config) -> None:
    """Raises ConfigError for fields that contradict each other, after those that were left out have their values."""
    _check_environment(config)
    _check_policy(config)
    _check_numbers(config)
    _check_groups(config)
    _check_algorithm(config)


def _check_environment(config: Config) -> None:
    """Checks the environment's `outcome` and `forced_action`, if it has them, against the algorithm."""
    env, start = config.env, config.algorithm.start
    if env.outcome is not None and not start.from_reset:
        raise ConfigError(
            f"{env.name!r} rewards whole episodes (it has an outcome), but rollouts of this algorithm begin or end in "
            "mid-episode; use one-episode groups, such as algorithm=PPO._replace(start=FRESH)"
        )
    if env.forced_action is None:
        return
    if not isinstance(env.action_space, Discrete):
        raise ConfigError(
            f"{env.name!r} acts itself at some steps (it has forced_action), but its actions are in "
            f"{env.action_space}; use Discrete actions, of which -1 is none"
        )
    if start.all_actions:
        raise ConfigError(
            f"{env.name!r} acts itself at some steps (it has forced_action), but all_actions compares the policy's own "
            "first actions; use forked(trunk_steps) without it"
        )


def _check_policy(config: Config) -> None:
    """Checks the fields of the policy, and names of the optimiser, its schedule and its moments' type."""
    for field in ("network", "action_distribution"):
        _check_value(field, getattr(config, field))
    for field in ("activation", "critic_activation"):
        _check_activation(field, getattr(config, field))
    for field in ("critic_hidden_sizes", "critic_activation"):
        if config.shared_critic and getattr(config, field) is not None:
            raise ConfigError(
                f"{field}={getattr(config, field)!r} is for a critic that is a separate network, but "
                "shared_critic=True; leave out one of the two"
            )
    if config.has_own_network:
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
        for field in BUILT_IN_FIELDS:
            if getattr(config, field) != defaults[field]:
                raise ConfigError(
                    f"{field}={getattr(config, field)!r} has no effect on a custom network; leave it out, and set "
                    "it in the network"
                )
    for field in NAMES:
        check_name(field, getattr(config, field))
    if config.moments_dtype not in DTYPES:
        raise ConfigError(f"moments_dtype={config.moments_dtype!r}; use one of {', '.join(DTYPES)}")


def check_name(field: str, value: Any) -> None:
    """Raises ConfigError for a name that none of the library's optimisers or schedules has."""
    if not is_own(value) and value not in NAMES[field]:
        raise ConfigError(f"unknown {field} {value!r}: {nearest(value, NAMES[field])}")


def _check_value(field: str, value: Any) -> None:
    if not isinstance(value, str) and not callable(value):
        raise ConfigError(f"{field}={value!r} must be a name, a path 'package.module:name' or a function")
    try:
        hash(value)
    except TypeError as error:
        raise ConfigError(f"{field}={value!r} cannot be hashed; use a function or a frozen dataclass") from error


def _check_activation(field: str, name: str | None) -> None:
    if name is None and field == "critic_activation":
        return
    activation = getattr(nn, str(name), None)
    if not callable(activation) or isinstance(activation, type):
        raise ConfigError(f"unknown {field} {name!r}: {nearest(str(name), _ACTIVATIONS)}")


def _check_numbers(config: Config) -> None:
    """Checks numbers against each other, after fields that were left out have their values."""
    resolve_plan(config.execution_plan)
    if config.steps_per_iteration > MAX_STEPS:
        branches = f", {config.branch_steps} of them in branches that value states" if config.branch_steps else ""
        raise ConfigError(
            f"one iteration may make {config.steps_per_iteration} environment steps{branches}, more than can be "
            f"counted, {MAX_STEPS} (2^30); use fewer num_envs or num_steps, or shorter episodes"
        )
    if config.num_envs % config.group_size:
        above = -(-config.num_envs // config.group_size) * config.group_size
        nearest_sizes = " or ".join(str(size) for size in (above - config.group_size, above) if size > 0)
        raise ConfigError(
            f"num_envs={config.num_envs} is not a multiple of group_size={config.group_size}, so the last group would "
            f"be incomplete; use num_envs={nearest_sizes}"
        )
    if config.is_transformer:
        _check_transformer(config)
    if config.share_prompts and not (config.algorithm.start.from_reset and config.is_transformer):
        raise ConfigError(
            "share_prompts=True is for transformers in one-episode groups, whose members have one prompt; leave it out"
        )
    if config.truncate_sampling and not config.is_transformer:
        raise ConfigError("truncate_sampling=True is for transformers; leave it out")
    if config.logits_chunk is not None:
        _check_logits_chunk(config)
    members, sequences = config.members_per_carry, config.keeps_sequences
    num_samples = config.num_training_steps // ((config.window_steps if sequences else 1) * members)
    if config.num_kept_groups is not None:
        what = "samples of num_kept_groups"
    elif config.num_windows > 1:
        what = "samples of all windows"
    elif config.share_prompts:
        what = "num_envs / group_size (whole groups, share_prompts=True)"
    else:
        what = "num_envs (whole sequences)" if sequences else "num_envs * num_steps"
    if num_samples > MAX_SAMPLES:
        raise ConfigError(
            f"{what} = {num_samples} samples of one iteration are more than can be shuffled, {MAX_SAMPLES} (2^26); use "
            "fewer num_envs or num_steps"
        )
    num_units = config.num_training_groups * config.group_size // members
    if num_units % config.shuffle_blocks:
        raise ConfigError(
            f"shuffle_blocks={config.shuffle_blocks} does not divide the {num_units} "
            f"{'groups' if members > 1 else 'environments'} of a batch into equal blocks; use a divisor, or 1"
        )
    if config.shuffle_blocks > 1:
        num_samples, what = num_samples // config.shuffle_blocks, f"{what} / shuffle_blocks"
    if num_samples % config.num_minibatches:
        divisors = [n for n in range(1, num_samples + 1) if num_samples % n == 0]
        best = min(divisors, key=lambda n: abs(n - config.num_minibatches))
        raise ConfigError(
            f"{what} = {num_samples} is not divisible by num_minibatches={config.num_minibatches}, so minibatches "
            f"would differ in size; use num_minibatches={best}"
        )
    if config.algorithm.whole_minibatches and config.num_microbatches not in (None, 1):
        raise ConfigError(
            f"num_microbatches={config.num_microbatches}, but a slot of the algorithm compares the samples of a "
            "minibatch with each other; leave it out"
        )
    if num_samples // config.num_minibatches % (config.num_microbatches or 1):
        raise ConfigError(
            f"a minibatch of {num_samples // config.num_minibatches} is not divisible by num_microbatches="
            f"{config.num_microbatches}; use None to have it chosen"
        )


def _check_logits_chunk(config: Config) -> None:
    """Checks that the log-probabilities of the sampled tokens suffice."""
    if not config.is_transformer:
        raise ConfigError("logits_chunk is for transformers with a large vocabulary; leave it out")
    if config.env.action_mask is not None or config.truncate_sampling:
        raise ConfigError(
            "logits_chunk keeps only log-probabilities of sampled tokens, but a mask of tokens, of the environment or "
            "of truncate_sampling=True, belongs to whole distributions; leave one of the two out"
        )


def _check_groups(config: Config) -> None:
    """Checks the fields about groups against how the groups start."""
    start, env = config.algorithm.start, config.env
    if config.num_steps % config.window_steps:
        raise ConfigError(
            f"num_steps={config.num_steps} is not a multiple of regroup_every={config.regroup_every}; use num_steps="
            f"{max(1, config.num_steps // config.regroup_every) * config.regroup_every}"
        )
    if config.regroup_every is not None and not (start.auto_reset and start.grouped):
        raise ConfigError(
            "regroup_every is for anchored groups, whose environments continue; leave it out, or use start=ANCHORED"
        )
    num_played = config.num_windows * config.num_groups
    if config.num_kept_groups is not None and (config.group_size < 2 or config.num_kept_groups > num_played):
        raise ConfigError(
            f"num_kept_groups={config.num_kept_groups} are to be chosen from {num_played} groups of "
            f"{config.group_size}, by how much members differ; keep at most {num_played}, of 2 members or more"
        )
    group_fields = {
        **{"num_kept_groups": config.num_kept_groups, "common_random_numbers": config.common_random_numbers},
        "live_groups_only": config.algorithm.live_groups_only,
    }
    for field, value in group_fields.items():
        if value and not start.grouped:
            raise ConfigError(
                f"{field} is for groups that start from one state, but here every environment continues from its own; "
                "leave it out, or use start=ANCHORED"
            )
    if config.num_kept_groups is not None and config.algorithm.baseline is not None:
        raise ConfigError(
            "a baseline compares all environments, but num_kept_groups leaves some out; leave out one of the two"
        )
    if config.common_random_numbers and config.group_size < 2:
        raise ConfigError("common_random_numbers=True needs members to share them, and group_size is 1; leave it out")
    if config.starts_per_rollout is not None and start.from_reset:
        raise ConfigError(
            f"starts_per_rollout={config.starts_per_rollout} is for rollouts in which an episode follows another, but "
            "this algorithm has one episode and one start state for each group already; leave it out"
        )
    if start.from_reset and config.num_steps < env.max_steps and not config.cut_episodes:
        raise ConfigError(
            f"num_steps={config.num_steps} is below the episode limit of {env.name}, {env.max_steps}: members of a "
            f"one-episode group would be cut off in mid-episode; use num_steps={env.max_steps}, or cut_episodes=True "
            "to compare the returns up to the cut"
        )


def _check_algorithm(config: Config) -> None:
    """Checks the switches of the algorithm against each other and against the groups."""
    algorithm = config.algorithm
    if algorithm.start.all_actions:
        _check_all_actions(config)
    if algorithm.num_branches:
        _check_branches(config)
    if algorithm.reference is not None and config.normalize_observations:
        raise ConfigError(
            "normalize_observations=True would change what a reference policy sees, and so the policy itself, with "
            "every rollout; leave one of the two out"
        )
    if algorithm.filter_overlong and algorithm.start.auto_reset:
        raise ConfigError(
            "filter_overlong=True leaves out episodes that a limit cuts, but rollouts of this algorithm begin and end "
            "in mid-episode; it is for one-episode groups (start=FRESH)"
        )
    if algorithm.live_groups_only and config.group_size < 2:
        raise ConfigError(
            f"live_groups_only=True compares members of groups, but group_size={config.group_size}; leave it out"
        )
    if algorithm.greedy_member and algorithm.start.auto_reset:
        raise ConfigError(
            "greedy_member=True compares whole episodes, but these continue across rollouts; use start=FRESH"
        )
    if algorithm.greedy_member and config.group_size < 2:
        raise ConfigError(
            f"group_size={config.group_size} leaves no member beside the greedy one, which gives no gradient; use "
            "group_size=2 or more"
        )


def _check_branches(config: Config) -> None:
    """Checks that branches can be played to the end of their episodes, and that nothing else values the same states."""
    algorithm = config.algorithm
    as_count("num_branches", algorithm.num_branches)
    if not algorithm.start.from_reset or config.num_steps < config.env.max_steps:
        raise ConfigError(
            f"num_branches={algorithm.num_branches} plays on from every state to the end of its episode, so a rollout "
            "must be one whole episode; use start=FRESH without cut_episodes, or num_branches=0"
        )
    others = {name: getattr(algorithm, name) for name in ("critic", "baseline", "reward")}
    for name, value in {**others, "normalize_rewards": config.normalize_rewards or None}.items():
        if value is not None:
            raise ConfigError(
                f"num_branches={algorithm.num_branches} values states by the rewards of branches, but {name} gives "
                "other values or rewards; leave out one of the two"
            )


def _check_all_actions(config: Config) -> None:
    algorithm, env = config.algorithm, config.env
    others = {
        **{"critic": algorithm.critic, "baseline": algorithm.baseline, "normalize": algorithm.normalize},
        **{"greedy_member": algorithm.greedy_member, "filter_overlong": algorithm.filter_overlong},
    }
    for slot, value in others.items():
        if value not in (None, False):
            raise ConfigError(f"{slot} has no meaning where all actions of a state are compared; leave it out")
    if not isinstance(env.action_space, Discrete) or env.action_mask is not None:
        raise ConfigError(
            f"all_actions needs Discrete actions that are always legal, but {env.name!r} has {env.action_space}"
            f"{' with a mask' if env.action_mask is not None else ''}; use forked(trunk_steps) without it"
        )
    if config.group_size != env.action_space.num_actions:
        raise ConfigError(
            f"group_size={config.group_size}, but all_actions needs a member for each of the actions of {env.name!r}; "
            f"use group_size={env.action_space.num_actions}"
        )


def _check_transformer(config: Config) -> None:
    env = config.env
    observed = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(env.observation)]
    if observed != ["int32[]"] or not isinstance(env.action_space, Discrete):
        raise ConfigError(
            f"a transformer observes a token (an int32 scalar) and chooses the next (Discrete), but {env.name!r} has "
            f"observations {', '.join(observed)} and actions {env.action_space}; use network='mlp'"
        )
    if not config.algorithm.start.from_reset:
        raise ConfigError(
            "a transformer reads its prompt where a rollout begins, so rollouts must begin with episodes, but those of "
            "this algorithm continue; use one-episode groups, such as algorithm=PPO._replace(start=FRESH)"
        )
    if config.recurrent != "none" or config.normalize_observations or config.actor_observation is not None:
        raise ConfigError(
            "a transformer has its own cache, and tokens have neither a mean nor parts; leave out recurrent, "
            "normalize_observations and actor_observation"
        )

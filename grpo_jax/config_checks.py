"""Checks of a `Config` when it is made: the error says what is wrong, why, and what to write instead.

They compare fields and trace nothing. What needs a trace is in `training.checks`. `config` is a `Config` everywhere,
whose module imports this one.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import jax

from grpo_jax.devices.execution_plan import resolve_plan
from grpo_jax.environments.spaces import Discrete
from grpo_jax.errors import ConfigError, as_count
from grpo_jax.objectives import exact_kl_to_reference
from grpo_jax.policies.transformer import Transformer

MAX_SAMPLES = 2**26
"""Samples of a batch. With more, fewer than five random bits would be left beside the index: see `sorted_order`."""

MAX_STEPS = 2**30
"""The most environment steps of an iteration, so that int32 holds two iterations' (see `types.StepCount`)."""

_COUNTS = (
    *("num_envs", "group_size", "num_steps", "starts_per_rollout", "regroup_every", "num_kept_groups"),
    *("num_epochs", "num_minibatches", "num_microbatches", "logits_chunk", "shuffle_blocks"),
)

Rules = Iterator[tuple[Any, str]]
"""Pairs of a condition that no config may meet and the message of the error; later ones rely on earlier ones."""


def check_counts(config: Any) -> None:
    """Makes counts Python integers, before anything is computed from them; None stands for a field left out."""
    for field in _COUNTS:
        value = getattr(config, field)
        if value is None and type(config).__dataclass_fields__[field].default is not None:
            raise ConfigError(f"{field}=None has no meaning; leave it out for its default")
        if value is not None:
            object.__setattr__(config, field, as_count(field, value))


def check_switches(config: Any) -> None:
    """Raises ConfigError for a switch that is neither True nor False."""
    for name, field in type(config).__dataclass_fields__.items():
        if isinstance(field.default, bool) and not isinstance(getattr(config, name), bool):
            raise ConfigError(f"{name}={getattr(config, name)!r} must be True or False")


def check_function(field: str, value: Any) -> None:
    """Raises ConfigError for what is neither a name nor a function that can be compared with others."""
    if not isinstance(value, str | Transformer) and not callable(value):
        raise ConfigError(f"{field}={value!r} must be a name, a path 'package.module:name' or a function")
    try:
        hash(value)
    except TypeError as error:
        raise ConfigError(f"{field}={value!r} cannot be hashed; use a function or a frozen dataclass") from error


def check_extras(extras: Any) -> None:
    """Raises ConfigError unless `extras` is a sequence of names."""
    if not isinstance(extras, tuple | list) or not all(isinstance(name, str) for name in extras):
        raise ConfigError(f"extras={extras!r} must be a tuple of names, such as ('discount',)")


def check_config(config: Any) -> None:
    """Raises ConfigError for fields that contradict each other, after those that were left out have their values."""
    check_function("action_distribution", config.action_distribution)
    resolve_plan(config.execution_plan)
    rules = _environment, _sizes, _transformer, _minibatches, _groups, _algorithm
    for is_broken, message in itertools.chain.from_iterable(rule(config) for rule in rules):
        if is_broken:
            raise ConfigError(message)


def _environment(config: Any) -> Rules:
    """The environment's `outcome` and `forced_action`, if it has them, against the algorithm."""
    env, start = config.env, config.algorithm.start
    yield (
        (env.outcome is not None or env.host is not None) and not start.from_reset,
        f"{env.name!r} rewards whole episodes (it has an outcome), but rollouts of this algorithm begin or end in "
        "mid-episode; use one-episode groups, such as algorithm=PPO._replace(start=FRESH)",
    )
    acts = f"{env.name!r} acts itself at some steps (it has forced_action), but"
    yield (
        env.forced_action is not None and not isinstance(env.action_space, Discrete),
        f"{acts} its actions are in {env.action_space}; use Discrete actions, of which -1 is none",
    )


def _sizes(config: Any) -> Rules:
    """The sizes of an iteration and of its groups."""
    yield (
        config.steps_per_iteration > MAX_STEPS,
        f"one iteration may make {config.steps_per_iteration} environment steps, more than can be counted, "
        f"{MAX_STEPS} (2^30); use fewer num_envs or num_steps, or shorter episodes",
    )
    above = -(-config.num_envs // config.group_size) * config.group_size
    nearest_sizes = " or ".join(str(size) for size in (above - config.group_size, above) if size > 0)
    yield (
        config.num_envs % config.group_size,
        f"num_envs={config.num_envs} is not a multiple of group_size={config.group_size}, so the last group would be "
        f"incomplete; use num_envs={nearest_sizes}",
    )


def _transformer(config: Any) -> Rules:
    """What only a transformer may have, and what it needs."""
    env, from_reset, is_transformer = config.env, config.algorithm.start.from_reset, config.is_transformer
    observed = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(env.observation)]
    yield (
        is_transformer and (observed != ["int32[]"] or not isinstance(env.action_space, Discrete)),
        f"a transformer observes a token (an int32 scalar) and chooses the next (Discrete), but {env.name!r} has "
        f"observations {', '.join(observed)} and actions {env.action_space}; use network='mlp'",
    )
    yield (
        is_transformer and not from_reset,
        "a transformer reads its prompt where a rollout begins, so rollouts must begin with episodes, but those of "
        "this algorithm continue; use one-episode groups, such as algorithm=PPO._replace(start=FRESH)",
    )
    yield (
        is_transformer and config.normalize_observations,
        "normalize_observations=True is for numbers, and a transformer observes tokens; leave it out",
    )
    for field in ("share_prompts", "truncate_sampling", "logits_chunk"):
        value = getattr(config, field)
        yield value and not is_transformer, f"{field}={value} is for transformers; leave it out"
    yield (
        config.logits_chunk and exact_kl_to_reference in config.algorithm.penalties,
        f"logits_chunk={config.logits_chunk} keeps no distributions, which exact_kl_to_reference compares; use "
        "kl_to_reference, or leave logits_chunk out",
    )


def _minibatches(config: Any) -> Rules:
    """How the samples of an iteration are divided."""
    members, sequences = config.members_together, config.keeps_sequences
    num_units = config.num_training_groups * config.group_size // members
    num_samples = num_units if sequences else num_units * config.window_steps
    if config.num_kept_groups is not None:
        what = "samples of num_kept_groups"
    elif config.num_windows > 1:
        what = "samples of all windows"
    elif members > 1:
        why = "share_prompts=True" if config.share_prompts else "which group_surrogate compares"
        what = f"num_envs / group_size (whole groups, {why})"
    else:
        what = "num_envs (whole sequences)" if sequences else "num_envs * num_steps"
    yield (
        num_samples > MAX_SAMPLES,
        f"{what} = {num_samples} samples of one iteration are more than can be shuffled, {MAX_SAMPLES} (2^26); use "
        "fewer num_envs or num_steps",
    )
    yield (
        num_units % config.shuffle_blocks,
        f"shuffle_blocks={config.shuffle_blocks} does not divide the {num_units} "
        f"{'groups' if members > 1 else 'environments'} of a batch into equal blocks; use a divisor, or 1",
    )
    if config.shuffle_blocks > 1:
        num_samples, what = num_samples // config.shuffle_blocks, f"{what} / shuffle_blocks"
    size, rest = divmod(num_samples, config.num_minibatches)
    if rest:
        divisors = [n for n in range(1, num_samples + 1) if num_samples % n == 0]
        best = min(divisors, key=lambda n: abs(n - config.num_minibatches))
        yield (
            True,
            f"{what} = {num_samples} is not divisible by num_minibatches={config.num_minibatches}, so minibatches "
            f"would differ in size; use num_minibatches={best}",
        )
    parts = config.num_microbatches or 1
    yield (
        config.algorithm.whole_minibatches and parts > 1,
        f"num_microbatches={parts}, but a slot of the algorithm compares the samples of a minibatch with each other; "
        "leave it out",
    )
    unit = "group(s)" if members > 1 else "sequence(s)" if sequences else "sample(s)"
    yield size % parts, f"a minibatch of {size} {unit} is not divisible by num_microbatches={parts}; leave it out"


def _groups(config: Any) -> Rules:
    """The fields about groups against how the groups start."""
    start, env, num_steps, kept = config.algorithm.start, config.env, config.num_steps, config.num_kept_groups
    yield (
        num_steps % config.window_steps,
        f"num_steps={num_steps} is not a multiple of regroup_every={config.regroup_every}; use num_steps="
        f"{max(1, num_steps // config.window_steps) * config.window_steps}",
    )
    yield (
        config.regroup_every is not None and not (start.auto_reset and start.grouped),
        "regroup_every is for anchored groups, whose environments continue; leave it out, or use start=ANCHORED",
    )
    num_played = config.num_windows * config.num_groups
    yield (
        kept is not None and (config.group_size < 2 or kept > num_played),
        f"num_kept_groups={kept} are to be chosen from {num_played} groups of {config.group_size}, by how much members "
        f"differ; keep at most {num_played}, of 2 members or more",
    )
    for field, value in (
        ("num_kept_groups", kept),
        ("live_groups_only", config.algorithm.live_groups_only),
        ("group_surrogate", config.algorithm.group_surrogate),
    ):
        yield (
            value and not start.grouped,
            f"{field} is for groups that start from one state, but here every environment continues from its own; "
            "leave it out, or use start=ANCHORED",
        )
    yield (
        kept is not None and config.algorithm.baseline is not None,
        "a baseline compares all environments, but num_kept_groups leaves some out; leave out one of the two",
    )
    yield (
        config.starts_per_rollout is not None and start.from_reset,
        f"starts_per_rollout={config.starts_per_rollout} is for rollouts in which an episode follows another, but "
        "this algorithm has one episode and one start state for each group already; leave it out",
    )
    yield (
        start.from_reset and num_steps < env.max_steps and not config.cut_episodes,
        f"num_steps={num_steps} is below the episode limit of {env.name}, {env.max_steps}: members of a one-episode "
        f"group would be cut off in mid-episode; use num_steps={env.max_steps}, or cut_episodes=True to compare the "
        "returns up to the cut",
    )


def _algorithm(config: Any) -> Rules:
    """The switches of the algorithm against each other and against the groups."""
    algorithm, size = config.algorithm, config.group_size
    yield (
        algorithm.reference is not None and config.normalize_observations,
        "normalize_observations=True would change what a reference policy sees, and so the policy itself, with every "
        "rollout; leave one of the two out",
    )
    for switch in ("filter_overlong", "greedy_member"):
        yield (
            getattr(algorithm, switch) and algorithm.start.auto_reset,
            f"{switch}=True is about whole episodes, but those of this algorithm continue across rollouts; use "
            "one-episode groups (start=FRESH)",
        )
    for slot in ("live_groups_only", "greedy_member", "group_surrogate"):
        yield (
            getattr(algorithm, slot) and size < 2,
            f"{slot} compares members of groups, but group_size={size} leaves no others; use group_size=2 or more",
        )

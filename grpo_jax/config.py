"""The static half of a run: what changes a shape or a branch. Frozen, hashable, checked at construction."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import rollout, updates
from grpo_jax.algorithms import Algorithm, by_name
from grpo_jax.distributions import make_distribution
from grpo_jax.environments import Environment, make_environment
from grpo_jax.errors import ConfigError, as_count, nearest
from grpo_jax.groups import one_carry_per_group
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.networks import Architecture, Policy, make_policy, make_token_policy
from grpo_jax.shuffle import MAX_SAMPLES
from grpo_jax.spaces import Discrete
from grpo_jax.types import RewardParts, Trajectory


@dataclasses.dataclass(frozen=True)
class Config(Architecture):
    """Which environment, which algorithm, how many of what. Floats are not here: see `Hyperparams`.

    `group_size` and `num_steps` may be left out: they become what suits the algorithm and the environment, and read
    as integers afterwards. `dataclasses.replace` keeps those integers; to have them chosen anew, pass None for them.

    Raises:
      ConfigError: at construction, for anything that could not run, saying what would do instead.
    """

    environment: str | Any = "CartPole-v1"
    """Name of a gymnax environment, suite:name, package.module:Name (or an object with gymnax's interface)."""
    algorithm: str | Algorithm = "grpo"
    """Name of an algorithm (or a value of `Algorithm`)."""
    num_envs: int = 128
    """Parallel environments."""
    group_size: int | None = None
    """Environments that start from the same state; by default up to 16, or 1 without groups."""
    num_steps: int | None = None
    """Steps of each environment in one rollout; the episode limit for one-episode groups, else 128, if left out."""
    regroup_every: int | None = None
    """Steps until anchored groups gather again; None: they do so once in a rollout, at its start."""
    num_kept_groups: int | None = None
    """Groups learnt from, those whose returns differ most (dynamic sampling); None: all that are played."""
    common_random_numbers: bool = False
    """Members of a group share all randomness but that of their actions."""
    num_epochs: int = 4
    """Passes over the samples of a rollout."""
    num_minibatches: int = 16
    """Gradient steps in each pass."""
    num_microbatches: int | None = None
    """Parts that a gradient step's samples are processed in, one after the other; None has it chosen by size."""
    network: str = "auto"
    """Hidden layers: "mlp" (dense), "cnn" (a 3×3 convolution before those), "transformer" (of tokens, sizes below),
    or "auto": "cnn" for images, "transformer" where there is a prompt."""
    memory: str = "none"
    """What policies remember of an episode: "none" (nothing), or "gru", a recurrent layer before the heads."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the dense hidden layers, of the actor and of the critic."""
    conv_channels: int = 16
    """Channels of the CNN's convolution."""
    memory_size: int = 64
    """Units of the GRU."""
    activation: str = "tanh"
    """Activation function by its name in flax.linen."""
    action_distribution: str = "auto"
    """Over real actions: "gaussian", clipped to the bounds ("auto"), or "squashed_gaussian"; else "auto"."""
    state_dependent_std: bool = False
    """Standard deviations of real actions depend on the observation; otherwise they are free parameters."""
    normalize_observations: bool = False
    """Show the policy observations less their running mean, in running standard deviations."""
    normalize_rewards: bool = False
    """Learn from rewards in running standard deviations of the discounted return."""
    shared_critic: bool = False
    """The critic is a second head of the actor's network, in place of a network of its own."""
    hidden_scale: float = math.sqrt(2)
    """Gain of the hidden layers' initial weights, which are orthogonal."""
    actor_scale: float = 0.01
    """Gain of the initial weights of the actor's head: small, so that all actions begin about equally likely."""
    critic_scale: float = 1.0
    """Gain of the initial weights of the critic's head."""
    share_prompts: bool | None = None
    """Minibatches are of whole groups, and an update reads their prompt once; None: a transformer's, where possible."""
    truncate_sampling: bool = False
    """A transformer samples only from its most probable tokens: hyperparameters top_k and top_p."""
    cut_episodes: bool = False
    """Allow rollouts shorter than an episode of a one-episode group; longer episodes are then cut off."""
    env_params: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    """Parameters of the environment to override, such as max_steps_in_episode=200."""

    def __post_init__(self):
        """Resolves what was left out and checks the whole."""
        super().__post_init__()
        resolve = functools.partial(object.__setattr__, self)
        if not isinstance(self.algorithm, Algorithm):
            resolve("algorithm", by_name(str(self.algorithm)))
        _check_counts(self)
        env_params = sorted(dict(self.env_params).items())
        plain = ((name, value.item() if isinstance(value, np.generic) else value) for name, value in env_params)
        resolve("env_params", tuple(plain))
        one_episode = not self.algorithm.start.auto_reset
        if self.group_size is None:
            divisors = [size for size in range(1, 17) if self.num_envs % size == 0]
            resolve("group_size", divisors[-1] if self.algorithm.start.grouped else 1)
        if self.num_steps is None:
            resolve("num_steps", self.env.max_steps if one_episode else 128)
        if self.share_prompts is None:
            in_groups = self.num_learnt_groups % self.num_minibatches == 0 and self.group_size > 1
            at_reset = one_episode and not self.algorithm.start.lead_steps
            resolve("share_prompts", self.is_transformer and at_reset and in_groups)
        _check_numbers(self)
        _check_groups(self)
        from_reset = one_episode and not self.algorithm.start.lead_steps
        if from_reset and self.num_steps < self.env.max_steps and not self.cut_episodes:
            raise ConfigError(
                f"num_steps={self.num_steps} is below the episode limit of {self.env.name}, {self.env.max_steps}: "
                "members of a one-episode group would be cut off in mid-episode; use "
                f"num_steps={self.env.max_steps}, or cut_episodes=True to compare the returns up to the cut"
            )
        _check_slots(self)

    @property
    def num_groups(self) -> int:
        """Groups that are played at a time."""
        return self.num_envs // self.group_size

    @property
    def window_steps(self) -> int:
        """Steps between two starts of the groups."""
        return self.regroup_every or self.num_steps

    @property
    def num_windows(self) -> int:
        """How often groups start in an iteration."""
        return self.num_steps // self.window_steps

    @property
    def num_learnt_groups(self) -> int:
        """Groups that an iteration learns from."""
        return self.num_kept_groups or self.num_windows * self.num_groups

    @property
    def num_learnt_steps(self) -> int:
        """Steps, valid or not, that an iteration learns from."""
        return self.num_learnt_groups * self.group_size * self.window_steps

    @property
    def lead_steps(self) -> int:
        """Environment steps in an iteration before forked groups split off: made, and not learnt from."""
        return self.num_groups * self.algorithm.start.lead_steps

    @property
    def steps_per_iteration(self) -> int:
        """The most environment steps one iteration can make; one-episode groups often make fewer."""
        return self.num_envs * self.num_steps + self.lead_steps

    @property
    def is_transformer(self) -> bool:
        """Whether the policy is one."""
        return self.network == "transformer" or (self.network == "auto" and self.env.prompt is not None)

    @functools.cached_property
    def env(self) -> Environment:
        """The environment's pure functions."""
        return make_environment(self.environment, dict(self.env_params))

    @functools.cached_property
    def policy(self) -> Policy:
        """The policy's pure functions."""
        distribution = make_distribution(
            self.env.action_space, self.action_distribution, state_dependent_std=self.state_dependent_std
        )
        critic = self.algorithm.critic is not None
        if self.is_transformer:
            return make_token_policy(
                Architecture(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Architecture)}),
                distribution,
                max_steps=self.env.max_steps + critic,  # a critic also reads the last token, for its value
                critic=critic,
                shared_critic=self.shared_critic,
            )
        return make_policy(
            self.env.observation,
            distribution,
            network=self.network,
            memory=self.memory,
            hidden_sizes=self.hidden_sizes,
            conv_channels=self.conv_channels,
            memory_size=self.memory_size,
            activation=self.activation,
            hidden_scale=self.hidden_scale,
            actor_scale=self.actor_scale,
            critic_scale=self.critic_scale,
            critic=critic,
            shared_critic=self.shared_critic,
        )


_COUNTS = (
    *("num_envs", "group_size", "num_steps", "regroup_every", "num_kept_groups"),
    *("num_epochs", "num_minibatches", "num_microbatches"),
    *("conv_channels", "memory_size"),
)


def _check_counts(config: Config) -> None:
    """Before anything is computed from them, as Python's integers; None is what was left out."""
    for field in _COUNTS:
        value = getattr(config, field)
        if value is not None:
            object.__setattr__(config, field, as_count(field, value))
    sizes = config.hidden_sizes
    try:
        object.__setattr__(config, "hidden_sizes", tuple(as_count("hidden_sizes", size) for size in sizes))
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"hidden_sizes={sizes!r} must be positive integers, such as (64, 64)") from error
    for field in ("hidden_scale", "actor_scale", "critic_scale"):
        value = getattr(config, field)
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"{field}={value!r} is not a gain of initial weights: use a number such as 1.0, or 0")


def _check_numbers(config: Config) -> None:
    """Once everything is resolved."""
    activation = getattr(nn, str(config.activation), None)
    if not callable(activation) or isinstance(activation, type):
        raise ConfigError(f"unknown activation {config.activation!r}: {nearest(str(config.activation), _ACTIVATIONS)}")
    if config.num_envs % config.group_size:
        above = -(-config.num_envs // config.group_size) * config.group_size
        nearest_sizes = " or ".join(str(size) for size in (above - config.group_size, above) if size > 0)
        raise ConfigError(
            f"num_envs={config.num_envs} is not a multiple of group_size={config.group_size}, so the last group would "
            f"be incomplete; use num_envs={nearest_sizes}"
        )
    if config.is_transformer:
        _check_transformer(config)
    if config.share_prompts and (config.algorithm.start.auto_reset or not config.is_transformer):
        raise ConfigError(
            "share_prompts=True is for transformers in one-episode groups, whose members have one prompt; leave it out"
        )
    if config.truncate_sampling and not config.is_transformer:
        raise ConfigError("truncate_sampling=True is for transformers; leave it out")
    of_kept = config.num_kept_groups is not None
    num_samples, what = config.num_learnt_steps, "num_envs * num_steps"
    if config.share_prompts:
        num_samples, what = config.num_learnt_groups, "num_envs / group_size (whole groups, share_prompts=True)"
    elif updates.of_whole_sequences(config.algorithm, config.policy):
        num_samples, what = num_samples // config.window_steps, "num_envs (whole sequences)"
    if of_kept or config.num_windows > 1:
        what = "samples of all windows" if not of_kept else "samples of num_kept_groups"
    if num_samples > MAX_SAMPLES:
        raise ConfigError(
            f"{what} = {num_samples} samples of one iteration are more than can be shuffled, {MAX_SAMPLES} (2^26); use "
            "fewer num_envs or num_steps"
        )
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


def _check_groups(config: Config) -> None:
    start, env = config.algorithm.start, config.env
    if config.num_steps % config.window_steps:
        raise ConfigError(
            f"num_steps={config.num_steps} is not a multiple of regroup_every={config.regroup_every}; use num_steps="
            f"{max(1, config.num_steps // config.regroup_every) * config.regroup_every}"
        )
    if config.regroup_every is not None and not (start.auto_reset and start.grouped):
        raise ConfigError(
            "regroup_every is for anchored groups, which go on from where they stand; leave it out, or use "
            "start=ANCHORED"
        )
    num_played = config.num_windows * config.num_groups
    if config.num_kept_groups is not None and (config.group_size < 2 or config.num_kept_groups > num_played):
        raise ConfigError(
            f"num_kept_groups={config.num_kept_groups} are to be chosen from {num_played} groups of "
            f"{config.group_size}, by how much members differ; keep at most {num_played}, of 2 members or more"
        )
    of_groups = ("num_kept_groups", "common_random_numbers", "live_groups_only")
    asked = config.num_kept_groups is not None, config.common_random_numbers, config.algorithm.live_groups_only
    if any(asked) and not start.grouped:
        raise ConfigError(
            f"{of_groups[asked.index(True)]} is for groups that start from one state, and these go on from where each "
            "stands; leave it out, or use start=ANCHORED"
        )
    if config.num_kept_groups is not None and config.algorithm.baseline is not None:
        raise ConfigError(
            "a baseline compares all environments that are played, and num_kept_groups leaves some out; leave out one "
            "of the two"
        )
    if config.common_random_numbers and config.group_size < 2:
        raise ConfigError("common_random_numbers=True needs members to share them, and group_size is 1; leave it out")
    if not start.all_actions:
        return
    algorithm = config.algorithm
    others = {
        **{"critic": algorithm.critic, "baseline": algorithm.baseline, "normalize": algorithm.normalize},
        **{"greedy_member": algorithm.greedy_member, "filter_overlong": algorithm.filter_overlong},
    }
    for slot, value in others.items():
        if value not in (None, False):
            raise ConfigError(
                f"{slot} means nothing where all actions of a state are weighed against each other; leave it out"
            )
    if not isinstance(env.action_space, Discrete) or env.action_mask is not None:
        raise ConfigError(
            f"all_actions needs Discrete actions that are always legal, and {env.name!r} has {env.action_space}"
            f"{' with a mask' if env.action_mask is not None else ''}; use forked(lead_steps) without it"
        )
    if config.group_size != env.action_space.num_actions:
        raise ConfigError(
            f"group_size={config.group_size}, and all_actions has a member for each of the actions of {env.name!r}; "
            f"use group_size={env.action_space.num_actions}"
        )


def _check_transformer(config: Config) -> None:
    env = config.env
    if env.observation.shape or env.observation.dtype != jnp.int32 or not isinstance(env.action_space, Discrete):
        raise ConfigError(
            f"a transformer observes a token (an int32 scalar) and chooses the next (Discrete), and {env.name!r} has "
            f"observations {env.observation.dtype}{list(env.observation.shape)} and actions {env.action_space}; use "
            "network='mlp'"
        )
    if config.algorithm.start.auto_reset or config.algorithm.start.lead_steps:
        raise ConfigError(
            "a transformer reads its prompt where a rollout begins, so rollouts must begin with episodes, and this "
            "algorithm's go on from the last; give it one-episode groups, such as algorithm=PPO._replace(start=FRESH)"
        )
    if config.memory != "none" or config.normalize_observations:
        raise ConfigError(
            "a transformer remembers by itself, and observes tokens, which have no mean; leave out "
            "memory and normalize_observations"
        )


_ACTIVATIONS = ("tanh", "relu", "gelu", "silu", "elu", "leaky_relu", "sigmoid", "softplus")


class _AnyHyperparams(Hyperparams):
    """The defaults, and a number for each coefficient that a variant's own subclass may add."""

    def __getattr__(self, name: str) -> float:
        if name.startswith("_"):
            raise AttributeError(name)
        return 1.0


def _check_slots(config: Config) -> None:
    """Runs the slots on shapes alone, so that those that do not fit together say so now."""
    algorithm, policy = config.algorithm, config.policy
    if algorithm.reference is not None and config.normalize_observations:
        raise ConfigError(
            "normalize_observations=True would change what a reference policy sees, and so the policy itself, with "
            "every rollout; leave one of the two out"
        )
    if algorithm.filter_overlong and algorithm.start.auto_reset:
        raise ConfigError(
            "filter_overlong=True leaves out episodes that a limit cuts, and rollouts of this algorithm also begin and "
            "end in the middle of others; it is for one-episode groups (start=FRESH)"
        )
    if algorithm.live_groups_only and config.group_size < 2:
        raise ConfigError(f"live_groups_only=True is of groups, and group_size={config.group_size}; leave it out")
    if algorithm.greedy_member and algorithm.start.auto_reset:
        raise ConfigError(
            "greedy_member=True compares whole episodes, and these go on across rollouts; use start=FRESH"
        )
    if algorithm.greedy_member and config.group_size < 2:
        raise ConfigError(
            f"group_size={config.group_size} leaves no member beside the greedy one, which is not learnt from; use "
            "group_size=2 or more"
        )

    def gradient(key):
        params = policy.init(key)
        trajectory = _trajectory(config, params)
        hyperparams = _AnyHyperparams()
        batch = updates.make_batch(
            algorithm, policy, params, trajectory, params, hyperparams, config.group_size, config.num_windows
        )
        indices = jnp.arange(batch.mask.shape[1] // config.num_minibatches)
        return updates.minibatch_gradient(
            algorithm, policy, params, batch, indices, hyperparams, config.num_microbatches
        )

    try:
        jax.eval_shape(gradient, jax.random.key(0))
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"the algorithm and this configuration do not fit: {error}") from error


def _trajectory(config: Config, params) -> Trajectory:
    """A trajectory of zeros in the shapes of this run."""
    shape = (config.window_steps, config.num_learnt_groups * config.group_size)
    real, flag, count = jnp.zeros(shape), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32)
    observation = jnp.zeros(shape + config.env.observation.shape, config.env.observation.dtype)
    carry = config.policy.initial_carry(params, shape[1], _prompts(config.env, shape[1]))
    distribution, value = config.policy.sequence(params, observation, carry, flag)
    action = config.policy.distribution.mode(distribution)
    masked = config.env.action_mask is not None or config.truncate_sampling
    action_mask = jnp.ones(distribution.shape, bool) if masked else None
    carry = jax.tree.map(lambda leaf: leaf[None], config.policy.sequence_carry(carry))
    trajectory = Trajectory(
        *(observation, action, real, flag, flag, flag, real, distribution, value, value, real, count, real, carry),
        action_mask,
    )
    if config.algorithm.greedy_member:
        trajectory = trajectory._replace(greedy=flag)
    if config.algorithm.start.all_actions:
        trajectory = trajectory._replace(given=flag)
    if config.algorithm.baseline is not None:
        num_finals = rollout.num_finals(config.env, config.window_steps, config.algorithm.start.auto_reset)
        final = jax.tree.map(lambda leaf: jnp.zeros((num_finals, *leaf.shape[1:]), leaf.dtype), (observation, carry))
        final_value = None if value is None else jnp.zeros((num_finals, shape[1]))
        trajectory = trajectory._replace(final_observation=final[0], final_carry=final[1], final_value=final_value)
    if config.env.task is not None:
        parts = jnp.zeros((*shape, len(config.env.task.rewards)))
        trajectory = trajectory._replace(reward_parts=RewardParts(values=parts, weights=parts))
    return one_carry_per_group(trajectory, config.group_size) if config.share_prompts else trajectory


def _prompts(env: Environment, num_envs: int) -> jax.Array | None:
    """Some, in the shape of an environment's."""
    if env.prompt is None:
        return None
    prompt = jax.eval_shape(lambda key: env.prompt(env.reset(key, env.params)[0], env.params), jax.random.key(0))
    return jnp.zeros((num_envs, *prompt.shape), prompt.dtype)

"""`Config`: what changes the compiled program of a run. Rollouts and updates take it; its checks trace nothing."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from grpo_jax.algorithms import Algorithm, by_name
from grpo_jax.config_checks import check_config, check_counts
from grpo_jax.devices.execution_plan import ExecutionPlan, resolve_plan
from grpo_jax.environments import Environment, make_environment, stack_frames
from grpo_jax.environments.parameters import static_parameters
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.importing import is_own
from grpo_jax.policies import Architecture, Policy, make_policy, make_token_policy
from grpo_jax.policies.distributions import make_distribution
from grpo_jax.policies.normalization import Normalizer, normalized
from grpo_jax.policies.own import make_own_policy
from grpo_jax.policies.sampling import tempered, truncated


@dataclasses.dataclass(frozen=True)
class Config:
    """What a run is: environment, algorithm, rollout, update and policy. Floats that are traced are in `Hyperparams`.

    `group_size` and `num_steps` may be left out (None): they are then chosen to suit the algorithm and the environment.
    `dataclasses.replace` keeps the chosen integers; pass None to have them chosen again.

    Raises:
      ConfigError: at construction, for fields that contradict each other, with what to write instead. Custom
        functions, slots that do not fit together and optimisers are tried on shapes when `init` is called or traced.
    """

    environment: str | Any = "CartPole-v1"
    """Name of a gymnax environment, suite:name, package.module:Name (or an object with gymnax's interface)."""
    algorithm: str | Algorithm = "grpo"
    """Name of an algorithm, or "auto" by the episode limit (or a value of `Algorithm`)."""
    env_params: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    """Parameters of the environment to override, such as max_steps_in_episode=200."""
    frame_stack: int = 1
    """Observations that the policy sees at once, the last ones side by side: channels of an image, or features."""

    # --- the rollout ---

    num_envs: int = 128
    """Parallel environments."""
    group_size: int | None = None
    """Environments that start from the same state; by default up to 16, or 1 without groups."""
    num_steps: int | None = None
    """Steps of each environment in one rollout; the episode limit for one-episode groups, else 128, if left out."""
    starts_per_rollout: int | None = None
    """Draw only this many start states per environment and rollout (or window), and reuse them in turn. Use it if
    resets are slow. None: one reset per episode."""
    cut_episodes: bool = False
    """Allow rollouts shorter than an episode of a one-episode group; longer episodes are then cut off."""
    regroup_every: int | None = None
    """Steps until anchored groups gather again; None: they do so once in a rollout, at its start."""
    num_kept_groups: int | None = None
    """Groups to train on, those whose returns differ most (dynamic sampling); None: all that are played."""
    common_random_numbers: bool = False
    """Members of a group share all randomness except in their actions."""
    extras: tuple[str, ...] = ()
    """Entries of the environment's info to keep at each step, for slots that read them: batch.extras[name]."""
    truncate_sampling: bool = False
    """A transformer samples only from its most probable tokens: hyperparameters top_k and top_p."""

    # --- the update ---

    num_epochs: int = 4
    """Passes over the samples of a rollout."""
    num_minibatches: int = 16
    """Gradient steps in each pass."""
    optimizer: str | Callable = "adam"
    """Optimiser: "adam", "adamw", "sgd", "rmsprop", "muon", package.module:name (or a function of the hyperparameters
    and the learning rate that gives an optax.GradientTransformation)."""
    moments_dtype: str = "float32"
    """Type in which the optimiser keeps its moments: "float32", or "bfloat16" for half of their memory."""
    schedule: str | Callable = "linear"
    """Learning rate over training: "constant", "linear", "cosine", package.module:name (or a function of progress in
    [0, 1]), from learning_rate to final_learning_rate."""
    num_microbatches: int | None = None
    """Parts over which the gradient of a minibatch is accumulated; None: chosen by size."""
    logits_chunk: int | None = None
    """Tokens whose logits an update computes at once (at least a whole step), for a large vocabulary: rollouts keep
    only log-probabilities of sampled tokens, and the KL to the behaviour policy is estimated (k3). None: all."""
    share_prompts: bool | None = None
    """Minibatches are of whole groups, and an update reads their prompt once; None: a transformer's, where possible."""
    shuffle_blocks: int = 1
    """Shuffle within this many blocks of environments, each of which gives every minibatch an equal share. With at
    least one block per device along a mesh's axis envs, no sample moves between devices."""
    normalize_observations: bool = False
    """The policy sees observations minus their running mean, divided by their running standard deviation."""
    normalize_rewards: bool = False
    """Rewards are divided by the running standard deviation of the discounted return."""

    execution_plan: str | ExecutionPlan = "auto"
    """Layout of the program: "cpu", "gpu", "tpu", or "auto" by the backend (or a value of `ExecutionPlan`)."""

    # --- the policy ---

    network: str | Callable = "auto"
    """Hidden layers: "mlp" (dense), "cnn" (a 3×3 convolution before those), "nature_cnn", "impala" (a ResNet),
    "transformer" (of tokens), or "auto": "cnn" for images, "transformer" where there is a prompt. Or a custom one:
    package.module:name (or a function), (observation, distribution, critic) -> Policy."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the dense hidden layers, of the actor and of the critic."""
    activation: str = "tanh"
    """Activation function by its name in flax.linen."""
    layer_norm: bool = False
    """Normalise the features of each dense hidden layer before the activation."""
    conv_channels: int = 16
    """Channels of the first convolution; "nature_cnn" has 2, 4 and 4 times as many, "impala" 1, 2 and 2 times."""
    recurrent: str = "none"
    """A recurrent layer before the heads: "gru", "lstm", "mingru" (parallel over steps), or "none"."""
    recurrent_size: int = 64
    """Units of the recurrent layer."""
    shared_critic: bool = False
    """The critic is a second head of the actor's network instead of a separate network."""
    critic_hidden_sizes: tuple[int, ...] | None = None
    """Widths of the critic's dense hidden layers; None: hidden_sizes."""
    critic_activation: str | None = None
    """Activation function of the critic; None: the actor's."""
    action_distribution: str | Callable = "auto"
    """Over real actions: "gaussian", clipped to the bounds ("auto"), or "squashed_gaussian"; else "auto". Or
    a custom one: package.module:name (or a function), (space) -> Distribution."""
    actor_observation: tuple[str, ...] | None = None
    """Keys of a dict of observations that the actor sees, while its critic sees all; None: the actor sees all too."""
    state_dependent_std: bool = False
    """Standard deviations of real actions depend on the observation; otherwise they are free parameters."""
    hidden_scale: float = math.sqrt(2)
    """Gain of the hidden layers' initial weights, which are orthogonal."""
    actor_scale: float = 0.01
    """Gain of the initial weights of the actor's head: small, so that all actions begin about equally likely."""
    critic_scale: float = 1.0
    """Gain of the initial weights of the critic's head."""
    transformer: Architecture = Architecture()
    """Sizes of the transformer, where the network is one."""

    def __post_init__(self):
        """Chooses the fields that were left out, and checks all of them."""
        resolve = functools.partial(object.__setattr__, self)
        check_counts(self)
        resolve("env_params", static_parameters(self.env_params))
        resolve("extras", tuple(self.extras))
        if not isinstance(self.algorithm, Algorithm):
            name = str(self.algorithm)
            resolve("algorithm", by_name(automatic_algorithm(self.env.max_steps).name if name == "auto" else name))
        if self.group_size is None:
            divisors = [size for size in range(1, 17) if self.num_envs % size == 0]
            resolve("group_size", divisors[-1] if self.algorithm.start.grouped else 1)
        if self.num_steps is None:
            resolve("num_steps", 128 if self.algorithm.start.auto_reset else self.env.max_steps)
        if self.share_prompts is None:
            in_groups = self.num_training_groups % self.num_minibatches == 0 and self.group_size > 1
            resolve("share_prompts", self.is_transformer and self.algorithm.start.from_reset and in_groups)
        check_config(self)

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return self.num_envs // self.group_size

    @property
    def window_steps(self) -> int:
        """Steps of a window: from one start of the groups to the next."""
        return self.regroup_every or self.num_steps

    @property
    def num_windows(self) -> int:
        """Windows of an iteration."""
        return self.num_steps // self.window_steps

    @property
    def num_training_groups(self) -> int:
        """Groups of an iteration that are trained on."""
        return self.num_kept_groups or self.num_windows * self.num_groups

    @property
    def num_training_steps(self) -> int:
        """Steps of an iteration that are trained on, valid or not."""
        return self.num_training_groups * self.group_size * self.window_steps

    @property
    def trunk_steps(self) -> int:
        """Environment steps of an iteration before forked groups split off; no gradient comes from them."""
        return self.num_groups * self.algorithm.start.trunk_steps

    @property
    def branch_steps(self) -> int:
        """The most environment steps of an iteration in branches that value states; no gradient comes from them."""
        return self.algorithm.num_branches * self.num_envs * (self.num_steps * (self.num_steps + 1) // 2)

    @property
    def steps_per_iteration(self) -> int:
        """The most environment steps one iteration can make; one-episode groups often make fewer."""
        return self.num_envs * self.num_steps + self.trunk_steps + self.branch_steps

    @property
    def keeps_sequences(self) -> bool:
        """Whether the steps of a rollout stay together in minibatches: a slot compares them, or they share a carry."""
        return self.algorithm.whole_sequences or self.policy.has_carry

    @property
    def members_per_carry(self) -> int:
        """Neighbouring sequences that share a carry, and stay together in minibatches: a group's, or one."""
        return self.group_size if self.share_prompts else 1

    @property
    def is_transformer(self) -> bool:
        """Whether the policy is a transformer."""
        return self.network == "transformer" or (self.network == "auto" and self.env.prompt is not None)

    @property
    def has_own_network(self) -> bool:
        """Whether the network is custom: a function or an import path."""
        return is_own(self.network)

    @property
    def has_own_distribution(self) -> bool:
        """Whether the family of action distributions is custom: a function or an import path."""
        return is_own(self.action_distribution)

    @property
    def plan(self) -> ExecutionPlan:
        """The execution plan; "auto" depends on JAX's backend, so that a run may go on elsewhere."""
        return resolve_plan(self.execution_plan)

    @functools.cached_property
    def env(self) -> Environment:
        """The environment's pure functions."""
        environment = make_environment(self.environment, dict(self.env_params))
        environment = stack_frames(environment, self.frame_stack)
        return environment._replace(extras=self.extras) if self.extras else environment

    @functools.cached_property
    def policy(self) -> Policy:
        """The policy's pure functions."""
        distribution = make_distribution(
            self.env.action_space, self.action_distribution, state_dependent_std=self.state_dependent_std
        )
        critic = self.algorithm.critic is not None
        if self.has_own_network:
            return make_own_policy(self.network, self.env.observation, distribution, critic)
        if self.is_transformer:
            return make_token_policy(
                self.transformer,
                distribution,
                max_steps=self.env.max_steps + critic,  # a critic also reads the last token, for its value
                critic=critic,
                shared_critic=self.shared_critic,
                logits_chunk=self.logits_chunk,
            )
        return make_policy(
            self.env.observation,
            distribution,
            network=self.network,
            recurrent=self.recurrent,
            hidden_sizes=self.hidden_sizes,
            conv_channels=self.conv_channels,
            recurrent_size=self.recurrent_size,
            activation=self.activation,
            hidden_scale=self.hidden_scale,
            actor_scale=self.actor_scale,
            critic_scale=self.critic_scale,
            critic=critic,
            shared_critic=self.shared_critic,
            critic_hidden_sizes=self.critic_hidden_sizes,
            critic_activation=self.critic_activation,
            layer_norm=self.layer_norm,
            actor_observation=self.actor_observation,
            fused_layers=self.plan.fused_layers,
            steps_per_loop=self.plan.steps_per_loop,
        )


def acting_policy(config: Config, normalizer: Normalizer, hyperparams: Hyperparams) -> Policy:
    """The policy as it acts and as it learns, so that both mean the same distribution."""
    policy = normalized(config.policy, normalizer.observation, hyperparams.observation_clip)
    if config.is_transformer:
        policy = tempered(policy, hyperparams.temperature)
    if config.truncate_sampling:
        policy = truncated(policy, hyperparams.top_k, hyperparams.top_p)
    return policy


LONGEST_CHEAP_EPISODE = 500
"""Steps of the longest episode that one-episode groups are chosen for."""
FEWEST_EPISODES = 500
"""Whole episodes that a budget must allow where one-episode groups are chosen."""


class Choice(NamedTuple):
    """An algorithm and why it was chosen."""

    name: str
    reason: str


def automatic_algorithm(max_steps: int, total_steps: float = math.inf) -> Choice:
    """The algorithm for an episode limit and a budget of environment steps.

    "grpo" if whole episodes are cheap: the limit is at most 500 steps, and the budget allows 500 episodes of that
    length. Its groups then compare the outcomes of whole episodes, without a critic.

    Otherwise "ppo". An iteration of whole episodes would take a large part of the budget, and the outcome of an episode
    says little about one of its many actions. PPO learns from parts of episodes. So do some methods without a critic,
    but PPO scored higher than those on three of four MinAtar games.

    Args:
      max_steps: the environment's episode limit.
      total_steps: the budget; infinity if unknown.
    """
    if max_steps > LONGEST_CHEAP_EPISODE:
        return Choice("ppo", f"episodes of up to {max_steps} steps are too long to play whole")
    if max_steps * FEWEST_EPISODES > total_steps:
        return Choice("ppo", f"{total_steps:g} steps allow fewer than {FEWEST_EPISODES} episodes of {max_steps}")
    return Choice("grpo", f"whole episodes are cheap: at most {max_steps} steps")

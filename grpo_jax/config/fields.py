"""The fields of a `Config`, and properties that follow from them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from grpo_jax.algorithms import Algorithm
from grpo_jax.devices.execution_plan import ExecutionPlan, resolve_plan
from grpo_jax.environments import Environment, make_environment, stack_frames
from grpo_jax.importing import import_own, is_own
from grpo_jax.policies import Architecture, Policy, make_policy, make_token_policy
from grpo_jax.policies.distributions import make_distribution


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields; `Config` checks them and fills in those that are left out."""

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
    """Start states drawn for each environment in each rollout (or window), which its new episodes use in turn: for
    expensive resets. None: every episode has a start state of its own."""
    cut_episodes: bool = False
    """Allow rollouts shorter than an episode of a one-episode group; longer episodes are then cut off."""
    regroup_every: int | None = None
    """Steps until anchored groups gather again; None: they do so once in a rollout, at its start."""
    num_kept_groups: int | None = None
    """Groups to train on, those whose returns differ most (dynamic sampling); None: all that are played."""
    common_random_numbers: bool = False
    """Members of a group share all randomness but that of their actions."""
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
    """Blocks of neighbouring environments that are shuffled apart: every minibatch has an equal share of each. With one
    or more for each device along a mesh's axis envs, samples stay on their device."""
    normalize_observations: bool = False
    """The policy sees observations minus their running mean, divided by their running standard deviation."""
    normalize_rewards: bool = False
    """Rewards are divided by the running standard deviation of the discounted return."""

    execution_plan: str | ExecutionPlan = "auto"
    """Layout of the program: "cpu", "gpu", "tpu", or "auto" by the backend (or a value of `ExecutionPlan`)."""

    # --- the policy ---

    network: str | Callable = "auto"
    """Hidden layers: "mlp" (dense), "cnn" (a 3×3 convolution before those), "nature_cnn", "impala" (a ResNet),
    "transformer" (of tokens), or "auto": "cnn" for images, "transformer" where there is a prompt. Or one of your own:
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
    """The critic is a second head of the actor's network instead of a network of its own."""
    critic_hidden_sizes: tuple[int, ...] | None = None
    """Widths of the critic's dense hidden layers; None: hidden_sizes."""
    critic_activation: str | None = None
    """Activation function of the critic; None: that of the actor."""
    action_distribution: str | Callable = "auto"
    """Over real actions: "gaussian", clipped to the bounds ("auto"), or "squashed_gaussian"; else "auto". Or one
    of your own: package.module:name (or a function), (space) -> Distribution."""
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
    def is_transformer(self) -> bool:
        """Whether the policy is one."""
        return self.network == "transformer" or (self.network == "auto" and self.env.prompt is not None)

    @property
    def has_own_network(self) -> bool:
        """Whether the network is the user's: a function or an import path."""
        return is_own(self.network)

    @property
    def has_own_distribution(self) -> bool:
        """Whether the family of action distributions is the user's: a function or an import path."""
        return is_own(self.action_distribution)

    @property
    def plan(self) -> ExecutionPlan:
        """The execution plan; "auto" depends on JAX's backend, so that a run may go on elsewhere."""
        return resolve_plan(self.execution_plan)

    @functools.cached_property
    def env(self) -> Environment:
        """The environment's pure functions."""
        return stack_frames(make_environment(self.environment, dict(self.env_params)), self.frame_stack)

    @functools.cached_property
    def policy(self) -> Policy:
        """The policy's pure functions."""
        distribution = make_distribution(
            self.env.action_space, self.action_distribution, state_dependent_std=self.state_dependent_std
        )
        critic = self.algorithm.critic is not None
        if self.has_own_network:
            return import_own(self.network, "network")(self.env.observation, distribution, critic)
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

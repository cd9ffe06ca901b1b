"""`Config`: what changes the compiled program of a run. Rollouts and updates take it; its checks trace nothing."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from grpo_jax.algorithms import Algorithm, automatic_algorithm, by_name, name_of
from grpo_jax.config_checks import check_config, check_counts, check_extras, check_function, check_switches
from grpo_jax.devices.execution_plan import ExecutionPlan, resolve_plan
from grpo_jax.environments import Environment, make_environment
from grpo_jax.environments.environment import with_standard_promotion
from grpo_jax.environments.parameters import static_parameters
from grpo_jax.environments.suites import SUITES
from grpo_jax.errors import KnownFields
from grpo_jax.hyperparams import Hyperparams, joined
from grpo_jax.policies import Policy, make_token_policy
from grpo_jax.policies.custom import make_custom_policy
from grpo_jax.policies.distributions import make_distribution
from grpo_jax.policies.hopper import reason_for_xla, with_hopper_kernel
from grpo_jax.policies.networks import MLP, NETWORKS, Transformer, resolve_network
from grpo_jax.policies.normalization import Normalizer, normalized
from grpo_jax.policies.sampling import SamplingHyperparams, with_temperature, with_truncation


@dataclasses.dataclass(frozen=True, repr=False)
class Config(KnownFields):
    """What a run is: environment, algorithm, rollout, update and policy. Floats that are traced are in `Hyperparams`.

    `group_size` and `num_steps` may be left out (None), and names stand for values: these are then chosen to suit the
    algorithm and the environment. `dataclasses.replace` keeps what was chosen; pass None (or "auto") to choose again.

    Raises:
      ConfigError: at construction, for fields that contradict each other, with what to write instead. Custom
        functions, slots that do not fit together and optimisers are tried on shapes when `init` is called or traced.
    """

    environment: str | Any = "CartPole-v1"
    """Name of a gymnax environment, suite:name, package.module:Name (or an object with gymnax's interface)."""
    algorithm: str | Algorithm = "grpo"
    """Name of an algorithm, or "auto": "grpo" where there is a prompt, else "ppo" (or a value of `Algorithm`)."""
    env_params: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    """Parameters of the environment to override, such as max_steps_in_episode=200."""

    # --- the rollout ---

    num_envs: int = 32
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
    extras: tuple[str, ...] = ()
    """Entries of the environment's info to keep at each step, for slots that read them: batch.extras[name]."""
    truncate_sampling: bool = False
    """A transformer samples only from its most probable tokens: top_k, top_p and min_p of SamplingHyperparams."""

    # --- the update ---

    num_epochs: int = 4
    """Passes over the samples of a rollout."""
    num_minibatches: int = 16
    """Gradient steps in each pass."""
    optimizer: str | Callable = "adam"
    """Optimiser: "adam", "adamw", "sgd", "muon", package.module:name (or a function of the hyperparameters
    and the learning rate that gives an optax.GradientTransformation)."""
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
    """Layout of the program: "cpu", "gpu", "hopper", "tpu", or "auto" by the device (or a value of `ExecutionPlan`)."""

    # --- the policy ---

    network: str | Callable = "auto"
    """A value such as MLP(hidden_sizes=(128, 128)), or a name for one with its defaults: "mlp" (dense layers), "cnn" (a
    3×3 convolution before those), "transformer" (of tokens), or "auto": "cnn" for images, "transformer" where there is
    a prompt, else "mlp"; `tuned` and commands first take the tuned one, such as "mlp" for MinAtar. Or a custom one:
    package.module:name (or a function), (observation, distribution, critic) -> Policy."""
    action_distribution: str | Callable = "auto"
    """Family of distributions: "auto" (categorical, or a Gaussian for real actions, clipped to the bounds), or a custom
    one: package.module:name (or a function), (space) -> Distribution."""

    def __post_init__(self):
        """Chooses the fields that were left out, and checks all of them."""
        resolve = functools.partial(object.__setattr__, self)
        check_counts(self)
        check_switches(self)
        resolve("env_params", static_parameters(self.env_params))
        check_extras(self.extras)
        resolve("extras", tuple(self.extras))
        check_function("network", self.network)
        has_prompt = self.env.prompt is not None
        resolve("network", resolve_network(self.network, self.env.observation, has_prompt))
        if not isinstance(self.algorithm, Algorithm):
            name = str(self.algorithm)
            resolve("algorithm", by_name(automatic_algorithm(has_prompt)[0] if name == "auto" else name))
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
    def trunk_steps(self) -> int:
        """Environment steps of an iteration before forked groups split off; no gradient comes from them."""
        return self.num_groups * self.algorithm.start.trunk_steps

    @property
    def steps_per_iteration(self) -> int:
        """The most environment steps one iteration can make; one-episode groups often make fewer."""
        return self.num_envs * self.num_steps + self.trunk_steps

    @property
    def keeps_sequences(self) -> bool:
        """Whether the steps of a rollout stay together in minibatches: a slot compares them, or they share a carry."""
        compared = self.algorithm.whole_sequences or self.algorithm.group_surrogate is not None
        return compared or self.policy.has_carry

    @property
    def members_per_carry(self) -> int:
        """Neighbouring sequences that share a carry: a group's, or one."""
        return self.group_size if self.share_prompts else 1

    @property
    def members_together(self) -> int:
        """Neighbouring sequences that stay together in minibatches, as a slot compares them or they share a carry."""
        return self.group_size if self.algorithm.group_surrogate is not None else self.members_per_carry

    @property
    def is_transformer(self) -> bool:
        """Whether the policy is a transformer."""
        return isinstance(self.network, Transformer)

    @property
    def plan(self) -> ExecutionPlan:
        """The execution plan; "auto" depends on JAX's backend, so that a run may go on elsewhere."""
        return resolve_plan(self.execution_plan)

    @property
    def hyperparams_class(self) -> type[Hyperparams]:
        """The class of hyperparameters with all numbers that a run reads; see `hyperparams.completed`."""
        of_algorithm = self.algorithm.hyperparams
        return joined(of_algorithm, SamplingHyperparams) if self.truncate_sampling else of_algorithm

    @functools.cached_property
    def env(self) -> Environment:
        """The environment's pure functions."""
        with jax.numpy_dtype_promotion("standard"):
            environment = make_environment(self.environment, dict(self.env_params))
        environment = with_standard_promotion(environment)
        return environment._replace(extras=self.extras) if self.extras else environment

    @functools.cached_property
    def policy(self) -> Policy:
        """The policy's pure functions."""
        distribution = make_distribution(self.env.action_space, self.action_distribution)
        critic = self.algorithm.critic is not None
        if not isinstance(self.network, MLP | Transformer):
            return make_custom_policy(self.network, self.env.observation, distribution, critic)
        if self.is_transformer:
            max_steps = self.env.max_steps + critic  # a critic also reads the last token, for its value
            options = {"max_steps": max_steps, "critic": critic, "logits_chunk": self.logits_chunk}
            return make_token_policy(self.network, distribution, **options)
        policy = self.network(self.env.observation, distribution, critic, steps_per_loop=self.plan.steps_per_loop)
        return with_hopper_kernel(policy, self.network, self.env.observation) if self.plan.hopper_kernels else policy

    @property
    def networks_by(self) -> str | None:
        """On the plan "hopper", what computes the networks on a GPU: its kernel, or XLA and why; else None."""
        if not self.plan.hopper_kernels:
            return None
        here = "" if jax.default_backend() == "gpu" else "; without a GPU, XLA"
        return f"XLA ({self._reason_for_xla})" if self._reason_for_xla else f"Hopper kernel{here}"

    @property
    def has_kernel(self) -> bool:
        """Whether the plan's kernel computes the networks, on a GPU that it is for."""
        return self.plan.hopper_kernels and self._reason_for_xla is None

    @property
    def _reason_for_xla(self) -> str | None:
        return reason_for_xla(self.network, self.env.observation, self.policy.distribution, self.policy.has_critic)

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the fields alone: what was made of them (functions, programs) is made again."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def _unknown_field(cls, name: str, value: Any) -> str:
        for network in NETWORKS.values():
            if name in network.__dataclass_fields__:
                return f"{name} is a field of the network: Config(network={network.__name__}({name}={value!r}))"
        return super()._unknown_field(name, value)

    def _changed(self) -> dict[str, Any]:
        return {"environment": self.environment} | super()._changed() | {"algorithm": name_of(self.algorithm)}


def behaviour_policy(config: Config, normalizer: Normalizer, hyperparams: Hyperparams) -> Policy:
    """The policy as it acts and as it learns, so that both mean the same distribution."""
    policy = normalized(config.policy, normalizer.observation)
    if config.is_transformer:
        policy = with_temperature(policy, hyperparams.temperature)
    if config.truncate_sampling:
        policy = with_truncation(policy, hyperparams.top_k, hyperparams.top_p, hyperparams.min_p)
    return policy


def kept_with(config: Config, key: tuple, make: Callable[[], Any]) -> Any:
    """What `make` returned at the first call with this key and an equal config, of the last `MAX_KEPT` configs.

    The key includes those settings of JAX that change what is traced.
    """
    key = key, *(getattr(jax.config, name) for name in TRACED_SETTINGS)
    kept = _kept(config if _is_fixed(config) else id(config))
    kept.setdefault("config", config)  # alive, so that no other config has its id
    if key not in kept:
        kept[key] = make()
    return kept[key]


TRACED_SETTINGS = ("jax_debug_nans", "jax_default_prng_impl", "jax_enable_x64", "jax_default_matmul_precision")
MAX_KEPT = 32
"""The most configs of which programs are kept."""


@functools.lru_cache(maxsize=MAX_KEPT)
def _kept(config: Config | int) -> dict[Any, Any]:
    return {}


def _is_fixed(config: Config) -> bool:
    """Whether equal configs mean the same: nothing in it can change, as code behind an import path or an object can."""
    if not isinstance(config.environment, str):
        return False
    try:
        hash(config)
    except TypeError:
        return False
    paths = [value for value in vars(config).values() if isinstance(value, str) and ":" in value]
    return all(path.partition(":")[0] in SUITES for path in paths)

"""The flags of training a language model by rewards: those of `grpo-jax lm` and `grpo-jax reasoning`."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeVar

from grpo_jax import Hyperparams
from grpo_jax.algorithms import by_name
from grpo_jax.commands.harness.limits import Count, Finite, Seeds
from grpo_jax.commands.harness.parsing import parse_flags, peek
from grpo_jax.commands.harness.settings import settings
from grpo_jax.commands.harness.study import RecordingArguments, StudyArguments
from grpo_jax.policies import Transformer

T = TypeVar("T")


@dataclasses.dataclass(kw_only=True)
class TrainingArguments(StudyArguments):
    """The flags of training by rewards, for any model and any prompts."""

    max_completion: Count = 256
    """The most tokens of a completion."""
    algorithm: str = "grpo"
    """Name of the algorithm."""
    num_prompts: Count = 8
    """Prompts of an iteration."""
    group_size: Count = 8
    """Completions of each prompt."""
    num_epochs: Count = 1
    """Passes over the completions of an iteration."""
    num_minibatches: Count = 1
    """Gradient steps of each pass."""
    num_microbatches: Count | None = None
    """Parts over which each gradient is accumulated, for less memory; None: chosen by size."""
    schedule: str = "constant"
    """Learning rate over training: constant, linear or cosine."""
    optimizer: str = "adam"
    """Optimiser: adam, adamw, sgd, rmsprop, muon, or package.module:name."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations and of the cache."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the optimiser's moments."""
    lora_rank: Count | None = None
    """Train adapters of this rank (LoRA), which are saved in the format of PEFT; None: all weights."""
    merge_lora: bool = False
    """Save a whole model with LoRA's adapters added to its weights, in place of the adapters."""
    lora_alpha: Finite = Transformer.lora_alpha
    """The adapters' product is multiplied by lora_alpha / lora_rank."""
    frozen_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which LoRA keeps the weights that it does not train."""
    checkpoint_layers: bool = False
    """Gradients compute each block's activations again instead of keeping them: less memory, a third more time."""
    logits_chunk: Count | None = None
    """Tokens whose logits an update computes at once; by default all for small vocabularies, else 256."""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the saved weights."""
    sweep: tuple[str, ...] = ()
    """A hyperparameter and its values, such as learning_rate 1e-4 3e-4: a run of each, compiled once, with a folder of
    its own."""
    num_seeds: Seeds = 1
    """Independent runs, each of which gives a model."""
    sample_every: Count | None = None
    """Iterations between two measurements on held-out prompts, which also print samples; None: so many that all
    measurements make at most a fifth of the completions of training, but one before and one after it."""
    stop_at_reward: Finite | None = None
    """Stop a seed once the mean reward of sampled completions of a measurement is at least this."""
    num_final: Count = 128
    """Completions of held-out prompts of the last evaluation."""
    num_held_out: Count = 32
    """The most held-out prompts of a measurement, a random choice."""
    num_samples: Count = 8
    """Completions of each held-out prompt, for pass@k with k up to this."""
    correct_at: Finite = 1.0
    """For pass@k a completion is correct if its first reward is at least this."""
    hyperparams: Hyperparams = dataclasses.field(
        default_factory=lambda: Hyperparams(learning_rate=1e-5, num_iterations=100, discount=1.0, gae_lambda=1.0)
    )
    recording: RecordingArguments = dataclasses.field(default_factory=lambda: RecordingArguments(policies=False))


@dataclasses.dataclass
class Chosen:
    """The flag on which the defaults of others depend."""

    algorithm: str = TrainingArguments.algorithm


def parse(arguments: type[T], flags: Sequence[str] | None = None) -> T:
    """Parses the flags of a class of `TrainingArguments`; clip widths are by default those of the algorithm.

    Raises ConfigError if the algorithm is unknown.
    """
    algorithm = peek(Chosen, flags).algorithm
    by_name(algorithm)
    tuned = settings("tokens:", algorithm)
    widths = {name: tuned[name] for name in ("clip_low", "clip_high") if name in tuned}
    default = object.__new__(arguments)  # what it lacks are the defaults of its class
    default.hyperparams = arguments.__dataclass_fields__["hyperparams"].default_factory().replace(**widths)
    return parse_flags(arguments, flags, default=default)

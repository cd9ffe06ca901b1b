"""The flags of `grpo-jax lm`."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from grpo_jax import Hyperparams
from grpo_jax.algorithms import by_name
from grpo_jax.commands.harness.limits import Count, CountOrNone, Finite, Seeds
from grpo_jax.commands.harness.parsing import Words, parse_flags, peek
from grpo_jax.commands.harness.study import EvaluationArguments, RecordingArguments, StudyArguments
from grpo_jax.errors import ConfigError
from grpo_jax.hyperparams import completed, joined
from grpo_jax.policies import Transformer
from grpo_jax.policies.sampling import SamplingHyperparams
from grpo_jax.runs.tuned_settings import tuned_settings

DEFAULTS = Hyperparams(learning_rate=1e-5, num_iterations=100, discount=1.0, gae_lambda=1.0)
LORA_RATE = 3e-4
"""The default learning rate of adapters, which need ten times that of all weights, or more."""

WORDS = Words(
    shown=(
        *("held_out", "respond", "stop_string", "max_completion", "algorithm", "num_prompts", "group_size"),
        *("num_iterations", "learning_rate", "lora_rank", "temperature", "kl_coef", "sample_every", "num_seeds"),
        *("seed", "out", "resume"),
    ),
    help={
        "learning_rate": {"help": f"The optimiser's step size; if left out with --lora-rank, {LORA_RATE:g}."},
        "num_iterations": {"help": "The budget: iterations of num_prompts × group_size completions."},
        "total_steps": {"help": "The budget in tokens, in place of num_iterations.", "help_behavior_hint": ""},
        "max_episodes": {"help": "A run also ends after this many completions; None: no limit."},
        "kl_coef": {"help": "Weight of the KL to the model before training, see --kl; 0: none."},
    },
    others={
        **{"model_name_or_path": "--model", "dataset_name": "--prompts", "reward_funcs": "--reward"},
        **{"max_completion_length": "--max-completion", "output_dir": "--out", "use_peft": "--lora-rank 16"},
        "per_device_train_batch_size": "--num-prompts × --group-size, as it counts completions,",
        **dict.fromkeys(("loss_type", "scale_rewards"), "part of --algorithm (see: grpo-jax docs coming_from)"),
        **{"epsilon": "--clip-low and --clip-high", "use_bias_correction_kl": "--kl unbiased_kl_to_reference"},
        "num_train_epochs": "--num-iterations × --num-prompts / the number of prompts",
    },
)


@dataclasses.dataclass(kw_only=True)
class CompletionArguments:
    """How a model reads prompts and completes them."""

    max_completion: Count = 256
    """The most tokens of a completion."""
    stop_string: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A completion also ends once its text contains this, such as '</answer>' or '\\n'; repeat the flag for several."""
    template_variable: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """A value that the chat template reads, such as enable_thinking=false; repeat the flag for several."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations and of the cache."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """With line breaks for the \\n of a shell."""
        return tuple(string.replace("\\n", "\n") for string in self.stop_string)

    @property
    def model_options(self) -> dict[str, Any]:
        """Of `load_model`."""
        variables = dict(map(template_variable, self.template_variable))
        return {"template_variables": variables, "compute_dtype": self.compute_dtype}


def template_variable(word: str) -> tuple[str, Any]:
    """NAME=VALUE as the name and the value: JSON, such as false, or else a text."""
    name, equals, value = word.partition("=")
    if not equals:
        raise ConfigError(f"--template-variable {word} has no value; write a name and its value, such as {word}=false")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@dataclasses.dataclass(kw_only=True)
class Arguments(CompletionArguments, StudyArguments):
    """Trains the model in a folder by rewards for its completions, and writes a folder of the same format."""

    WORDS: ClassVar = WORDS

    model: Path
    """Folder of a Llama, Qwen2, Qwen3 or SmolLM3 model: config.json, safetensors, tokenizer.json."""
    prompts: Path
    """JSON lines with prompt (a text) or messages (a chat), and fields for the rewards."""
    reward: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="MODULE:NAME[=WEIGHT]")]
    """A function (prompts, completions, **fields) -> numbers, by its import path; repeat the flag for several, whose
    weighted sum is the reward."""
    respond: Annotated[str | None, tyro.conf.arg(metavar="MODULE:NAME")] = None
    """A function (messages) -> text or None, such as a tool: it answers completions, and the model goes on."""
    max_turns: Count | None = None
    """The most messages of the model in a conversation, with --respond; None: 4. --max-completion limits all tokens."""
    held_out: str = "0.1"
    """Held-out prompts: another file, or a share of the prompts."""
    process_rewards: bool = False
    """Pay rewards of steps within a completion where the steps end, for algorithms such as grpo_process."""

    algorithm: str = "grpo"
    """Name of the algorithm."""
    kl: Literal["kl_to_reference", "unbiased_kl_to_reference", "exact_kl_to_reference"] | None = None
    """Estimate of the KL to the model before training: k3, k3 times the ratio, or exact, for small vocabularies; None:
    k3, but no penalty for algorithms that have none by design, such as dapo."""
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
    """Optimiser: adam, adamw, sgd, muon, or package.module:name."""
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
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the saved weights."""
    num_seeds: Seeds = 1
    """Independent runs, each of which gives a model."""
    sample_every: CountOrNone | None = None
    """Iterations between two measurements on held-out prompts, which also print samples; 0: no measurements; None: as
    few as make all of them cost a fifth of training's completions, with one before and one after it at least."""
    keep_completions: CountOrNone | Literal["all"] = 2
    """Prompts of an iteration whose completions completions.jsonl keeps, with rewards and advantages; 0: none."""
    stop_at_reward: Finite | None = None
    """Stop a seed once the mean reward of sampled completions of a measurement is at least this."""
    num_held_out: Count = 32
    """The most held-out prompts of a measurement, a random choice."""
    num_samples: Count = 8
    """Completions of each held-out prompt, for pass@k with k up to this."""
    correct_at: Finite = 1.0
    """For pass@k a completion is correct if its first reward is at least this."""
    hyperparams: Hyperparams = DEFAULTS
    recording: RecordingArguments = dataclasses.field(default_factory=lambda: RecordingArguments(policies=False))
    evaluation: tyro.conf.Suppress[tyro.conf.Fixed[EvaluationArguments]] = EvaluationArguments()


@dataclasses.dataclass
class Chosen:
    """The flags on which the defaults of others depend."""

    algorithm: str = Arguments.algorithm
    lora_rank: int | None = None
    total_steps: float | None = None
    num_iterations: float | None = None


def parse(flags: Sequence[str] | None = None) -> Arguments:
    """Parses the flags; clip widths are by default those of the algorithm, the learning rate is by default adapters' if
    there are some, and a budget replaces the default one.

    Raises ConfigError if the algorithm is unknown.
    """
    chosen = peek(Chosen, flags)
    kind = joined(by_name(chosen.algorithm).hyperparams, SamplingHyperparams)
    tuned = tuned_settings("tokens:", chosen.algorithm)
    changes = {name: tuned[name] for name in ("clip_low", "clip_high") if name in tuned}
    if chosen.total_steps is not None and chosen.num_iterations is None:
        changes["num_iterations"] = None
    if chosen.lora_rank is not None:
        changes["learning_rate"] = LORA_RATE
    default = object.__new__(Arguments)  # what it lacks are the defaults of its class
    default.hyperparams = completed(DEFAULTS.replace(**changes), kind)
    return parse_flags(Arguments, flags, default=default)

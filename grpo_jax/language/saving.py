"""Writes folders that `load_model` and transformers read, also of tiny new models, and adapters (LoRA) for PEFT."""

import contextlib
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from grpo_jax.errors import ConfigError
from grpo_jax.language.folder import ADAPTER, CONFIG, FILES, describe_architecture, file_in, read_config
from grpo_jax.language.models import LanguageModel, changed_fields
from grpo_jax.language.tokenizer import Tokenizer
from grpo_jax.language.weights import ADAPTER_WEIGHTS, WEIGHTS, actor_params, adapter_weights, published_weights
from grpo_jax.policies import Transformer, categorical, make_token_policy
from grpo_jax.policies.transformer import DTYPES
from grpo_jax.recording.files import Arrays, as_path, new_files, write_arrays, write_json
from grpo_jax.types import PyTree

_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
END, BEGIN = "<|im_end|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_trained(folder: str | Path, model: LanguageModel, params: PyTree, *, dtype: str = "float32") -> None:
    """Writes new weights of a model, with the other files of its folder. Adapters (LoRA) are added to the weights.

    config.json has what `load_model` was told to change, such as `rope_base` or `tie_embeddings`.

    Args:
      model: the model that was trained; with adapters, `model._replace(architecture=config.network)`.
      folder, params, dtype: see `save_model`.

    Raises:
      ConfigError: for another dtype, or params of another architecture.
    """
    description = read_config(model.folder) | changed_fields(model, len(actor_params(params)["embedding"]))
    with _model_files(folder, dtype, model.folder) as new:
        _write_model(new, description, published_weights(model.architecture, params, dtype), dtype)


def save_model(
    folder: str | Path,
    architecture: Transformer,
    params: PyTree,
    tokenizer: Any,
    *,
    end_token: str,
    context: int,
    chat_template: str | None = None,
    special_tokens: Mapping[str, str] | None = None,
    dtype: str = "float32",
) -> None:
    """Writes a new model folder. Adapters (LoRA) are added to the weights.

    Args:
      folder: created if it does not exist. All its files are written, or none.
      architecture: a combination of variants that a published model type has.
      params: of a policy with this architecture, without an axis of rows.
      tokenizer: a `tokenizers.Tokenizer`.
      end_token: text of the token that ends a completion; it is also `eos_token` and `pad_token`.
      context: the most tokens of a prompt and its completion.
      chat_template: in Jinja; None: the model reads plain texts only.
      special_tokens: further ones, such as `{"bos_token": "<s>"}`.
      dtype: of the weights, "float32" or "bfloat16".

    Raises:
      ConfigError: for another dtype or combination of variants, other params, or an end token that is none.
    """
    if isinstance(tokenizer, Tokenizer):
        raise ConfigError("save_model needs a tokenizers.Tokenizer; for the model of a folder, use save_trained")
    special = {"eos_token": end_token, "pad_token": end_token, **(special_tokens or {})}
    number_of = {token: tokenizer.token_to_id(token) for token in special.values()}
    if missing := [token for token, number in number_of.items() if number is None]:
        raise ConfigError(f"the tokenizer has no token {missing[0]!r}; add it as a special token before training it")
    numbers = {f"{name}_token_id": number_of.get(special.get(f"{name}_token")) for name in ("bos", "eos", "pad")}
    vocab_size = len(actor_params(params)["embedding"])
    description = describe_architecture(architecture, vocab_size=vocab_size, context=context) | numbers
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    about |= {"model_max_length": context} | ({} if chat_template is None else {"chat_template": chat_template})
    with _model_files(folder, dtype) as new:
        (new / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        write_json(new / "tokenizer_config.json", about)
        write_json(new / "generation_config.json", numbers)
        _write_model(new, description, published_weights(architecture, params, dtype), dtype)


def make_tiny_model(
    folder: str | Path,
    texts: Iterable[str],
    *,
    num_layers: int = 2,
    width: int = 64,
    vocab_size: int = 512,
    context: int = 512,
    seed: int = 0,
) -> None:
    """Writes a model folder, to try things out: random weights, and a byte-level BPE of the texts.

    Args:
      folder: the folder to write; ConfigError if it has a model already.
      texts: what the tokenizer is trained on.
      num_layers, width: of the transformer, a Qwen3 with 4 heads.
      vocab_size: the most tokens, at least the 256 bytes and the two special tokens.
      context: the most tokens of a prompt and its completion.
      seed: of the weights.
    """
    if (Path(folder) / "config.json").exists():
        raise ConfigError(f"{folder} already has a model; name another folder")
    tokenizer = train_tokenizer(texts, vocab_size)
    sizes = {"num_layers": num_layers, "width": width, "num_heads": 4, "num_kv_heads": 2}
    architecture = Transformer(**sizes, tie_embeddings=True, qk_norm=True)
    policy = make_token_policy(architecture, categorical(tokenizer.get_vocab_size()), max_steps=1)
    params = jax.jit(policy.init)(jax.random.key(seed))
    save_model(folder, architecture, params, tokenizer, end_token=END, context=context, chat_template=CHAT_TEMPLATE)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE with the special tokens of `CHAT_TEMPLATE`, as a `tokenizers.Tokenizer`.

    Each digit is a token, as in Qwen: a number of several digits is read and written digit by digit.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, BEGIN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_adapter(folder: str | Path, model: LanguageModel, params: PyTree, *, dtype: str = "float32") -> None:
    """Writes the adapters of a trained model, with its tokenizer; the frozen weights stay in the model's own folder.

    `peft` and transformers load them on top of that folder.

    Args:
      folder: created if it does not exist. All its files are written, or none.
      model: the model that was trained, `model._replace(architecture=config.network)`, with `lora_rank`.
      params: of its policy, without an axis of rows.
      dtype: of the adapters, "float32" or "bfloat16".

    Raises:
      ConfigError: for another dtype, without adapters, or for a model that differs from its folder's.
    """
    if model.architecture.adapter is None:
        raise ConfigError("save_adapter needs adapters, and the architecture has no lora_rank; use save_trained")
    if model.adapter is not None or changed_fields(model, len(actor_params(params)["embedding"])):
        advice = "use save_trained, which adds adapters to the weights"
        raise ConfigError(f"the trained model began with another architecture or context, or an adapter; {advice}")
    tensors = adapter_weights(model.architecture, params, dtype)
    description = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model.folder.resolve())},
        **{"r": model.architecture.lora_rank, "lora_alpha": model.architecture.lora_alpha, "lora_dropout": 0.0},
        **{"target_modules": sorted({name.split(".")[-3] for name in tensors}), "bias": "none"},
        **{"fan_in_fan_out": False, "inference_mode": True},
    }
    with _model_files(folder, dtype, model.folder) as new:
        write_json(new / ADAPTER, description)
        write_arrays(new / ADAPTER_WEIGHTS, tensors, {"format": "pt"})


@contextlib.contextmanager
def _model_files(folder: str | Path, dtype: str, source: Path | None = None) -> Iterator[Path]:
    """As `new_files`, with the tokenizer of a model folder; new weights replace all files of those that it had."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}; use one of {', '.join(DTYPES)}")
    folder = as_path(folder)
    with new_files(folder) as new:
        for path in (file_in(source, name) for name in FILES) if source else ():
            if path.exists():
                shutil.copyfile(path, new / path.name)
        yield new
        written = {path.name for path in new.iterdir()}
    if CONFIG in written:
        for path in folder.glob("model*.safetensors*"):
            if path.name not in written and _WEIGHT_FILE.fullmatch(path.name):
                path.unlink()


def _write_model(folder: Path, description: Mapping[str, Any], weights: Arrays, dtype: str) -> None:
    """Writes config.json, with these fields, and the weights."""
    import huggingface_hub  # which tokenizers needs

    write_json(folder / CONFIG, {**description, "dtype": dtype, "torch_dtype": dtype})
    split = huggingface_hub.split_state_dict_into_shards_factory(  # of at most 5 GB each
        weights, get_storage_size=lambda tensor: tensor.nbytes, filename_pattern="model{suffix}.safetensors"
    )
    for file, names in split.filename_to_tensors.items():
        # transformers refuses files that do not name a framework.
        write_arrays(folder / file, {name: weights[name] for name in names}, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / f"{WEIGHTS}.index.json", index)

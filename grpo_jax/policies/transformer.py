"""A transformer of tokens as a value: its sizes and variants.

LoRA (https://arxiv.org/abs/2106.09685) trains small adapters beside the frozen kernels of the dense layers:

    y = x kernel + lora_alpha / lora_rank · x lora_a lora_b

with lora_a `[inputs, rank]` and lora_b `[rank, outputs]`. lora_b begins at 0, so at first the outputs equal the
model's without adapters. `lora_rank` turns it on.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from grpo_jax.errors import ConfigError, KnownFields, as_count
from grpo_jax.policies.dense import Adapter, adapter_init
from grpo_jax.types import PyTree

DENSE_LAYERS = ("qkv", "out", "gate_up", "down")
"""The dense layers of a block."""
DTYPES = ("float32", "bfloat16")
LARGEST_FLOAT = 2.0**127  # well within float32
_LORA_OPTIONS = ("lora_alpha", "frozen_dtype")  # fields that have no effect without lora_rank


class Sizes(NamedTuple):
    """Sizes of a `Transformer`, none of them None."""

    heads: int
    kv_heads: int
    head: int
    feedforward: int


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Transformer(KnownFields):
    """A decoder in the layout of Llama and Qwen: pre-norm, rotary positions, gated feed-forward layers.

    Raises:
      ConfigError: at construction, for sizes that do not fit together.
    """

    num_layers: int = 2
    """Transformer blocks."""
    width: int = 64
    """Width of the transformer's residual stream."""
    num_heads: int = 4
    """Attention heads of each transformer block."""
    num_kv_heads: int | None = None
    """Heads of keys and values; equally many attention heads share each. None: as many as num_heads."""
    head_size: int | None = None
    """Size of one attention head; None: width / num_heads."""
    feedforward_size: int | None = None
    """Units of the transformer's feed-forward layers; None: 8/3 of the width, rounded up to a multiple of 8."""
    rope_base: float = 10_000.0
    """Base of the rotary positions: the slowest pair of features turns by about 1/rope_base per token."""
    rope_scaling: tuple[float, ...] | None = None
    """Of a context that was extended: (factor,) for linear scaling, or (factor, low_freq_factor, high_freq_factor,
    original_max_position_embeddings) for that of Llama 3.1; None: rotary positions are not scaled."""
    no_rope_interval: int | None = None
    """Every layer of this number has no rotary positions, such as each 4th in SmolLM3; None: all layers have them."""
    norm_eps: float = 1e-6
    """Added to the mean square in the transformer's RMS norms."""
    attention_bias: bool = False
    """Biases in the projections to queries, keys and values, as in Qwen2."""
    qk_norm: bool = False
    """RMS norms on the queries and keys of each head, as in Qwen3."""
    tie_embeddings: bool = False
    """Compute the logits with the token embeddings instead of a separate matrix."""
    vocab_size: int | None = None
    """Rows of the token embeddings; those beyond the tokens of the task are never sampled. None: one for each token."""
    compute_dtype: str = "float32"
    """Type of the transformer's activations, "float32" or "bfloat16"; norms and logits are always float32."""
    checkpoint_layers: bool = False
    """Gradients compute the activations of each block again instead of keeping them: less memory, a third more time."""
    lora_rank: int | None = None
    """Rank of the adapters of LoRA, which are trained while all other weights stay frozen; None: no adapters."""
    lora_alpha: float = 16.0
    """The product of an adapter's two matrices is multiplied by lora_alpha / lora_rank."""
    frozen_dtype: str = "float32"
    """Type in which the weights that LoRA freezes are kept, "float32" or "bfloat16"."""

    shared_critic: bool = False
    """The critic is a second head of the actor's network instead of a separate network."""

    def __post_init__(self):
        """Checks the sizes."""
        for name, field in self.__dataclass_fields__.items():
            value = getattr(self, name)
            if field.type in (int, int | None) and value is not None:
                object.__setattr__(self, name, as_count(name, value))
            if field.type is float:
                if isinstance(value, bool) or not (isinstance(value, int | float) and 0 < value <= LARGEST_FLOAT):
                    raise ConfigError(f"{name}={value!r:.50} must be a positive number, such as {field.default}")
                object.__setattr__(self, name, float(value))
            if name.endswith("_dtype") and value not in DTYPES:
                raise ConfigError(f"{name}={value!r}; use one of {', '.join(DTYPES)}")
            if name in _LORA_OPTIONS and self.lora_rank is None and value != field.default:
                raise ConfigError(f"{name}={value!r} has no effect without adapters; set lora_rank, or leave it out")
        if self.rope_scaling is not None:
            self._check_rope_scaling()
        if self.head_size is None and self.width % self.num_heads:
            raise ConfigError(f"num_heads={self.num_heads} does not divide width={self.width}; change it or head_size")
        if self.sizes.head % 2:
            raise ConfigError(
                f"heads of size {self.sizes.head}, but rotary positions need an even size: change width or num_heads, "
                "or set head_size"
            )
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ConfigError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; change it")

    def _check_rope_scaling(self):
        given = self.rope_scaling
        numbers = given if isinstance(given, tuple | list) else ()
        are_positive = all(type(each) in (int, float) and 0 < each <= LARGEST_FLOAT for each in numbers)
        if not are_positive or not (len(numbers) == 1 or len(numbers) == 4 and numbers[1] < numbers[2]):
            form = "(factor,), or (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings)"
            raise ConfigError(f"rope_scaling={given!r:.200} must be {form}, low < high, such as (8.0, 1.0, 4.0, 8192)")
        object.__setattr__(self, "rope_scaling", tuple(numbers))

    def has_rope(self, layer: int) -> bool:
        """Whether the layer of this index, from 0, has rotary positions."""
        return self.no_rope_interval is None or (layer + 1) % self.no_rope_interval > 0

    @property
    def adapter(self) -> Adapter | None:
        """The adapter of each dense layer of the blocks."""
        return None if self.lora_rank is None else Adapter(self.lora_rank, self.lora_alpha / self.lora_rank)

    @property
    def without_lora(self) -> "Transformer":
        """The architecture whose layers have no adapters."""
        defaults = {field: getattr(Transformer, field) for field in _LORA_OPTIONS}
        return dataclasses.replace(self, lora_rank=None, **defaults)

    @property
    def sizes(self) -> Sizes:
        """The sizes, with defaults instead of None."""
        return Sizes(
            heads=self.num_heads,
            kv_heads=self.num_kv_heads or self.num_heads,
            head=self.head_size or self.width // self.num_heads,
            feedforward=self.feedforward_size or -(-self.width // 3) * 8,
        )


def is_trained(path: str) -> bool:
    """Whether a parameter of a transformer with LoRA is trained: an adapter, a value head, or a separate critic."""
    names = path.split("/")
    return names[0] == "critic" or "value" in names or names[-1] in ("lora_a", "lora_b")


def add_lora(architecture: Transformer, params: PyTree, key: jax.Array) -> PyTree:
    """The parameters of a model with fresh adapters, which do not change its outputs yet.

    Args:
      architecture: with `lora_rank`.
      params: of the policy without adapters, such as `{"actor": ...}` from `load_params`. Weights that LoRA freezes get
        `frozen_dtype`, except for the norms' scales.
      key: of the adapters.

    Raises:
      ConfigError: the architecture has no `lora_rank`, or the parameters have adapters already.
    """
    flat, rank = flatten_dict(params), architecture.lora_rank
    if architecture.adapter is None:
        raise ConfigError("add_lora needs an architecture with adapters; use dataclasses.replace(..., lora_rank=16)")
    if any(path[-1] == "lora_a" for path in flat):
        raise ConfigError("the parameters have adapters already; merge_lora adds them to the weights")
    kernels = {}
    for number, path in enumerate(sorted(flat)):
        *layer, name = path
        leaf = flat[path]
        if path[0] == "critic":
            continue
        if name in ("kernel", "bias", "embedding") and not is_trained("/".join(path)):
            flat[path] = leaf.astype(architecture.frozen_dtype)
        if name == "kernel" and layer[-1] in DENSE_LAYERS:
            kernels.setdefault(leaf.shape, {})[number] = layer
    for (inputs, outputs), layers in kernels.items():  # a draw for each size, not each layer: far less to compile
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.array([*layers]))
        drawn = jax.vmap(lambda key, shape=(inputs, rank): adapter_init(key, shape, jnp.float32))(keys)
        for layer, lora_a in zip(layers.values(), drawn, strict=True):
            flat[*layer, "lora_a"], flat[*layer, "lora_b"] = lora_a, jnp.zeros((rank, outputs), jnp.float32)
    return unflatten_dict(flat)


def merge_lora(architecture: Transformer, params: PyTree) -> tuple[Transformer, PyTree]:
    """The same model without adapters, which are added to the kernels: its architecture and float32 parameters.

    Args:
      architecture: of the policy. Parameters without adapters keep their values.
      params: of the policy.

    Raises:
      ConfigError: the adapters have another rank than the architecture.
    """
    flat = flatten_dict(params)
    ranks = {leaf.shape[-1] for path, leaf in flat.items() if path[-1] == "lora_a"}
    if ranks - {architecture.lora_rank}:
        raise ConfigError(
            f"the parameters have adapters of rank {', '.join(map(str, ranks))}, but the architecture has lora_rank="
            f"{architecture.lora_rank}; use the policy's, config.network, which also has their lora_alpha"
        )
    merged = {path: leaf.astype(jnp.float32) for path, leaf in flat.items() if path[-1] not in ("lora_a", "lora_b")}
    for *layer, name in flat:
        if name == "lora_a":
            change = jnp.matmul(flat[*layer, "lora_a"], flat[*layer, "lora_b"], precision="highest")
            merged[*layer, "kernel"] += architecture.adapter.scale * change
    return architecture.without_lora, unflatten_dict(merged)

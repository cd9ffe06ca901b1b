"""A transformer of tokens as a value: its sizes and variants."""

import dataclasses
from typing import NamedTuple

from grpo_jax.errors import ConfigError, KnownFields, as_count
from grpo_jax.policies.dense import Adapter

DENSE_LAYERS = ("qkv", "out", "gate_up", "down")
"""The dense layers of a block."""
DTYPES = ("float32", "bfloat16")
LARGEST_FLOAT = 2.0**127  # well within float32
_COUNTS = (
    *("num_layers", "width", "num_heads", "num_kv_heads", "head_size", "feedforward_size"),
    *("vocab_size", "lora_rank"),
)
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
        for field in _COUNTS:
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, as_count(field, value))
        for field in ("rope_base", "norm_eps", "lora_alpha"):
            value, default = getattr(self, field), getattr(Transformer, field)
            if isinstance(value, bool) or not (isinstance(value, int | float) and 0 < value <= LARGEST_FLOAT):
                raise ConfigError(f"{field}={value!r:.50} must be a positive number, such as {default}")
            object.__setattr__(self, field, float(value))
        for field in ("compute_dtype", "frozen_dtype"):
            if getattr(self, field) not in DTYPES:
                raise ConfigError(f"{field}={getattr(self, field)!r}; use one of {', '.join(DTYPES)}")
        self._check_lora()
        if self.head_size is None and self.width % self.num_heads:
            raise ConfigError(
                f"width={self.width} is not a multiple of num_heads={self.num_heads}; change one, or set head_size"
            )
        size = self.head_size or self.width // self.num_heads
        if size % 2:
            raise ConfigError(
                f"heads of size {size}, but rotary positions need an even size: change width or num_heads, or set "
                "head_size"
            )
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; change one of them"
            )

    def _check_lora(self):
        for field in _LORA_OPTIONS:
            if self.lora_rank is None and getattr(self, field) != getattr(Transformer, field):
                raise ConfigError(
                    f"{field}={getattr(self, field)!r} has no effect without adapters; set lora_rank, such as 16, or "
                    f"leave out {field}"
                )

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

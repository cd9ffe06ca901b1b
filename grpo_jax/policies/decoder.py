"""A decoder-only transformer. The caller holds its cache: the keys and values of each layer."""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.lax import broadcast_to_rank

from grpo_jax.policies.dense import Dense, product
from grpo_jax.policies.transformer import Transformer
from grpo_jax.types import PyTree


class KeysValues(NamedTuple):
    """The keys and values of `C` tokens in one layer. Heads come before tokens, so that no step of decoding copies."""

    keys: jax.Array  # [N, kv_heads, C, head]
    values: jax.Array  # [N, kv_heads, C, head]


class Decoder(nn.Module):
    """Embeddings, blocks, a norm, and heads: "actor" gives a logit for each token, "critic" a value.

    The head "features" gives the input of the others, and needs none of their parameters.
    """

    architecture: Transformer
    vocab_size: int
    heads: tuple[str, ...]

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        past: tuple[KeysValues, ...] | None = None,
        slot: jax.Array | None = None,
    ) -> tuple[list[jax.Array], tuple[KeysValues, ...]]:
        """Processes `S` tokens that follow `C` cached ones.

        Args:
          tokens: `[N, S]` int32.
          positions: `[N, S]` int32: the position of each token in its text.
          mask: `[N, S, K]` bool: which of the K keys each token attends to.
          past: the cached keys and values of each layer; None: there are none (C = 0).
          slot: `[N]`: the index in the cache that a single token (S = 1) is written to, so K = C; an index beyond the
            end writes nothing. None appends all S tokens, so K = C + S.

        Returns:
          The output of each head, float32 `[N, S, vocab_size]`, `[N, S, 1]` or `[N, S, width]`; and the cache with the
          new tokens.
        """
        config = self.architecture
        embedding = self.param(
            "embedding", nn.initializers.normal(0.02), (self.vocab_size, config.width), config.frozen_dtype
        )
        x = embedding[tokens].astype(config.compute_dtype)
        has_rope = [config.has_rope(layer) for layer in range(config.num_layers)]
        rotations = {has: _rotation(positions * int(has), config) for has in {*has_rope}}  # without: by an angle of 0
        cache = []
        for layer, past_of_layer in enumerate(past or (None,) * config.num_layers):
            name, inputs = f"block_{layer}", (x, rotations[has_rope[layer]], mask, past_of_layer, slot)
            if self.is_initializing():
                x, kept = Block(config, name=name)(*inputs)
            else:
                x, kept = _block(config, self.get_variable("params", name), *inputs)
            cache.append(kept)
        x = Norm(config.norm_eps, name="norm")(x).astype(jnp.float32)
        x = x.reshape(-1, config.width)
        outputs = [x] if "features" in self.heads else []
        if "actor" in self.heads and config.tie_embeddings:
            outputs.append(token_logits(config, {"embedding": embedding}, x))
        elif "actor" in self.heads:
            outputs.append(Dense(self.vocab_size, use_bias=False, param_dtype=config.frozen_dtype, name="logits")(x))
        if "critic" in self.heads:
            outputs.append(Dense(1, kernel_init=nn.initializers.zeros, name="value")(x))
        return [output.reshape(*tokens.shape, output.shape[-1]) for output in outputs], tuple(cache)


def token_logits(architecture: Transformer, params: PyTree, features: jax.Array) -> jax.Array:
    """The head "actor": `[..., width]` features to `[..., vocab_size]` logits."""
    kernel = params["embedding"].T if architecture.tie_embeddings else params["logits"]["kernel"]
    return product(features, kernel.astype(features.dtype))


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    architecture: Transformer

    @nn.compact
    def __call__(self, x, rotation, mask, past, slot):
        """Like `Decoder`, for one layer; `x` and the first result are `[N, S, width]`."""
        config, size = self.architecture, self.architecture.sizes
        norm = functools.partial(Norm, config.norm_eps)

        dtypes = {"dtype": config.compute_dtype, "param_dtype": config.frozen_dtype}
        dense = functools.partial(Dense, use_bias=False, adapter=config.adapter, **dtypes)

        # 2 * num_layers branches add to the residual stream; with this scale their variances add up to 1.
        into_stream = nn.initializers.variance_scaling(0.5 / config.num_layers, "fan_in", "normal")
        batch_shape, num_heads = x.shape[:2], size.heads + 2 * size.kv_heads

        # Flat, as one large matrix product is faster than many small ones.
        x = x.reshape(-1, config.width)
        qkv = dense(num_heads * size.head, use_bias=config.attention_bias, name="qkv")(norm(name="norm_1")(x))
        qkv = qkv.reshape(*batch_shape, num_heads, size.head)
        query, key, value = jnp.split(qkv, [size.heads, size.heads + size.kv_heads], axis=2)
        if config.qk_norm:
            query, key = norm(name="query_norm")(query), norm(name="key_norm")(key)
        query, key = _rotate(query, rotation), _rotate(key, rotation)
        kept = _join(past, KeysValues(key, value), slot)
        attended = (_attend if slot is None else _attend_from_one)(query, kept, mask)
        attended = attended.reshape(x.shape[0], size.heads * size.head)
        x = x + dense(config.width, kernel_init=into_stream, name="out")(attended)

        gate, up = jnp.split(dense(2 * size.feedforward, name="gate_up")(norm(name="norm_2")(x)), 2, axis=-1)
        x = x + dense(config.width, kernel_init=into_stream, name="down")(nn.silu(gate) * up)
        return x.reshape(*batch_shape, config.width), kept


@functools.partial(jax.jit, static_argnums=0)  # traced, and differentiated, once for all layers
def _block(architecture, params, *inputs):
    def apply(params, *inputs):
        return Block(architecture).apply({"params": params}, *inputs)

    return (jax.checkpoint(apply) if architecture.checkpoint_layers else apply)(params, *inputs)


class Norm(nn.Module):
    """x / sqrt(mean(x²) + eps) · scale, over the last axis, in float32 (https://arxiv.org/abs/1910.07467)."""

    eps: float

    @nn.compact
    def __call__(self, x):
        """`x` is `[..., features]`; the result has its shape and dtype."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        full = x.astype(jnp.float32)
        full = full * jax.lax.rsqrt(jnp.mean(full**2, axis=-1, keepdims=True) + self.eps)
        return (full * broadcast_to_rank(scale, x.ndim)).astype(x.dtype)


def _rotation(positions, architecture):
    """Cosine and sine `[N, S, 1, head_size / 2]` of the angle of each pair."""
    frequencies = rope_frequencies(architecture)
    angles = positions[..., None, None].astype(frequencies.dtype) * frequencies[None, None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rope_frequencies(architecture: Transformer) -> jax.Array:
    """The angle by which each pair i of the `h` features of a head turns per token, `[h / 2]`: f = base^(-2 i / h).

    The base is `rope_base` (https://arxiv.org/abs/2104.09864). `rope_scaling` divides f by its factor. With all of its
    numbers (Llama 3.1), it does so only to pairs that turn slowly, less than low times in the original context c:

        f · (k + (1 - k) / factor),  k = clip((c f / 2π - low) / (high - low), 0, 1)
    """
    size = architecture.sizes.head
    frequencies = architecture.rope_base ** (-jnp.arange(size // 2) / (size // 2))
    if architecture.rope_scaling is None:
        return frequencies
    factor, *others = architecture.rope_scaling
    if not others:
        return frequencies / factor
    low, high, context = others
    kept = jnp.clip((context * frequencies / (2 * jnp.pi) - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def _rotate(x, rotation):
    """Rotates the pairs (x[i], x[i + head / 2]) of `[N, S, heads, head]`, the pairs of Llama's published weights."""
    cos, sin = rotation
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _attend(query, kept, mask):
    """Attention `[N, S, heads, head]` to the keys and values of `kept`, where `mask` `[N, S, K]` is true."""
    keys, values = (jnp.swapaxes(leaf, 1, 2) for leaf in kept)
    return jax.nn.dot_product_attention(query, keys, values, mask=mask[:, None])


def _attend_from_one(query, kept, mask):
    """`_attend` for a single token. It reads the cache as it lies, where XLA for CPUs would move it: half the time."""
    grouped = query.reshape(*kept.keys.shape[:2], -1, query.shape[-1])
    logits = jnp.einsum("nkgh,nkch->nkgc", grouped, kept.keys, preferred_element_type=jnp.float32)
    logits = jnp.where(mask[:, None], logits * query.shape[-1] ** -0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits).astype(query.dtype)
    return jnp.einsum("nkgc,nkch->nkgh", weights, kept.values).reshape(query.shape)


def _join(past, new, slot):
    """The cache with the new keys and values, appended or, for a single token, written at index `slot`."""
    if slot is None:
        new = jax.tree.map(lambda new: jnp.swapaxes(new, 1, 2), new)
        return new if past is None else jax.tree.map(lambda *both: jnp.concatenate(both, axis=2), past, new)
    # `vmap`, so that no device needs the rows of another.
    write = jax.vmap(lambda old, new, slot: old.at[:, slot].set(new[0], mode="drop"))
    return jax.tree.map(lambda old, new: write(old, new, slot), past, new)

"""A transformer as a policy: the prompt is read first, the observation is the last token, the action the next one."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.errors import ConfigError
from grpo_jax.policies.decoder import Decoder, token_logits
from grpo_jax.policies.dense import Dense
from grpo_jax.policies.distributions import Distribution
from grpo_jax.policies.policy import Policy
from grpo_jax.policies.sampling import change_logits
from grpo_jax.policies.transformer import DENSE_LAYERS, Transformer, is_trained

Networks = dict[str, Decoder]


class TokenCarry(NamedTuple):
    """The state of `N` texts: the prompt, and the cached keys and values of all tokens so far."""

    prompt: jax.Array  # [N, P] int32, -1 where there is no token
    step: Any  # [N] int32: tokens after the prompt so far
    cache: Any  # for each network, for each layer: KeysValues [N, kv_heads, P + num_steps, head]


def make_token_policy(
    architecture: Transformer,
    distribution: Distribution,
    *,
    max_steps: int,
    critic: bool = False,
    logits_chunk: int | None = None,
) -> Policy:
    """A transformer as the actor, and an optional critic: a second head of it or another transformer.

    `step` reads one token and adds its keys and values to the cache. `sequence` reads whole completions in parallel. It
    recomputes the keys and values of the prompts from the parameters it is given, so of the carry it needs only the
    prompts. Their number `M` may be smaller than the number `N` of completions: consecutive groups of N / M completions
    then share a prompt.

    Args:
      architecture: sizes of each network. With LoRA a separate critic has no adapters: all its weights are trained.
      distribution: categorical over the vocabulary.
      max_steps: the most tokens after a prompt, for which a carry reserves space.
      critic: whether to make a critic.
      logits_chunk: tokens whose logits an update computes at once; None: all.

    Raises:
      ConfigError: the architecture has fewer embeddings than there are tokens.
    """
    num_tokens = distribution.num_parameters
    vocab_size = architecture.vocab_size or num_tokens
    if vocab_size < num_tokens:
        raise ConfigError(f"vocab_size={vocab_size}, but the task has {num_tokens} tokens; leave it out or use as many")
    heads = ("actor", "critic") if critic else ("actor",)
    groups = [heads] if architecture.shared_critic else [(head,) for head in heads]
    networks = {
        "_".join(group): Decoder(architecture if "actor" in group else architecture.without_lora, vocab_size, group)
        for group in groups
    }
    name, network = next(iter(networks.items()))  # the actor's

    def features(params, observation, carry, is_first):
        return _read_completions({name: network.clone(heads=("features",))}, params, observation, carry)[0]

    def value_head(params, features):
        return Dense(1).apply({"params": params[name]["value"]}, features)[..., 0]

    policy = Policy(
        init=functools.partial(_init, networks),
        initial_carry=functools.partial(_initial_carry, networks, max_steps),
        step=functools.partial(_step, networks),
        sequence=functools.partial(_sequence, networks),
        distribution=distribution,
        has_critic=critic,
        has_carry=True,
        sequence_carry=lambda carry: TokenCarry(carry.prompt, (), ()),
        features=features,
        head=lambda params, features: token_logits(architecture, params[name], features),
        value_head=value_head if critic and architecture.shared_critic else None,
        cast=functools.partial(_cast, architecture.compute_dtype),
        max_steps=max_steps,
        resize=_resize,
        logits_chunk=logits_chunk,
        trainable=None if architecture.adapter is None else is_trained,
        rounding=4 * float(jnp.finfo("bfloat16").eps) if architecture.compute_dtype == "bfloat16" else 0.0,
    )
    return policy if vocab_size == num_tokens else change_logits(policy, lambda logits: logits[..., :num_tokens])


def _init(networks: Networks, key):
    """Parameters of each network, by name."""
    keys, inputs = jax.random.split(key, len(networks)), _prompt_inputs(jnp.zeros((1, 1), jnp.int32))
    return {name: net.init(k, *inputs)["params"] for k, (name, net) in zip(keys, networks.items(), strict=True)}


def _cast(compute_dtype, params):
    """The weights of the blocks' dense layers in bfloat16, if they are computed in it; embeddings and heads are not."""

    def cast(path, leaf):
        in_block = any(key.key in DENSE_LAYERS for key in path)
        return leaf.astype(compute_dtype) if in_block and compute_dtype == "bfloat16" else leaf

    return jax.tree_util.tree_map_with_path(cast, params)


def _initial_carry(networks: Networks, max_steps: int, params, num_envs, prompt=None):
    prompt = jnp.zeros((num_envs, 0), jnp.int32) if prompt is None else prompt
    cache = _apply(networks, params, _prompt_inputs(prompt))[1]
    return _resize(TokenCarry(prompt, jnp.zeros(num_envs, jnp.int32), cache), max_steps)


def _resize(carry, num_steps):
    length = carry.prompt.shape[1] + num_steps

    def resized(leaf):
        more = length - leaf.shape[2]
        return leaf[:, :, :length] if more <= 0 else jnp.pad(leaf, ((0, 0), (0, 0), (0, more), (0, 0)))

    return carry._replace(cache=jax.tree.map(resized, carry.cache))


def _step(networks: Networks, params, observation, carry):
    is_token = carry.prompt >= 0
    positions = jnp.sum(is_token, axis=1) + carry.step
    num_steps = jax.tree.leaves(carry.cache)[0].shape[2] - carry.prompt.shape[1]
    is_read = jnp.arange(num_steps)[None] <= carry.step[:, None]
    mask = jnp.concatenate([is_token, is_read], axis=1)
    inputs = observation[:, None], positions[:, None], mask[:, None]
    outputs, cache = _apply(networks, params, inputs, carry.cache, carry.prompt.shape[1] + carry.step)
    logits, *value = (output[:, 0] for output in outputs)
    return logits, value[0][..., 0] if value else None, TokenCarry(carry.prompt, carry.step + 1, cache)


def _sequence(networks: Networks, params, observation, carry, is_first):
    logits, *value = _read_completions(networks, params, observation, carry)
    return logits, value[0][..., 0] if value else None


def _read_completions(networks: Networks, params, observation, carry):
    """The outputs of all heads, each `[S, N, ...]`."""
    num_steps, num_completions = observation.shape
    repeat = functools.partial(jnp.repeat, repeats=num_completions // carry.prompt.shape[0], axis=0)
    is_token = repeat(carry.prompt >= 0)
    positions = jnp.sum(is_token, axis=1, keepdims=True) + jnp.arange(num_steps)[None]
    shape = (num_completions, num_steps)
    causal = jnp.broadcast_to(jnp.tri(num_steps, dtype=bool), (*shape, num_steps))
    mask = jnp.concatenate([jnp.broadcast_to(is_token[:, None], (*shape, is_token.shape[1])), causal], axis=2)
    cache = jax.tree.map(repeat, _apply(networks, params, _prompt_inputs(carry.prompt))[1])
    outputs, _ = _apply(networks, params, (observation.T, positions, mask), cache)
    return [jnp.swapaxes(output, 0, 1) for output in outputs]


def _apply(networks: Networks, params, inputs, cache=None, slot=None) -> tuple[list[jax.Array], dict]:
    """The outputs of all heads, the actor's first, and the new cache of each network."""
    outputs, new_cache = [], {}
    for name, net in networks.items():
        heads, new_cache[name] = net.apply({"params": params[name]}, *inputs, cache and cache[name], slot)
        outputs += heads
    return outputs, new_cache


def _prompt_inputs(tokens):
    """The inputs of a `Decoder` that reads prompts `[N, P]`: tokens, positions (padding has none) and mask."""
    is_token = tokens >= 0
    mask = is_token[:, None] & jnp.tri(tokens.shape[1], dtype=bool)[None]
    return jnp.maximum(tokens, 0), jnp.cumsum(is_token, axis=1) - 1, mask

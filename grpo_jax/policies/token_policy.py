"""A transformer as a policy: the action is the next token, the observation the last one, the prompt what was before."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.policies.distributions import Distribution
from grpo_jax.policies.policy import Policy
from grpo_jax.policies.transformer import Architecture, KeysValues, Transformer


class Memory(NamedTuple):
    """What a policy has read of each of `N` texts."""

    prompt: jax.Array  # [N, P] int32, -1 where there is no token
    step: Any  # [N] int32: tokens read since
    cache: Any  # of each network, of each layer: KeysValues [N, P + max_steps, ...]


def make_token_policy(
    architecture: Architecture,
    distribution: Distribution,
    *,
    max_steps: int,
    critic: bool = False,
    shared_critic: bool = False,
) -> Policy:
    """A transformer that acts, and a critic that is a head of it or a transformer of its own.

    `step` reads one token and keeps its keys and values. `sequence` reads whole completions in parallel, and the
    prompts before them, under the parameters it is given: of the carry it takes the prompts alone, which may be `M`
    in number for `N` completions, N / M after each other for each.

    Args:
      architecture: sizes of the network or of both.
      distribution: categorical over the vocabulary.
      max_steps: the most tokens read after a prompt, that is kept by a carry.
      critic: whether to make one.
      shared_critic: a head of the actor in place of a network of its own.
    """
    heads = ("actor", "critic") if critic else ("actor",)
    groups = [heads] if shared_critic else [(head,) for head in heads]
    networks = {"_".join(group): Transformer(architecture, distribution.num_parameters, group) for group in groups}

    def init(key):
        keys = dict(zip(networks, jax.random.split(key, len(networks)), strict=True))
        text, nothing = _text(jnp.zeros((1, 1), jnp.int32)), _nothing(architecture, 1)
        return {name: net.init(keys[name], *text, nothing)["params"] for name, net in networks.items()}

    def read(params, prompt):
        """Keys and values of the prompts, in each network."""
        nothing = _nothing(architecture, prompt.shape[0])
        return {name: net.apply({"params": params[name]}, *_text(prompt), nothing)[1] for name, net in networks.items()}

    def initial_carry(params, num_envs, prompt=None):
        prompt = jnp.zeros((num_envs, 0), jnp.int32) if prompt is None else prompt
        grow = functools.partial(jnp.pad, pad_width=((0, 0), (0, max_steps), (0, 0), (0, 0)))
        return Memory(prompt, jnp.zeros(num_envs, jnp.int32), jax.tree.map(grow, read(params, prompt)))

    def step(params, observation, carry):
        present = carry.prompt >= 0
        positions = jnp.sum(present, axis=1) + carry.step
        read_since = jnp.arange(max_steps) <= carry.step[:, None]
        mask = jnp.concatenate([present, read_since], axis=1)
        arguments = observation[:, None], positions[:, None], mask[:, None]
        outputs, cache = _apply(networks, params, arguments, carry.cache, carry.prompt.shape[1] + carry.step)
        logits, *value = (output[:, 0] for output in outputs)
        return logits, value[0][..., 0] if critic else None, Memory(carry.prompt, carry.step + 1, cache)

    def sequence(params, observation, carry, is_first):
        num_steps, num_completions = observation.shape
        repeat = functools.partial(jnp.repeat, repeats=num_completions // carry.prompt.shape[0], axis=0)
        present = repeat(carry.prompt >= 0)
        positions = jnp.sum(present, axis=1, keepdims=True) + jnp.arange(num_steps)
        shape = (num_completions, num_steps)
        causal = jnp.broadcast_to(jnp.tri(num_steps, dtype=bool), (*shape, num_steps))
        mask = jnp.concatenate([jnp.broadcast_to(present[:, None], (*shape, present.shape[1])), causal], axis=2)
        past = jax.tree.map(repeat, read(params, carry.prompt))
        outputs, _ = _apply(networks, params, (observation.T, positions, mask), past, None)
        logits, *value = (jnp.swapaxes(output, 0, 1) for output in outputs)
        return logits, value[0][..., 0] if critic else None

    return Policy(
        init=init,
        initial_carry=initial_carry,
        step=step,
        sequence=sequence,
        distribution=distribution,
        has_critic=critic,
        has_carry=True,
        sequence_carry=lambda carry: Memory(carry.prompt, (), ()),
        max_steps=max_steps,
    )


def _apply(networks, params, arguments, past, slot) -> tuple[list[jax.Array], dict]:
    """The outputs of all heads, the actor's first, and the past of each network, with what was read now."""
    outputs, after = [], {}
    for name, net in networks.items():
        heads, after[name] = net.apply({"params": params[name]}, *arguments, past[name], slot)
        outputs += heads
    return outputs, after


def _text(tokens):
    """What a transformer takes to read texts `[N, P]` from their beginning; a place without a token is not counted."""
    present = tokens >= 0
    mask = present[:, None] & jnp.tri(tokens.shape[1], dtype=bool)
    return jnp.maximum(tokens, 0), jnp.cumsum(present, axis=1) - 1, mask


def _nothing(architecture: Architecture, num_texts: int) -> tuple[KeysValues, ...]:
    """The past of nothing read."""
    size = architecture.sizes
    empty = jnp.zeros((num_texts, 0, size.kv_heads, size.head), architecture.compute_dtype)
    return (KeysValues(empty, empty),) * architecture.num_layers

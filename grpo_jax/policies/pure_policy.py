"""Policies from two pure functions, `init` and `apply`, of any neural network library."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.errors import ConfigError
from grpo_jax.policies.distributions import Distribution
from grpo_jax.policies.policy import Policy
from grpo_jax.types import PyTree


def make_pure_policy(
    init: Callable,
    apply: Callable,
    observation: PyTree,
    distribution: Distribution,
    critic: bool,
    *,
    initial_carry: PyTree | Callable | None = None,
    features: Callable | None = None,
    trainable: Callable | None = None,
) -> Policy:
    """A policy from pure functions, such as the `init` and `apply` of a flax module.

        def network(observation, distribution, critic):
            module = Module(distribution.num_outputs)
            return make_pure_policy(module.init, module.apply, observation, distribution, critic)

        Config(network=network)

    The policy's parameters are `{"network": params}`, with an entry "free" for the free parameters of the distribution.

    Args:
      init: `(key, observation [1, ...]) -> params`, a pytree of floating-point arrays.
      apply: `(params, observation [N, ...]) -> outputs [N, distribution.num_outputs], value [N]`, both float32. The
        value may be None if `critic` is false, and is ignored then. With an initial carry: one step, `(params,
        observation [N, ...], carry) -> outputs, value, carry`, which the update scans over the sequence, with the carry
        reset at the first step of each episode.
      observation, distribution, critic: the arguments of the network function.
      initial_carry: the carry of one environment at the start of an episode, a pytree of arrays, or a function
        `(params, num_envs) -> carry`, each leaf `[num_envs, ...]`. None: the policy has no carry.
      features: `(params, observation [N, ...]) -> [N, F]`, the input of the actor's head, for a baseline that compares
        states by it. With an initial carry: `(params, observation, carry) -> [N, F]`.
      trainable: `(path) -> bool`, the parameters that gradient steps change, by paths such as
        "network/params/Dense_0/kernel" or "free". None: all of them.

    Raises:
      ConfigError: from the policy's `init`, if there are no parameters.
    """
    has_carry = initial_carry is not None

    def init_all(key):
        example = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), observation)
        params = init(key, example)
        if not jax.tree.leaves(params):
            raise ConfigError(f"init gives {params!r}, which holds no arrays; return the parameters of the network")
        return {"network": params} | distribution.init_free()

    def initial(params, num_envs, prompt=None):
        if callable(initial_carry):
            return initial_carry(params["network"], num_envs)
        carry = initial_carry if has_carry else ()
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_envs, *jnp.shape(leaf))), carry)

    def step(params, observation, carry):
        if has_carry:
            outputs, value, carry = apply(params["network"], observation, carry)
        else:
            outputs, value = apply(params["network"], observation)
        return distribution.join_free(outputs, params), value if critic else None, carry

    def features_step(params, observation, carry):
        if has_carry:
            return features(params["network"], observation, carry), step(params, observation, carry)[2]
        return features(params["network"], observation), carry

    over_sequence = functools.partial(_over_sequence, initial if has_carry else None)
    return Policy(
        init=init_all,
        initial_carry=initial,
        step=step,
        sequence=lambda *arguments: tuple(over_sequence(step, *arguments)),
        distribution=distribution,
        has_critic=critic,
        has_carry=has_carry,
        features=features and (lambda *arguments: over_sequence(features_step, *arguments)[0]),
        trainable=trainable,
    )


def _over_sequence(initial: Callable | None, step: Callable, params, observations, carry, is_first) -> list[PyTree]:
    """The outputs of a step, all but the carry, for a sequence `[S, N, ...]`; `initial` is None without a carry."""
    if initial is None:
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), observations)
        *outputs, _ = step(params, flat, carry)
        return jax.tree.map(lambda leaf: leaf.reshape(*is_first.shape, *leaf.shape[1:]), outputs)
    fresh = initial(params, is_first.shape[1])

    def body(carry, now):
        observation, first = now

        def reset(new, old):
            return jnp.where(first.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

        *outputs, carry = step(params, observation, jax.tree.map(reset, fresh, carry))
        return carry, outputs

    return jax.lax.scan(body, carry, (observations, is_first))[1]

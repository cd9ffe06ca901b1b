"""An `MLP` whose dense layers are a kernel of a Hopper GPU, where that can compute them; XLA computes all others."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.devices.mesh import num_env_devices, on_own_environments
from grpo_jax.kernels import dense_networks, unserved
from grpo_jax.observations import as_rows, leading_shape
from grpo_jax.policies.distributions import Distribution
from grpo_jax.policies.networks import MLP
from grpo_jax.policies.policy import Policy
from grpo_jax.types import PyTree

PLATFORMS = ("cuda",)
"""Where the kernel runs; elsewhere the same program is XLA's. Empty: it runs everywhere, in an interpreter."""


def reason_for_xla(network: Any, observation: PyTree, distribution: Distribution, critic: bool) -> str | None:
    """Why XLA computes a network, also on a Hopper GPU; None if the kernel does.

    Args:
      network: of the config.
      observation: shape and dtype of each array of one observation.
      distribution: the family of action distributions.
      critic: whether there is a critic.
    """
    of_mlp = [getattr(network, name, None) for name in ("__call__", "_hidden_layers")]
    if [getattr(method, "__func__", None) for method in of_mlp] != [MLP.__call__, MLP._hidden_layers]:
        return "the network is no MLP"
    for name, plain in {"recurrent": "none", "layer_norm": False, "actor_observation": None}.items():
        if getattr(network, name) != plain:
            return f"{name}={getattr(network, name)!r}"
    if jax.config.jax_enable_x64:
        return "jax_enable_x64"
    if jax.config.jax_default_matmul_precision not in (None, "default"):
        return f"jax_default_matmul_precision={jax.config.jax_default_matmul_precision}"
    num_inputs = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(observation))
    outputs = [distribution.num_outputs, *[1] * critic]
    if network.shared_critic:
        outputs = [sum(outputs)]
    return unserved([(num_inputs, *network.hidden_sizes, number) for number in outputs], network.activation)


def with_hopper_kernel(policy: Policy, network: MLP, observation: PyTree) -> Policy:
    """The policy whose dense layers are the kernel, wherever that can compute them.

    A step has a kernel for each network, so that the compiler leaves out a critic whose values nothing reads. A
    sequence has one for all of them. Where environments are split over devices, each device computes its own.
    """
    family, critic = policy.distribution, policy.has_critic
    names = ("actor_critic",) if critic and network.shared_critic else ("actor", "critic")[: 1 + critic]

    def outputs_of(names, params, observations):
        """Of each network `[S, N, O]`, from leaves `[S, N, ...]`."""

        def compute(params, observations):
            shape = leading_shape(observations, 2)
            x = as_rows(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), observations))
            layers = tuple(_layers(params[name], len(network.hidden_sizes)) for name in names)
            return [output.reshape(*shape, -1) for output in dense_networks(layers, x, network.activation)]

        return on_own_environments(compute, axis=1)(params, observations)

    def joined(params, outputs):
        """Distribution parameters, and values: the last output of the last network."""
        parameters = family.join_free(outputs[0][..., : family.num_outputs], params)
        return parameters, outputs[-1][..., -1] if critic else None

    def step(params, observation, carry):
        one_step = jax.tree.map(lambda leaf: leaf[None], observation)
        outputs = [output[0] for name in names for output in outputs_of((name,), params, one_step)]
        return *joined(params, outputs), carry

    def sequence(params, observations, carry, is_first):
        return joined(params, outputs_of(names, params, observations))

    def chosen(kernel, by_xla, axis):
        """Of two functions that give the same, the kernel's on a Hopper GPU where it serves."""

        def function(params, observations, *rest):
            num_envs = jax.tree.leaves(observations)[0].shape[axis]
            if reason_for_xla(network, observation, family, critic) or num_envs % num_env_devices():
                return by_xla(params, observations, *rest)
            if not PLATFORMS:
                return kernel(params, observations, *rest)
            kernels = dict.fromkeys(PLATFORMS, kernel)
            return jax.lax.platform_dependent(params, observations, *rest, **kernels, default=by_xla)

        return function

    return policy._replace(step=chosen(step, policy.step, 0), sequence=chosen(sequence, policy.sequence, 1))


def _layers(params: PyTree, num_hidden: int) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Kernels and biases of a network's layers; its heads are one."""
    layers = [(params[f"Dense_{i}"]["kernel"], params[f"Dense_{i}"]["bias"]) for i in range(len(params))]
    heads = layers[num_hidden:]
    head = heads[0] if len(heads) == 1 else tuple(jnp.concatenate(parts, axis=-1) for parts in zip(*heads, strict=True))
    return *layers[:num_hidden], head

"""The one interface of every policy network, and the factory of all of them."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.distributions import Distribution
from grpo_jax.errors import ConfigError, nearest
from grpo_jax.networks.cnn import KERNEL, convolution, is_image
from grpo_jax.networks.mlp import mlp
from grpo_jax.networks.network import Head, Network


class Policy(NamedTuple):
    """Pure functions of an actor and, if it has one, its critic.

    The carry is the memory, each leaf `[N, ...]`; without memory it has no leaves. `starts` says where an observation
    is the first of its episode; the carry is then replaced by the initial one before the observation is processed.
    """

    init: Callable  # (key) -> params
    initial_carry: Callable  # (params, num_envs, prompt [num_envs, P] or None) -> carry at the start of an episode
    step: Callable  # (params, observation [N, ...], carry) -> distribution parameters [N, P], value [N] or None, carry
    sequence: Callable  # (params, observation [S, N, ...], carry, starts [S, N]) -> [S, N, P], value [S, N] or None
    distribution: Distribution
    has_critic: bool
    has_memory: bool  # whether a sequence is more than its steps, each by itself
    sequence_carry: Callable = lambda carry: carry  # (carry) -> as much of it as sequence reads
    # (params, observation [S, N, ...], carry, starts [S, N]) -> [S, N, F]: what the actor's head reads; None: not told
    features: Callable | None = None
    max_steps: int | None = None  # the most steps that the carry can take; None for any number
    support: Callable | None = None  # (parameters [N, P]) -> bool [N, num_actions]: what may be sampled; None for all


def make_policy(
    observation: jax.ShapeDtypeStruct,
    distribution: Distribution,
    *,
    network: str,
    memory: str,
    hidden_sizes: Sequence[int],
    conv_channels: int,
    memory_size: int,
    activation: str,
    hidden_scale: float,
    actor_scale: float,
    critic_scale: float,
    critic: bool,
    shared_critic: bool,
) -> Policy:
    """An actor, and a critic that shares either nothing with it or all but its head.

    Args:
      observation: shape and dtype of one observation; it becomes float32 in the first layer.
      distribution: the family of action distributions; its free parameters are learnt as a vector of their own.
      network: "mlp", "cnn", or "auto": a CNN for images, which are observations of rank 2 and more.
      memory: "none", or "gru" between the hidden layers and the heads.
      hidden_sizes: widths of the dense hidden layers.
      conv_channels: of a CNN's convolution.
      memory_size: of a GRU.
      activation: name of a function in `flax.linen`, such as "tanh" or "relu".
      hidden_scale, actor_scale, critic_scale: gain of the initial weights of hidden layers and of the heads.
      critic: whether to make one. Without, no parameter and no operation of it exists.
      shared_critic: one network with two heads in place of two networks.

    Raises:
      ConfigError: an unknown network or memory, or a CNN for observations that are not images.
    """
    if memory not in ("none", "gru"):
        raise ConfigError(f"unknown memory {memory!r}: {nearest(memory, ('none', 'gru'))}")
    torso = _make_torso(observation.shape, network, hidden_sizes, conv_channels, getattr(nn, activation), hidden_scale)
    make = functools.partial(Network, torso, memory_size if memory == "gru" else 0)
    heads = {"actor": Head(distribution.num_parameters - distribution.num_free, actor_scale)}
    if critic:
        heads["critic"] = Head(1, critic_scale)
    groups = [heads] if shared_critic else [{name: head} for name, head in heads.items()]
    networks = {"_".join(group): make(tuple(group.values())) for group in groups}
    forward = functools.partial(_forward, networks, distribution)

    def step(params, observation, carry):
        within = jnp.zeros((1, observation.shape[0]), bool)
        parameters, value, carry = forward(params, observation[None], carry, within)
        return parameters[0], value[0] if critic else None, carry

    return Policy(
        init=functools.partial(_init, networks, distribution, observation),
        initial_carry=functools.partial(_initial_carry, networks),
        step=step,
        sequence=lambda *arguments: forward(*arguments)[:2],
        distribution=distribution,
        has_critic=critic,
        has_memory=memory == "gru",
        features=functools.partial(_features, networks),
    )


def _init(networks, distribution, observation, key):
    """Parameters of each network, by its name, and the distribution's free ones."""
    x, starts = jnp.zeros((1, 1, *observation.shape), observation.dtype), jnp.zeros((1, 1), bool)
    params = {
        name: net.init(k, x, net.initial_carry(1), starts)["params"]
        for k, (name, net) in zip(jax.random.split(key, len(networks)), networks.items(), strict=True)
    }
    if distribution.num_free:
        params["free"] = jnp.full(distribution.num_free, distribution.initial_free, jnp.float32)
    return params


def _initial_carry(networks, params, num_envs, prompt=None):
    """Of each network, by its name."""
    return {name: net.initial_carry(num_envs) for name, net in networks.items()}


def _forward(networks, distribution, params, observations, carry, starts):
    """Distribution parameters `[S, N, P]`, values `[S, N]` or None, and the carry after the last step."""
    outputs, after = [], {}
    for name, net in networks.items():
        heads, _, after[name] = net.apply({"params": params[name]}, observations, carry[name], starts)
        outputs += heads
    parameters, *critic = outputs
    if distribution.num_free:
        free = jnp.broadcast_to(params["free"], (*parameters.shape[:-1], distribution.num_free))
        parameters = jnp.concatenate([parameters, free], axis=-1)
    return parameters, critic[0][..., 0] if critic else None, after


def _features(networks, params, observations, carry, starts):
    """What the head of the actor reads, whose network is the first."""
    name, net = next(iter(networks.items()))
    return net.apply({"params": params[name]}, observations, carry[name], starts)[1]


def _make_torso(shape, network, hidden_sizes, conv_channels, activation, scale) -> Callable:
    """The function `[N, ...]` to `[N, features]` that suits observations of this shape."""
    dense = functools.partial(mlp, hidden_sizes=tuple(hidden_sizes), activation=activation, scale=scale)
    if network not in ("auto", "mlp", "cnn"):
        raise ConfigError(f"unknown network {network!r}: {nearest(network, ('auto', 'mlp', 'cnn'))}")
    if network == "cnn" and not is_image(shape):
        raise ConfigError(
            f"network='cnn' takes images, [height, width, ...] of at least {KERNEL} by {KERNEL}, and observations "
            f"have the shape {shape}; use network='mlp'"
        )
    if network == "mlp" or not is_image(shape):
        return dense
    convolve = functools.partial(convolution, channels=conv_channels, activation=activation, scale=scale)
    return lambda x: dense(convolve(x))

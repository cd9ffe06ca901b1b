"""Actor-critics: hidden layers, an optional recurrent layer, and a head each for the actor and the critic."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.errors import ConfigError, nearest
from grpo_jax.policies.convolutions import CONVOLUTIONS, is_image
from grpo_jax.policies.dense import Dense
from grpo_jax.policies.distributions import Distribution
from grpo_jax.policies.layers import mlp, orthogonal
from grpo_jax.policies.policy import Policy
from grpo_jax.policies.recurrent import RECURRENT


def make_policy(
    observation: jax.ShapeDtypeStruct,
    distribution: Distribution,
    *,
    network: str,
    recurrent: str,
    hidden_sizes: Sequence[int],
    conv_channels: int,
    recurrent_size: int,
    activation: str,
    hidden_scale: float,
    actor_scale: float,
    critic_scale: float,
    critic: bool,
    shared_critic: bool,
    critic_hidden_sizes: Sequence[int] | None = None,
    critic_activation: str | None = None,
    layer_norm: bool = False,
    fused_layers: bool = False,
) -> Policy:
    """An actor and an optional critic, which is either a network of its own or a second head of the actor's.

    Args:
      observation: shape and dtype of one observation; the first layer converts it to float32.
      distribution: the family of action distributions; its free parameters are one trainable vector.
      network: "mlp", a name in `CONVOLUTIONS`, or "auto": "cnn" for images (see `is_image`), else "mlp".
      recurrent: "none", or a name in `RECURRENT` for such a layer between the hidden layers and the heads.
      hidden_sizes: widths of the dense hidden layers.
      conv_channels: channels of the first convolution.
      recurrent_size: units of the recurrent layer.
      activation: name of a function in `flax.linen`, such as "tanh" or "relu".
      hidden_scale, actor_scale, critic_scale: gain of the initial weights of hidden layers and of the heads.
      critic: whether to make a critic. Without one, it has no parameters and costs nothing.
      shared_critic: one network with two heads instead of two networks.
      critic_hidden_sizes, critic_activation: of a critic that is a network of its own; None: those of the actor.
      layer_norm: normalise the features of each dense hidden layer before the activation.
      fused_layers: dense layers are laid out for an accelerator (`dense.fused_dense`).

    Raises:
      ConfigError: for an unknown network or recurrent layer, or a CNN for observations that are not images.
    """
    if recurrent not in ("none", *RECURRENT):
        raise ConfigError(f"unknown recurrent layer {recurrent!r}: {nearest(recurrent, ('none', *RECURRENT))}")
    convolutions = _find_convolutions(observation.shape, network)
    cell = functools.partial(RECURRENT[recurrent], recurrent_size) if recurrent != "none" else None

    def make(heads, sizes, activation):
        layer = {"activation": getattr(nn, activation), "scale": hidden_scale}
        dense = functools.partial(mlp, hidden_sizes=tuple(sizes), layer_norm=layer_norm, fused=fused_layers, **layer)
        convolve = convolutions and functools.partial(convolutions, channels=conv_channels, **layer)
        return Network(convolve, dense, cell, fused_layers, tuple(heads))

    heads, actor = [Head(distribution.num_outputs, actor_scale)], (hidden_sizes, activation)
    networks = {"actor": make(heads, *actor)}
    if critic:
        head = Head(1, critic_scale)
        if shared_critic:
            networks = {"actor_critic": make([*heads, head], *actor)}
        else:
            sizes = hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes
            networks["critic"] = make([head], sizes, critic_activation or activation)
    forward = functools.partial(_forward, networks, distribution)

    def step(params, observation, carry):
        is_first = jnp.zeros((1, observation.shape[0]), bool)  # the caller has reset the carry where it is
        parameters, value, carry = forward(params, observation[None], carry, is_first)
        return parameters[0], value[0] if critic else None, carry

    return Policy(
        init=functools.partial(_init, networks, distribution, observation),
        initial_carry=functools.partial(_initial_carry, networks),
        step=step,
        sequence=lambda *arguments: forward(*arguments)[:2],
        distribution=distribution,
        has_critic=critic,
        has_carry=cell is not None,
        features=functools.partial(_features, networks),
    )


def _init(networks, distribution, observation, key):
    """Parameters of each network, by name, and the distribution's free parameters."""
    x, is_first = jnp.zeros((1, 1, *observation.shape), observation.dtype), jnp.zeros((1, 1), bool)
    params = {
        name: net.init(k, x, net.initial_carry(1), is_first)["params"]
        for k, (name, net) in zip(jax.random.split(key, len(networks)), networks.items(), strict=True)
    }
    return params | distribution.init_free()


def _initial_carry(networks, params, num_envs, prompt=None):
    """The initial carry of each network, by name."""
    return {name: net.initial_carry(num_envs) for name, net in networks.items()}


def _forward(networks, distribution, params, observations, carry, is_first):
    """Distribution parameters `[S, N, P]`, values `[S, N]` or None, and the carry after the last step."""
    outputs, after = [], {}
    for name, net in networks.items():
        heads, _, after[name] = net.apply({"params": params[name]}, observations, carry[name], is_first)
        outputs += heads
    parameters, *critic = outputs
    return distribution.join_free(parameters, params), critic[0][..., 0] if critic else None, after


def _features(networks, params, observations, carry, is_first):
    """The input of the actor's head, `[S, N, F]`; the actor's network comes first."""
    name, net = next(iter(networks.items()))
    return net.apply({"params": params[name]}, observations, carry[name], is_first)[1]


def _find_convolutions(shape: tuple[int, ...], network: str) -> Callable | None:
    """The convolutions of a network for observations of this shape; None: it has none."""
    if network == "mlp" or network == "auto" and not is_image(shape):
        return None
    if network not in ("auto", *CONVOLUTIONS):
        known = ("auto", "mlp", "transformer", *CONVOLUTIONS)
        raise ConfigError(
            f"unknown network {network!r}: {nearest(network, known)} (for your own, write 'package.module:name')"
        )
    convolutions, least = CONVOLUTIONS["cnn" if network == "auto" else network]
    if not is_image(shape, least):
        other = "'cnn'" if is_image(shape) else "'mlp'"
        raise ConfigError(
            f"network={network!r} needs images, [height, width, ...] of at least {least} by {least}, but observations "
            f"have the shape {shape}; use network={other}"
        )
    return convolutions


class Head(NamedTuple):
    """A linear layer at the end of a network."""

    num_outputs: int
    scale: float  # gain of the initial weights


class Network(nn.Module):
    """Hidden layers, an optional recurrent layer, and linear heads."""

    convolve: Callable | None  # (x [N, ...]) -> [N, ...]; creates its layers inside this module
    dense: Callable  # (x [N, ...]) -> [N, features]; likewise
    recurrent: Callable | None  # () -> a layer of `policies.recurrent`
    fused_layers: bool  # of the heads; the dense layers have their own
    heads: tuple[Head, ...]

    @nn.compact
    def __call__(self, x: jax.Array, carry: Any, is_first: jax.Array) -> tuple[list[jax.Array], jax.Array, Any]:
        """Processes a sequence. All layers but the recurrent one take the steps as one flat batch.

        Args:
          x: `[S, N, ...]` observations.
          carry: that of the recurrent layer before the first step; ignored without one.
          is_first: `[S, N]` bool: the first observation of an episode; ignored without a recurrent layer.

        Returns:
          The output of each head, `[S, N, num_outputs]`; the input of the heads, `[S, N, features]`; and the carry
          after the last step.
        """
        batch_shape = x.shape[:2]
        x = x.reshape(-1, *x.shape[2:])
        x = self.dense(self.convolve(x) if self.convolve else x)
        if self.recurrent:
            x, carry = self.recurrent()(x.reshape(*batch_shape, -1), carry, is_first)
            x = x.reshape(-1, x.shape[-1])
        outputs = [
            Dense(head.num_outputs, kernel_init=orthogonal(head.scale), fused=self.fused_layers)(x)
            for head in self.heads
        ]
        return [output.reshape(*batch_shape, -1) for output in outputs], x.reshape(*batch_shape, -1), carry

    def initial_carry(self, num_envs: int) -> Any:
        """That of the recurrent layer, zeros; () without one."""
        return self.recurrent(parent=None).initial_carry(num_envs) if self.recurrent else ()

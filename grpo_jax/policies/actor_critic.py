"""Actor-critics: hidden layers, an optional recurrent layer, and a head each for the actor and the critic."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.errors import ConfigError, nearest
from grpo_jax.observations import joined, leading_shape
from grpo_jax.policies.convolutions import CONVOLUTIONS, is_image
from grpo_jax.policies.dense import Dense
from grpo_jax.policies.distributions import Distribution
from grpo_jax.policies.layers import mlp, orthogonal
from grpo_jax.policies.policy import Policy
from grpo_jax.policies.recurrent import make_recurrent
from grpo_jax.types import PyTree


def make_policy(
    observation: PyTree,
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
    actor_observation: Sequence[str] | None = None,
    fused_layers: bool = False,
    steps_per_loop: int = 1,
) -> Policy:
    """An actor and an optional critic, either a separate network or a second head of the actor's.

    Args:
      observation: shape and dtype of each array of one observation; several are joined (`observations.joined`). The
        first layer converts them to float32.
      distribution: the family of action distributions; its free parameters are one trainable vector.
      network: "mlp", a name in `CONVOLUTIONS`, or "auto": "cnn" if there is an image (see `is_image`), else "mlp". The
        features of the image are joined with the other arrays before the dense layers.
      recurrent: "none", or a name in `RECURRENT` for such a layer between the hidden layers and the heads.
      hidden_sizes: widths of the dense hidden layers.
      conv_channels: channels of the first convolution.
      recurrent_size: units of the recurrent layer.
      activation: name of a function in `flax.linen`, such as "tanh" or "relu".
      hidden_scale, actor_scale, critic_scale: gain of the initial weights of hidden layers and of the heads.
      critic: whether to make a critic. Without one, it has no parameters and costs nothing.
      shared_critic: one network with two heads instead of two networks.
      critic_hidden_sizes, critic_activation: of a critic that is a separate network; None: the actor's.
      layer_norm: normalise the features of each dense hidden layer before the activation.
      actor_observation: keys of a dict of observations that the actor sees; None: all, as the critic does.
      fused_layers: dense layers are laid out for an accelerator (`dense.fused_dense`).
      steps_per_loop: steps of a recurrent layer in one iteration of a compiled loop.

    Raises:
      ConfigError: for an unknown network or recurrent layer, a CNN without an image or for several, or
        `actor_observation` that does not fit the observation or the critic.
    """
    cell = make_recurrent(recurrent, recurrent_size, steps_per_loop)
    if actor_observation is not None:
        _check_actor_observation(actor_observation, observation, critic, shared_critic)
        actor_observation = tuple(actor_observation)

    def make(heads, sizes, activation, keys=None):
        layer = {"activation": getattr(nn, activation), "scale": hidden_scale}
        dense = functools.partial(mlp, hidden_sizes=tuple(sizes), layer_norm=layer_norm, fused=fused_layers, **layer)
        torso = _make_torso(_seen(observation, keys), network, dense, {"channels": conv_channels, **layer})
        return Network(torso, cell, fused_layers, tuple(heads), keys)

    heads = [Head(distribution.num_outputs, actor_scale)]
    if critic and shared_critic:
        networks = {"actor_critic": make([*heads, Head(1, critic_scale)], hidden_sizes, activation)}
    else:
        networks = {"actor": make(heads, hidden_sizes, activation, actor_observation)}
    if critic and not shared_critic:
        sizes = hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes
        networks["critic"] = make([Head(1, critic_scale)], sizes, critic_activation or activation)
    forward = functools.partial(_forward, networks, distribution)

    def step(params, observation, carry):
        is_first = jnp.zeros((1, *leading_shape(observation, 1)), bool)  # the caller has reset the carry where it is
        one_step = jax.tree.map(lambda leaf: leaf[None], observation)
        parameters, value, carry = forward(params, one_step, carry, is_first)
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
    x = jax.tree.map(lambda leaf: jnp.zeros((1, 1, *leaf.shape), leaf.dtype), observation)
    is_first = jnp.zeros((1, 1), bool)
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
    outputs, new_carry = [], {}
    for name, net in networks.items():
        heads, _, new_carry[name] = net.apply({"params": params[name]}, observations, carry[name], is_first)
        outputs += heads
    parameters, *critic = outputs
    return distribution.join_free(parameters, params), critic[0][..., 0] if critic else None, new_carry


def _features(networks, params, observations, carry, is_first):
    """The input of the actor's head, `[S, N, F]`; the actor's network comes first."""
    name, net = next(iter(networks.items()))
    return net.apply({"params": params[name]}, observations, carry[name], is_first)[1]


def _seen(observation: PyTree, keys: Sequence[str] | None) -> PyTree:
    """The part of a dict of observations under these keys; all of it without keys."""
    return observation if keys is None else {key: observation[key] for key in keys}


def _check_actor_observation(keys, observation, critic, shared_critic):
    """Raises ConfigError unless the actor sees a part of what the separate critic sees."""
    problem = f"actor_observation={keys!r} is the part of a dict of observations that the actor sees, but"
    if not isinstance(observation, Mapping):
        raise ConfigError(f"{problem} an observation is {observation}; observe a dict, or leave it out")
    if isinstance(keys, str) or not keys:
        raise ConfigError(f"{problem} it is not a tuple of keys; write one such as {tuple(observation)[:1]}")
    for key in keys:
        if key not in observation:
            raise ConfigError(f"{problem} there is no {key!r}: {nearest(str(key), map(str, observation))}")
    if not critic:
        raise ConfigError(f"{problem} this algorithm has no critic that would see the rest; leave it out, or use 'ppo'")
    if shared_critic:
        raise ConfigError(f"{problem} with shared_critic=True one network sees all; use shared_critic=False")


def _make_torso(observation: PyTree, network: str, dense: Callable, options: Mapping[str, Any]) -> Callable:
    """The hidden layers for observations like this one: a function from leaves `[N, ...]` to `[N, features]`.

    Args:
      observation: shape and dtype of each array.
      network: see `make_policy`.
      dense: the dense layers.
      options: of the convolutions.
    """
    if network not in ("auto", "mlp", *CONVOLUTIONS):
        known = ("auto", "mlp", "transformer", *CONVOLUTIONS)
        raise ConfigError(
            f"unknown network {network!r}: {nearest(network, known)} (for your own, write 'package.module:name')"
        )
    shapes = [leaf.shape for leaf in jax.tree.leaves(observation)]
    images = [index for index, shape in enumerate(shapes) if is_image(shape)]
    if network == "mlp" or network == "auto" and not images:
        return lambda x: dense(joined(x, 1))
    convolutions, least = CONVOLUTIONS["cnn" if network == "auto" else network]
    if not any(is_image(shape, least) for shape in shapes):
        raise ConfigError(
            f"network={network!r} needs images, [height, width, ...] of at least {least} by {least}, but observations "
            f"have the shape {', '.join(map(str, shapes))}; use network={'cnn' if images else 'mlp'!r}"
        )
    if len(images) > 1:
        raise ConfigError(
            f"network={network!r} convolves one image, but observations have {len(images)}, of the shapes "
            f"{', '.join(str(shapes[index]) for index in images)}; use network='mlp', or join the images along their "
            "channels in the environment"
        )

    def torso(x):
        leaves = jax.tree.leaves(x)
        leaves[images[0]] = convolutions(leaves[images[0]], **options)
        return dense(joined(leaves, 1))

    return torso


class Head(NamedTuple):
    """A linear layer at the end of a network."""

    num_outputs: int
    scale: float  # gain of the initial weights


class Network(nn.Module):
    """Hidden layers, an optional recurrent layer, and linear heads."""

    torso: Callable  # (leaves [N, ...]) -> [N, features]; creates its layers inside this module
    recurrent: Callable | None  # () -> a layer of `policies.recurrent`
    fused_layers: bool  # of the heads; the dense layers have their own
    heads: tuple[Head, ...]
    keys: tuple[str, ...] | None = None  # of a dict of observations, those that this network sees; None: all

    @nn.compact
    def __call__(self, x: PyTree, carry: Any, is_first: jax.Array) -> tuple[list[jax.Array], jax.Array, Any]:
        """Processes a sequence. All layers but the recurrent one take the steps as one flat batch.

        Args:
          x: observations, each leaf `[S, N, ...]`.
          carry: of the recurrent layer before the first step; ignored without one.
          is_first: `[S, N]` bool: the first observation of an episode; ignored without a recurrent layer.

        Returns:
          The output of each head, `[S, N, num_outputs]`; the input of the heads, `[S, N, features]`; and the carry
          after the last step.
        """
        batch_shape = leading_shape(x, 2)
        x = self.torso(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), _seen(x, self.keys)))
        if self.recurrent:
            x, carry = self.recurrent()(x.reshape(*batch_shape, -1), carry, is_first)
            x = x.reshape(-1, x.shape[-1])
        outputs = [
            Dense(head.num_outputs, kernel_init=orthogonal(head.scale), fused=self.fused_layers)(x)
            for head in self.heads
        ]
        return [output.reshape(*batch_shape, -1) for output in outputs], x.reshape(*batch_shape, -1), carry

    def initial_carry(self, num_envs: int) -> Any:
        """The recurrent layer's, zeros; () without one."""
        return self.recurrent(parent=None).initial_carry(num_envs) if self.recurrent else ()

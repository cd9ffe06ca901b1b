"""Networks as values, of which all but a transformer are called as `(observation, distribution, critic) -> Policy`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax

from grpo_jax.errors import ConfigError, KnownFields, as_count, nearest
from grpo_jax.observations import as_rows, channels_first
from grpo_jax.policies.actor_critic import Network, make_actor_critic
from grpo_jax.policies.dense import HIDDEN_GAIN, Dense, convolution, orthogonal
from grpo_jax.policies.distributions import Distribution
from grpo_jax.policies.policy import Policy
from grpo_jax.policies.recurrent import RECURRENT
from grpo_jax.policies.transformer import Transformer
from grpo_jax.types import PyTree

_ACTIVATIONS = ("tanh", "relu", "gelu", "silu", "swish", "elu", "leaky_relu")


@dataclasses.dataclass(frozen=True, repr=False)
class MLP(KnownFields):
    """Dense layers, an optional recurrent layer, and a head each for the actor and the critic.

    Several arrays of an observation become one (`flatten_observation`), as float32.

    Raises:
      ConfigError: at construction, for a field that is invalid; when called, for observations that do not fit.
    """

    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the dense hidden layers, of the actor and of the critic."""
    activation: str = "tanh"
    """Activation function by its name in flax.linen."""
    layer_norm: bool = False
    """Normalise the features of each dense hidden layer before the activation."""
    recurrent: str = "none"
    """A recurrent layer before the heads: "gru", "mingru" (parallel over steps), or "none"."""
    recurrent_size: int = 64
    """Units of the recurrent layer."""
    shared_critic: bool = False
    """The critic is a second head of the actor's network instead of a separate network."""
    actor_observation: tuple[str, ...] | None = None
    """Keys of a dict of observations that the actor sees, while its critic sees all; None: the actor sees all too."""
    actor_init_gain: float = 0.01
    """Gain of the initial weights of the actor's head: small, so that all actions begin about equally likely."""

    def __post_init__(self):
        """Checks the fields."""
        set_field = functools.partial(object.__setattr__, self)  # the class is frozen
        for name in {"recurrent_size", "conv_channels"} & vars(self).keys():
            set_field(name, as_count(name, getattr(self, name)))
        sizes = self.hidden_sizes
        try:
            set_field("hidden_sizes", tuple(as_count("hidden_sizes", size) for size in sizes))
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"hidden_sizes={sizes!r} must be positive integers, such as (64, 64)") from error
        gain = self.actor_init_gain
        if not isinstance(gain, int | float) or not 0 <= gain < math.inf:
            raise ConfigError(f"actor_init_gain={gain!r} is no gain of initial weights: use a number such as 1.0, or 0")
        for name, known in {"activation": _ACTIVATIONS, "recurrent": ("none", *RECURRENT)}.items():
            if getattr(self, name) not in known:
                given = getattr(self, name)
                raise ConfigError(f"unknown {name} {given!r}: {nearest(str(given), {*known} - {'none'})}")
        if isinstance(self.actor_observation, list):
            set_field("actor_observation", tuple(self.actor_observation))
        if self.shared_critic and self.actor_observation is not None:
            raise ConfigError(
                f"actor_observation={self.actor_observation!r} is for a critic that is a separate network, but "
                "shared_critic=True; leave out one of the two"
            )

    def __call__(
        self, observation: PyTree, distribution: Distribution, critic: bool, *, steps_per_loop: int = 1
    ) -> Policy:
        """The policy.

        Args:
          observation: shape and dtype of each array of one observation.
          distribution: the family of action distributions; its free parameters are one trainable vector.
          critic: whether to make a critic. Without one, it has no parameters and costs nothing.
          steps_per_loop: steps of a recurrent layer in one iteration of a compiled loop.
        """
        if self.actor_observation is not None:
            self._check_actor_observation(observation, critic)
        recurrent = None
        if self.recurrent != "none":
            recurrent = functools.partial(RECURRENT[self.recurrent], self.recurrent_size, steps_per_loop)

        def make(*heads, keys=None):
            return Network(self._hidden_layers, recurrent, heads, keys)

        actor, value = (distribution.num_outputs, self.actor_init_gain), (1, 1.0)
        if critic and self.shared_critic:
            networks = {"actor_critic": make(actor, value)}
        else:
            networks = {"actor": make(actor, keys=self.actor_observation)}
            if critic:
                networks["critic"] = make(value)
        return make_actor_critic(networks, observation, distribution, critic)

    def _hidden_layers(self, observation: PyTree) -> jax.Array:
        """The dense layers, in the flax module that calls this: leaves `[N, ...]` to `[N, features]`."""
        x = as_rows(observation)
        for size in self.hidden_sizes:
            x = Dense(size, kernel_init=orthogonal(HIDDEN_GAIN))(x)
            x = getattr(nn, self.activation)(nn.LayerNorm()(x) if self.layer_norm else x)
        return x

    def _check_actor_observation(self, observation, critic):
        """Raises ConfigError unless the actor sees a part of what the critic sees."""
        keys, known = self.actor_observation, tuple(observation) if isinstance(observation, Mapping) else ()
        if not keys or not set(keys) <= set(known):
            has = f"which has {known}" if known else "which is no dict"
            raise ConfigError(f"actor_observation={keys!r} must be a tuple of keys of an observation, {has}")
        if not critic:
            raise ConfigError(f"actor_observation={keys!r} needs a critic that sees all; leave it out, or use 'ppo'")


@dataclasses.dataclass(frozen=True, repr=False)
class CNN(MLP):
    """A 3×3 convolution (`dense.convolution`) before the layers of an `MLP`.

    Other arrays of an observation than the image join its features before the dense layers.
    """

    conv_channels: int = 16
    """Channels of the convolution."""

    def _hidden_layers(self, observation: PyTree) -> jax.Array:
        leaves = jax.tree.leaves(observation)
        images = [index for index, leaf in enumerate(leaves) if is_image(leaf.shape[1:])]
        if len(images) != 1:
            raise ConfigError(
                f"network={name_of(self)!r} needs one image, [height, width, ...] of at least 3 by 3, but of the "
                f"observed arrays, {', '.join(str(leaf.shape[1:]) for leaf in leaves)}, {len(images)} are images; use "
                "network='mlp', or join several images along their channels in the environment"
            )
        leaves[images[0]] = convolution(leaves[images[0]], self.conv_channels, getattr(nn, self.activation))
        return super()._hidden_layers(leaves)


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether observations of this shape have a height and a width of at least 3 pixels."""
    first = channels_first(shape)
    return len(shape) >= 2 and min(shape[first : 2 + first]) >= 3


NETWORKS = {"mlp": MLP, "cnn": CNN, "transformer": Transformer}
"""By the name that stands for one with its defaults."""


def name_of(network: MLP | Transformer) -> str:
    """The name of the network's class in `NETWORKS`, or of a class derived from one."""
    return next((name for name, each in NETWORKS.items() if type(network) is each), type(network).__name__)


def resolve_network(network: str | Callable, observation: PyTree, has_prompt: bool) -> str | Callable:
    """The network that a name stands for; others are returned unchanged.

    Args:
      network: a name in `NETWORKS` or a class in it, "auto" (a transformer where there is a prompt, a CNN for
        images, else an MLP), or any other value of the field of `Config`.
      observation: shape and dtype of each array of one observation.
      has_prompt: whether the environment has one.

    Raises:
      ConfigError: for an unknown name.
    """
    if network in NETWORKS.values():
        return network()
    kind = network if isinstance(network, type) else type(network)
    if any(each.__module__.startswith(("flax.nnx", "equinox")) for each in kind.__mro__):
        raise ConfigError(
            f"network={kind.__name__} is a module; write a function (observation, distribution, critic) -> "
            "make_pure_policy(init, apply, ...), as `grpo-jax docs networks` shows for nnx and equinox"
        )
    if not isinstance(network, str) or ":" in network:
        return network
    if network == "auto":
        has_image = any(is_image(leaf.shape) for leaf in jax.tree.leaves(observation))
        network = "transformer" if has_prompt else "cnn" if has_image else "mlp"
    if network not in NETWORKS:
        known = ("auto", *NETWORKS)
        raise ConfigError(f"unknown network {network!r}: {nearest(network, known)} (custom: 'package.module:name')")
    return NETWORKS[network]()

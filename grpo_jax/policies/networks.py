"""Networks as values, of which all but a transformer are called as `(observation, distribution, critic) -> Policy`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax

from grpo_jax.errors import ConfigError, KnownFields, as_count, nearest
from grpo_jax.observations import flatten_observation
from grpo_jax.policies.actor_critic import Network, make_actor_critic, seen
from grpo_jax.policies.convolutions import convolution, is_image, nature_cnn
from grpo_jax.policies.dense import mlp
from grpo_jax.policies.distributions import Distribution
from grpo_jax.policies.policy import Policy
from grpo_jax.policies.recurrent import RECURRENT
from grpo_jax.policies.transformer import Transformer
from grpo_jax.types import PyTree

_ACTIVATIONS = ("tanh", "relu", "gelu", "silu", "swish", "elu", "selu", "celu", "leaky_relu", "relu6", "sigmoid")
_ACTIVATIONS += ("softplus", "soft_sign", "hard_tanh")


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
    critic_hidden_sizes: tuple[int, ...] | None = None
    """Widths of the critic's dense hidden layers; None: hidden_sizes."""
    actor_observation: tuple[str, ...] | None = None
    """Keys of a dict of observations that the actor sees, while its critic sees all; None: the actor sees all too."""
    actor_init_gain: float = 0.01
    """Gain of the initial weights of the actor's head: small, so that all actions begin about equally likely."""

    def __post_init__(self):
        """Checks the fields."""
        for name in {"recurrent_size", "conv_channels"} & vars(self).keys():
            object.__setattr__(self, name, as_count(name, getattr(self, name)))
        for name in ("hidden_sizes", "critic_hidden_sizes"):
            self._check_sizes(name, getattr(self, name))
        gain = self.actor_init_gain
        if not isinstance(gain, int | float) or not 0 <= gain < math.inf:
            raise ConfigError(f"actor_init_gain={gain!r} is no gain of initial weights: use a number such as 1.0, or 0")
        for name, known in {"activation": _ACTIVATIONS, "recurrent": ("none", *RECURRENT)}.items():
            if getattr(self, name) not in known:
                given = getattr(self, name)
                raise ConfigError(f"unknown {name} {given!r}: {nearest(str(given), known)}")
        if self.shared_critic and self.critic_hidden_sizes is not None:
            raise ConfigError(
                f"critic_hidden_sizes={self.critic_hidden_sizes} are for a critic that is a separate network, but "
                "shared_critic=True; leave out one of the two"
            )
        if isinstance(self.actor_observation, list):
            object.__setattr__(self, "actor_observation", tuple(self.actor_observation))

    def _check_sizes(self, name, sizes):
        if sizes is None and name == "critic_hidden_sizes":
            return
        try:
            object.__setattr__(self, name, tuple(as_count(name, size) for size in sizes))
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"{name}={sizes!r} must be positive integers, such as (64, 64)") from error

    def __call__(
        self,
        observation: PyTree,
        distribution: Distribution,
        critic: bool,
        *,
        steps_per_loop: int = 1,
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

        def make(*heads, sizes=self.hidden_sizes, keys=None):
            activation = getattr(nn, self.activation)
            dense = functools.partial(mlp, hidden_sizes=sizes, activation=activation, layer_norm=self.layer_norm)
            return Network(self._torso(seen(observation, keys), dense), recurrent, heads, keys)

        actor, value = (distribution.num_outputs, self.actor_init_gain), (1, 1.0)
        if critic and self.shared_critic:
            networks = {"actor_critic": make(actor, value)}
        else:
            networks = {"actor": make(actor, keys=self.actor_observation)}
            if critic:
                own = self.critic_hidden_sizes
                networks["critic"] = make(value, sizes=self.hidden_sizes if own is None else own)
        return make_actor_critic(networks, observation, distribution, critic)

    def _torso(self, observation: PyTree, dense: Callable) -> Callable:
        """The hidden layers for these observations: a function from leaves `[N, ...]` to `[N, features]`."""
        return lambda x: dense(flatten_observation(x, 1))

    def _check_actor_observation(self, observation, critic):
        """Raises ConfigError unless the actor sees a part of what the separate critic sees."""
        keys = self.actor_observation
        problem = f"actor_observation={keys!r} is the part of a dict of observations that the actor sees, but"
        if not isinstance(observation, Mapping):
            raise ConfigError(f"{problem} an observation is {observation}; observe a dict, or leave it out")
        if isinstance(keys, str) or not keys:
            raise ConfigError(f"{problem} it is not a tuple of keys; write one such as {tuple(observation)[:1]}")
        for key in keys:
            if key not in observation:
                raise ConfigError(f"{problem} there is no {key!r}: {nearest(str(key), map(str, observation))}")
        if not critic:
            raise ConfigError(f"{problem} this algorithm has no critic that sees the rest; leave it out, or use 'ppo'")
        if self.shared_critic:
            raise ConfigError(f"{problem} with shared_critic=True one network sees all; use shared_critic=False")


@dataclasses.dataclass(frozen=True, repr=False)
class CNN(MLP):
    """A 3×3 convolution (`convolutions.convolution`) before the layers of an `MLP`.

    Other arrays of an observation than the image join its features before the dense layers.
    """

    conv_channels: int = 16
    """Channels of the first convolution; "nature_cnn" has 2, 4 and 4 times as many."""

    convolutions = staticmethod(convolution)
    least_size = 3  # height and width of an image

    def _torso(self, observation: PyTree, dense: Callable) -> Callable:
        name = name_of(self)
        shapes = [leaf.shape for leaf in jax.tree.leaves(observation)]
        images = [index for index, shape in enumerate(shapes) if is_image(shape)]
        if not any(is_image(shape, self.least_size) for shape in shapes):
            raise ConfigError(
                f"network={name!r} needs images, [height, width, ...] of at least {self.least_size} by "
                f"{self.least_size}, but observations have the shape {', '.join(map(str, shapes))}; use network="
                f"{'cnn' if images else 'mlp'!r}"
            )
        if len(images) > 1:
            raise ConfigError(
                f"network={name!r} convolves one image, but observations have {len(images)}, of the shapes "
                f"{', '.join(str(shapes[index]) for index in images)}; use network='mlp', or join the images along "
                "their channels in the environment"
            )

        def torso(x):
            leaves = jax.tree.leaves(x)
            leaves[images[0]] = self.convolutions(leaves[images[0]], self.conv_channels, getattr(nn, self.activation))
            return dense(flatten_observation(leaves, 1))

        return torso


class NatureCNN(CNN):
    """The convolutions of DQN (`convolutions.nature_cnn`) before the layers of an `MLP`."""

    convolutions = staticmethod(nature_cnn)
    least_size = 36


NETWORKS = {"mlp": MLP, "cnn": CNN, "nature_cnn": NatureCNN, "transformer": Transformer}
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
    if any(each.__module__.startswith(("flax.nnx", "equinox")) for each in type(network).__mro__):
        raise ConfigError(
            f"network={type(network).__name__}(...) holds its parameters; write a function (observation, distribution, "
            "critic) -> make_pure_policy(init, apply, ...), as `grpo-jax docs networks` shows for nnx and equinox"
        )
    if not isinstance(network, str) or ":" in network:
        return network
    if network == "auto":
        has_image = any(is_image(leaf.shape) for leaf in jax.tree.leaves(observation))
        network = "transformer" if has_prompt else "cnn" if has_image else "mlp"
    if network not in NETWORKS:
        known = ("auto", *NETWORKS)
        raise ConfigError(
            f"unknown network {network!r}: {nearest(network, known)} (for a custom one, write 'package.module:name')"
        )
    return NETWORKS[network]()

"""Multi-layer perceptrons for flat observations."""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.distributions import make_distribution
from grpo_jax.networks.dense import dot_general
from grpo_jax.networks.initializers import orthogonal
from grpo_jax.networks.policy import Policy
from grpo_jax.spaces import ActionSpace


class MLP(nn.Module):
    """Dense layers with orthogonal weights of gain sqrt(2), zero biases, and a linear head of gain `head_scale`."""

    hidden_sizes: Sequence[int]
    num_outputs: int
    head_scale: float
    activation: Callable = nn.tanh

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., features]` to `[..., num_outputs]`."""
        for size in self.hidden_sizes:
            x = self.activation(nn.Dense(size, kernel_init=orthogonal(np.sqrt(2)), dot_general=dot_general)(x))
        return nn.Dense(self.num_outputs, kernel_init=orthogonal(self.head_scale), dot_general=dot_general)(x)


def make_mlp_policy(
    observation: jax.ShapeDtypeStruct,
    action_space: ActionSpace,
    *,
    hidden_sizes: Sequence[int],
    activation: str,
    critic: bool,
    action_distribution: str = "auto",
    state_dependent_std: bool = False,
) -> Policy:
    """An actor, and a critic of the same sizes beside it that shares no weights.

    Args:
      observation: shape and dtype of one observation; it is flattened and taken as float32.
      action_space: decides the family of action distributions.
      hidden_sizes: widths of the hidden layers.
      activation: name of a function in `flax.linen`, such as "tanh" or "relu".
      critic: whether to make one. Without, no parameter and no operation of it exists.
      action_distribution, state_dependent_std: see `make_distribution`.
    """
    make = {"hidden_sizes": tuple(hidden_sizes), "activation": getattr(nn, activation)}
    distribution = make_distribution(action_space, action_distribution, state_dependent_std=state_dependent_std)
    num_free = distribution.num_free
    networks = {"actor": MLP(num_outputs=distribution.num_parameters - num_free, head_scale=0.01, **make)}
    if critic:
        networks["critic"] = MLP(num_outputs=1, head_scale=1.0, **make)
    num_features = int(np.prod(observation.shape))

    def init(key):
        keys = jax.random.split(key, len(networks))
        dummy = jnp.zeros((1, num_features))
        params = {name: net.init(k, dummy)["params"] for k, (name, net) in zip(keys, networks.items(), strict=True)}
        return params | ({"free": jnp.full(num_free, distribution.initial_free, jnp.float32)} if num_free else {})

    def forward(params, observations):
        batch_shape = observations.shape[: observations.ndim - len(observation.shape)]
        flat = observations.reshape(-1, num_features).astype(jnp.float32)
        outputs = {name: net.apply({"params": params[name]}, flat) for name, net in networks.items()}
        value = outputs["critic"].reshape(batch_shape) if critic else None
        parameters = outputs["actor"].reshape(*batch_shape, -1)
        if num_free:
            free = jnp.broadcast_to(params["free"], (*batch_shape, num_free))
            parameters = jnp.concatenate([parameters, free], axis=-1)
        return parameters, value

    return Policy(
        init=init,
        initial_carry=lambda num_envs: (),
        step=lambda params, observations, carry: (*forward(params, observations), carry),
        sequence=forward,
        distribution=distribution,
        has_critic=critic,
    )

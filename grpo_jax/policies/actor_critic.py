"""Actor-critics: hidden layers, an optional recurrent layer, and a head each for the actor and the critic."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.observations import leading_shape
from grpo_jax.policies.dense import Dense, orthogonal
from grpo_jax.policies.distributions import Distribution
from grpo_jax.policies.policy import Policy
from grpo_jax.types import PyTree


class Network(nn.Module):
    """Hidden layers, an optional recurrent layer, and linear heads."""

    hidden_layers: Callable  # (observations [N, ...]) -> [N, features]; creates its layers inside this module
    recurrent: Callable | None  # () -> a layer of `policies.recurrent`
    heads: tuple[tuple[int, float], ...]  # of each, the number of outputs and the gain of the initial weights
    keys: tuple[str, ...] | None  # of a dict of observations, those that this network sees; None: all

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
        x = x if self.keys is None else {key: x[key] for key in self.keys}
        x = self.hidden_layers(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), x))
        if self.recurrent:
            x, carry = self.recurrent()(x.reshape(*batch_shape, -1), carry, is_first)
            x = x.reshape(-1, x.shape[-1])
        outputs = [Dense(num_outputs, kernel_init=orthogonal(gain))(x) for num_outputs, gain in self.heads]
        return [output.reshape(*batch_shape, -1) for output in outputs], x.reshape(*batch_shape, -1), carry

    def initial_carry(self, num_envs: int) -> Any:
        """Zeros, for the recurrent layer; () without one."""
        return jnp.zeros((num_envs, self.recurrent(parent=None).size), jnp.float32) if self.recurrent else ()


def make_actor_critic(
    networks: Mapping[str, Network], observation: PyTree, distribution: Distribution, critic: bool
) -> Policy:
    """The policy of networks by their names in the parameters: the actor's first, its head before the critic's.

    Args:
      networks: "actor" and, if there is a critic, "critic"; or one, "actor_critic", with two heads.
      observation: shape and dtype of each array of one observation.
      distribution: the family of action distributions.
      critic: whether there is a critic.
    """

    def init(key):
        x = jax.tree.map(lambda leaf: jnp.zeros((1, 1, *leaf.shape), leaf.dtype), observation)
        params = {
            name: net.init(k, x, net.initial_carry(1), jnp.zeros((1, 1), bool))["params"]
            for k, (name, net) in zip(jax.random.split(key, len(networks)), networks.items(), strict=True)
        }
        return params | distribution.init_free()

    def forward(params, observations, carry, is_first):
        """Distribution parameters `[S, N, P]`, values `[S, N]` or None, and the carry after the last step."""
        outputs, new_carry = [], {}
        for name, net in networks.items():
            heads, _, new_carry[name] = net.apply({"params": params[name]}, observations, carry[name], is_first)
            outputs += heads
        parameters, *value = outputs
        return distribution.join_free(parameters, params), value[0][..., 0] if critic else None, new_carry

    def step(params, observation, carry):
        is_first = jnp.zeros((1, *leading_shape(observation, 1)), bool)  # the caller has reset the carry where it is
        one_step = jax.tree.map(lambda leaf: leaf[None], observation)
        parameters, value, carry = forward(params, one_step, carry, is_first)
        return parameters[0], value[0] if critic else None, carry

    def features(params, observations, carry, is_first):
        name, net = next(iter(networks.items()))
        return net.apply({"params": params[name]}, observations, carry[name], is_first)[1]

    return Policy(
        init=init,
        initial_carry=lambda params, num_envs, prompt=None: {
            name: net.initial_carry(num_envs) for name, net in networks.items()
        },
        step=step,
        sequence=lambda *arguments: forward(*arguments)[:2],
        distribution=distribution,
        has_critic=critic,
        has_carry=any(net.recurrent is not None for net in networks.values()),
        features=features,
    )

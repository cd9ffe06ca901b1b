"""The products and activations of an update, and nothing else: how fast it could be at these sizes."""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from grpo_jax import Config
from grpo_jax.policies.dense import product
from grpo_jax.updates.minibatches import default_microbatches

Weights = list[list[jax.Array]]  # of each network, from the first layer to the head


def make_networks(config: Config, layers: Sequence[Sequence[int]]) -> tuple[Weights, list[jax.Array]]:
    """Weights of networks with these widths, and for one part of a minibatch observations and gradients of outputs."""
    size = config.num_envs * config.num_steps // config.num_minibatches
    size //= default_microbatches(config, 1, size)
    widths = [layers[0][0], *(widths[-1] for widths in layers)]
    samples = [jax.random.normal(jax.random.key(i), (size, width)) for i, width in enumerate(widths)]
    return [[jnp.full(shape, 0.1) for shape in itertools.pairwise(widths)] for widths in layers], samples


def make_gradients(config: Config, activation: Callable[[jax.Array], jax.Array]) -> Callable:
    """`(weights, samples) -> (weights, 0)`: the networks' gradients in all updates of an iteration."""

    def output(network, x):
        for weight in network[:-1]:
            x = activation(product(x, weight))
        return product(x, network[-1])

    def step(weights, samples):
        observations, *output_gradients = samples
        num_parts = config.num_epochs * config.num_envs * config.num_steps // len(observations)

        def part(_, weights):
            _, backward = jax.vjp(lambda weights: [output(each, observations) for each in weights], weights)
            (gradient,) = backward(output_gradients)
            # Changed a little, or the compiler would make one part and leave out the others.
            return jax.tree.map(lambda weight, change: weight - 1e-9 * change, weights, gradient)

        return jax.lax.fori_loop(0, num_parts, part, weights), jnp.zeros(())

    return step

"""The products and activations of an update, and nothing else: how fast it could be at these sizes."""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from grpo_jax import Config
from grpo_jax.policies.dense import product
from grpo_jax.updates.minibatches import default_microbatches

Weights = list[list[jax.Array]]  # of each network, from the first layer to the head


def make_networks(config: Config, networks: Sequence[Sequence[int]]) -> tuple[Weights, list[jax.Array]]:
    """Weights of networks with these widths, and of a minibatch `[parts, samples]` inputs and gradients of outputs."""
    size = config.num_envs * config.num_steps // config.num_minibatches
    num_parts = default_microbatches(config, 1, size)
    input_and_outputs = [networks[0][0], *(widths[-1] for widths in networks)]
    shapes = [(num_parts, size // num_parts, width) for width in input_and_outputs]
    samples = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    return [[jnp.full(shape, 0.1) for shape in itertools.pairwise(widths)] for widths in networks], samples


def make_gradients(config: Config, activation: Callable[[jax.Array], jax.Array]) -> Callable:
    """`(weights, samples) -> (weights, 0)`: the networks' gradients in all updates of an iteration."""

    def output(network, x):
        for weight in network[:-1]:
            x = activation(product(x, weight))
        return product(x, network[-1])

    def step(weights, samples):
        def update(_, weights):
            def add_part(total, part):
                observations, *output_gradients = part
                _, backward = jax.vjp(lambda weights: [output(each, observations) for each in weights], weights)
                return jax.tree.map(jnp.add, total, *backward(output_gradients)), None

            gradient, _ = jax.lax.scan(add_part, jax.tree.map(jnp.zeros_like, weights), samples)
            # Changed a little, or the compiler would make one update and leave out the others.
            return jax.tree.map(lambda weight, change: weight - 1e-9 * change, weights, gradient)

        num_updates = config.num_epochs * config.num_minibatches
        return jax.lax.fori_loop(0, num_updates, update, weights), jnp.zeros(())

    return step

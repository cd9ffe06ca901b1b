"""Gradient checkpointing of a transformer's blocks: the same gradient from less memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.policies import Transformer, make_token_policy
from grpo_jax.policies.distributions import categorical

NUM_STEPS, NUM_TEXTS = 16, 4
TOKENS = jax.random.randint(jax.random.key(1), (NUM_STEPS, NUM_TEXTS), 0, 16)
PROMPTS = jnp.zeros((NUM_TEXTS, 2), jnp.int32)
DEEP = Transformer(width=16, num_heads=2, num_layers=4)


def make_loss(architecture):
    """A loss, and the parameters to differentiate it at."""
    policy = make_token_policy(architecture, categorical(16), max_steps=NUM_STEPS)

    def loss(params):
        carry = policy.sequence_carry(policy.initial_carry(params, NUM_TEXTS, PROMPTS))
        return jnp.mean(policy.sequence(params, TOKENS, carry, None)[0] ** 2)

    return loss, policy.init


def test_the_gradient_is_the_same():
    shallow = dataclasses.replace(DEEP, num_layers=1)
    gradients = []
    for architecture in (shallow, dataclasses.replace(shallow, checkpoint_layers=True)):
        loss, init = make_loss(architecture)
        gradients.append(jax.jit(lambda loss=loss, init=init: jax.grad(loss)(init(jax.random.key(0))))())
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7), *gradients)


def test_the_backward_pass_is_given_a_quarter_of_the_activations():
    kept = []
    for architecture in (DEEP, dataclasses.replace(DEEP, checkpoint_layers=True)):
        loss, init = make_loss(architecture)
        params = jax.eval_shape(init, jax.random.key(0))
        backward = jax.eval_shape(lambda params, loss=loss: jax.vjp(loss, params)[1], params)
        sizes = [leaf.size for leaf in jax.tree.leaves(backward)]
        kept.append(sum(sizes) - sum(leaf.size for leaf in jax.tree.leaves(params)))
    assert kept[1] < kept[0] / 4

"""Networks: how they start, which observations they take, and that one pass equals many steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import bits

from grpo_jax.networks import make_mlp_policy
from grpo_jax.networks.initializers import orthogonal
from grpo_jax.spaces import Discrete


def make(shape=(4,), dtype=jnp.float32, critic=True, **settings):
    settings = {"hidden_sizes": (16, 12), "activation": "tanh"} | settings
    return make_mlp_policy(jax.ShapeDtypeStruct(shape, dtype), Discrete(3), critic=critic, **settings)


def test_weights_start_orthogonal_with_the_usual_gains():
    params = make().init(jax.random.key(0))
    for name, gains in {"actor": [2**0.5, 2**0.5, 0.01], "critic": [2**0.5, 2**0.5, 1.0]}.items():
        for layer, gain in zip(("Dense_0", "Dense_1", "Dense_2"), gains, strict=True):
            kernel, bias = params[name][layer]["kernel"], params[name][layer]["bias"]
            gram = kernel.T @ kernel if kernel.shape[0] >= kernel.shape[1] else kernel @ kernel.T
            np.testing.assert_allclose(gram, gain**2 * np.eye(gram.shape[0]), atol=1e-5 * gain**2, err_msg=name + layer)
            assert not bias.any()


def test_actor_and_critic_share_neither_weights_nor_draws():
    params = make().init(jax.random.key(0))
    assert not np.array_equal(params["actor"]["Dense_0"]["kernel"], params["critic"]["Dense_0"]["kernel"])
    observation = jnp.ones((1, 2, 4))
    value = jax.grad(lambda p: make().sequence(p, observation)[1].sum())(params)
    logits = jax.grad(lambda p: make().sequence(p, observation)[0].var())(params)
    assert not any(leaf.any() for leaf in jax.tree.leaves((value["actor"], logits["critic"])))
    assert all(leaf.any() for leaf in (value["critic"]["Dense_0"]["kernel"], logits["actor"]["Dense_0"]["kernel"]))


def test_without_a_critic_none_of_it_exists():
    policy = make(critic=False)
    params = policy.init(jax.random.key(0))
    assert set(params) == {"actor"} and not policy.has_critic
    assert policy.sequence(params, jnp.ones((2, 5, 4)))[1] is None
    assert policy.step(params, jnp.ones((5, 4)), ())[1] is None


def test_a_sequence_is_its_steps():
    policy = make()
    params = policy.init(jax.random.key(0))
    observations = jax.random.normal(jax.random.key(1), (6, 5, 4))
    logits, values = policy.sequence(params, observations)
    assert (logits.shape, values.shape) == ((6, 5, 3), (6, 5))
    carry = policy.initial_carry(5)
    for t in range(6):
        step_logits, step_value, carry = policy.step(params, observations[t], carry)
        np.testing.assert_allclose(step_logits, logits[t], atol=1e-6)
        np.testing.assert_allclose(step_value, values[t], atol=1e-6)
    assert carry == ()


@pytest.mark.parametrize("shape, dtype", [((), jnp.int32), ((10, 5), jnp.uint8), ((2, 2, 2), jnp.bool)])
def test_observations_of_any_shape_and_type_are_flattened_to_floats(shape, dtype):
    policy = make(shape, dtype)
    params = policy.init(jax.random.key(0))
    observations = jnp.ones((3, 2, *shape), dtype)
    logits, values = policy.sequence(params, observations)
    assert (logits.shape, logits.dtype, values.shape) == ((3, 2, 3), jnp.float32, (3, 2))
    assert params["actor"]["Dense_0"]["kernel"].shape[0] == int(np.prod(shape))


def test_sizes_and_activation_are_as_asked():
    params = make(hidden_sizes=(7,)).init(jax.random.key(0))
    shapes = {name: layer["kernel"].shape for name, layer in params["actor"].items()}
    assert shapes == {"Dense_0": (4, 7), "Dense_1": (7, 3)}
    assert list(make(hidden_sizes=()).init(jax.random.key(0))["actor"]) == ["Dense_0"]
    observation = jnp.linspace(-1, 1, 4)[None, None]
    values = [make(hidden_sizes=(7,), activation=name).sequence(params, observation)[1] for name in ("tanh", "relu")]
    hidden = observation[0, 0] @ params["critic"]["Dense_0"]["kernel"]
    head = params["critic"]["Dense_1"]["kernel"][:, 0]
    for value, activation in zip(values, (np.tanh, lambda x: np.maximum(x, 0)), strict=True):
        np.testing.assert_allclose(value[0, 0], activation(hidden) @ head, rtol=1e-5)


def test_init_is_a_function_of_its_key():
    policy = make()
    assert bits(policy.init(jax.random.key(0))) == bits(policy.init(jax.random.key(0)))
    assert bits(policy.init(jax.random.key(0))) != bits(policy.init(jax.random.key(1)))


@pytest.mark.parametrize("shape", [(64, 64), (4, 64), (64, 2), (1, 3)])
def test_initial_kernels_are_orthogonal_and_uniform(shape):
    kernels = jax.jit(jax.vmap(lambda key: orthogonal(2.0)(key, shape)))(jax.random.split(jax.random.key(0), 500))
    kernels = np.asarray(kernels, np.float64)
    short = kernels if shape[0] >= shape[1] else kernels.transpose(0, 2, 1)
    gram = np.einsum("nij,nik->njk", short, short)
    np.testing.assert_allclose(gram, np.broadcast_to(4 * np.eye(min(shape)), gram.shape), atol=2e-5)
    # Uniform: every entry has mean 0 and variance scale² / longest side.
    entries = kernels.reshape(500, -1)
    assert np.max(np.abs(entries.mean(0))) < 5 * 2 / np.sqrt(500 * max(shape))
    np.testing.assert_allclose(np.mean(entries**2), 4 / max(shape), rtol=1e-5)

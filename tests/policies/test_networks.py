"""Networks: initial weights, shapes of observations, and one pass over a sequence equals its steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.observations import flatten_observation, leading_shape
from grpo_jax.policies import CNN, MLP
from grpo_jax.policies.dense import orthogonal, patches, product
from grpo_jax.policies.distributions import categorical, diagonal_gaussian
from grpo_jax.policies.networks import resolve_network
from grpo_jax.policies.recurrent import RECURRENT

KEY = jax.random.key(0)
IMAGE = (6, 5, 2)
CONV = {"conv_channels": 5}
GRU = {"recurrent": "gru"}


def make(shape=(4,), dtype=jnp.float32, distribution=None, critic=True, **fields):
    """A policy with small layers: convolutions for images."""
    network = functools.partial(CNN, **CONV) if shape == IMAGE else MLP
    network = network(**{"hidden_sizes": (16, 12), "recurrent_size": 6} | fields)
    policy = network(jax.ShapeDtypeStruct(shape, dtype), distribution or categorical(3), critic)
    # Compiled, as operation by operation takes longer.
    return policy._replace(init=jax.jit(policy.init), step=jax.jit(policy.step), sequence=jax.jit(policy.sequence))


def sequence(policy, params, observations, is_first=None):
    """`policy.sequence` from the initial carry; by default no episode begins within it."""
    shape = leading_shape(observations, 2)
    is_first = np.zeros(shape, bool) if is_first is None else jnp.asarray(is_first)
    return policy.sequence(params, observations, policy.initial_carry(params, shape[1]), is_first)


@pytest.mark.usefixtures("initial_weights_of_users")
def test_weights_start_orthogonal():
    params = make().init(jax.random.key(0))
    for name, gains in {"actor": [2**0.5, 2**0.5, 0.01], "critic": [2**0.5, 2**0.5, 1.0]}.items():
        for layer, gain in zip(("Dense_0", "Dense_1", "Dense_2"), gains, strict=True):
            assert_orthogonal(params[name][layer]["kernel"], gain)
            assert not params[name][layer]["bias"].any()
    actor = make(IMAGE, recurrent="gru", actor_init_gain=0.5, critic=False).init(jax.random.key(0))["actor"]
    for layer in ("Conv_0", "Dense_0", "Dense_1"):
        assert_orthogonal(actor[layer]["kernel"], 2**0.5)
    assert_orthogonal(actor["Dense_2"]["kernel"], 0.5)
    for kernel in (actor["GRU_0"]["input"]["kernel"], actor["GRU_0"]["recurrent_kernel"]):
        for gate in np.split(np.asarray(kernel), 3, axis=1):
            assert_orthogonal(gate, 1.0)


def assert_orthogonal(kernel, gain):
    kernel = np.asarray(kernel)
    gram = kernel.T @ kernel if kernel.shape[0] >= kernel.shape[1] else kernel @ kernel.T
    np.testing.assert_allclose(gram, gain**2 * np.eye(gram.shape[0]), atol=1e-5 * gain**2)


def gradients(policy, params):
    """Of the values, and of the logits."""
    value = jax.grad(lambda params: sequence(policy, params, jnp.ones((1, 2, 4)))[1].sum())
    logits = jax.grad(lambda params: sequence(policy, params, jnp.ones((1, 2, 4)))[0].var())
    return jax.jit(value)(params), jax.jit(logits)(params)


@pytest.mark.usefixtures("initial_weights_of_users")
def test_a_separate_critic_shares_neither_weights_nor_draws():
    policy = make()
    params = policy.init(jax.random.key(0))
    assert not np.array_equal(params["actor"]["Dense_0"]["kernel"], params["critic"]["Dense_0"]["kernel"])
    value, logits = gradients(policy, params)
    assert not any(leaf.any() for leaf in jax.tree.leaves((value["actor"], logits["critic"])))
    assert value["critic"]["Dense_0"]["kernel"].any() and logits["actor"]["Dense_0"]["kernel"].any()


def test_a_shared_critic_is_a_head_of_the_actor():
    policy = make(shared_critic=True, recurrent="gru")
    params = policy.init(jax.random.key(0))
    assert set(params) == set(policy.initial_carry(params, 2)) == {"actor_critic"}
    shapes = [params["actor_critic"][f"Dense_{i}"]["kernel"].shape for i in range(4)]
    assert shapes == [(4, 16), (16, 12), (6, 3), (6, 1)]
    value, logits = (gradient["actor_critic"] for gradient in gradients(policy, params))
    assert value["Dense_0"]["kernel"].any() and logits["Dense_0"]["kernel"].any()
    assert not value["Dense_2"]["kernel"].any() and not logits["Dense_3"]["kernel"].any()
    assert set(make(shared_critic=True, critic=False).init(jax.random.key(0))) == {"actor"}


def test_without_a_critic_none_of_it_exists():
    policy = make(critic=False)
    params = policy.init(jax.random.key(0))
    assert set(params) == {"actor"} and not policy.has_critic
    assert sequence(policy, params, jnp.ones((2, 5, 4)))[1] is None
    assert policy.step(params, jnp.ones((5, 4)), policy.initial_carry(params, 5))[1] is None


def test_free_parameters_are_trained_with_the_network():
    policy = make(distribution=diagonal_gaussian((-1.0,) * 3, (1.0,) * 3))
    params = policy.init(jax.random.key(0))
    assert params["actor"]["Dense_2"]["kernel"].shape == (12, 3)
    params["free"] += jnp.array([0.0, 1.0, 2.0])
    parameters, _ = sequence(policy, params, jax.random.normal(jax.random.key(1), (2, 5, 4)))
    assert parameters.shape == (2, 5, 6)
    assert np.array_equal(parameters[..., 3:], np.broadcast_to([0.0, 1.0, 2.0], (2, 5, 3)))
    gradient = jax.jit(jax.grad(lambda p: sequence(policy, p, jnp.ones((2, 5, 4)))[0][..., 4].sum()))(params)
    assert gradient["free"].tolist() == [0.0, 10.0, 0.0]


IS_FIRST = np.array([[1, 0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0, 1]], bool).T


SETTINGS = [{}, {"recurrent": "mingru", "layer_norm": True, "shared_critic": True}]
SLOW = [{"shape": IMAGE} | GRU, {"shape": IMAGE, "shared_critic": True}, GRU | {"shared_critic": True}]


@pytest.mark.parametrize("settings", [*SETTINGS, *(pytest.param(s, marks=pytest.mark.slow) for s in SLOW)], ids=str)
def test_a_sequence_is_its_steps(settings):
    policy = make(**settings)
    params = policy.init(jax.random.key(0))
    shape = *IS_FIRST.shape, *settings.get("shape", (4,))
    observations = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    # Far from the initial carry, so that a missing reset at the first step of an episode shows.
    fresh = jax.device_get(policy.initial_carry(params, 3))
    carry = before = jax.tree.map(lambda leaf: leaf + np.float32(0.7), fresh)
    logits, values = jax.device_get(policy.sequence(params, observations, before, IS_FIRST))
    assert (logits.shape, values.shape) == ((7, 3, 3), (7, 3))
    for t, is_first in enumerate(IS_FIRST):
        carry = jax.tree.map(lambda new, old, is_first=is_first: np.where(is_first[:, None], new, old), fresh, carry)
        step_logits, step_value, carry = policy.step(params, observations[t], carry)
        np.testing.assert_allclose(step_logits, logits[t], atol=1e-6)
        np.testing.assert_allclose(step_value, values[t], atol=1e-5)
    assert policy.has_carry == bool(jax.tree.leaves(carry)) == ("recurrent" in settings)
    if policy.has_carry:
        for shift in (1, -1):
            _, other = policy.sequence(params, observations, before, np.roll(IS_FIRST, shift, axis=0))
            assert np.max(np.abs(np.asarray(other) - values)) > 0.05


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("name", ["gru", "mingru"])
def test_recurrent_layers_follow_their_formulas(name):
    x = np.random.default_rng(1).normal(size=(5, 2, 4))
    is_first = np.array([[0, 0], [0, 1], [0, 0], [1, 0], [0, 0]], bool)
    layer = RECURRENT[name](3)
    arguments = jnp.asarray(x, jnp.float32), jnp.full((2, 3), 0.7), jnp.asarray(is_first)
    params = jax.tree.map(lambda leaf: leaf + 0.1, jax.jit(layer.init)(jax.random.key(0), *arguments))
    outputs, after = jax.jit(layer.apply)(params, *arguments)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["params"])
    h = np.full((2, 3), 0.7)
    for t in range(5):
        h = np.where(is_first[t][:, None], 0.0, h)
        inputs = x[t] @ p["input"]["kernel"] + p["input"]["bias"]
        match name:
            case "gru":
                (r, z, new), (u, v, w) = (np.split(y, 3, axis=1) for y in (inputs, h @ p["recurrent_kernel"]))
                r, z = sigmoid(r + u), sigmoid(z + v)
                h = (1 - z) * np.tanh(new + r * (w + p["recurrent_bias"])) + z * h
            case "mingru":
                z, new = np.split(inputs, 2, axis=1)
                h = (1 - sigmoid(z)) * h + sigmoid(z) * new
        np.testing.assert_allclose(outputs[t], h, atol=1e-5)
    np.testing.assert_allclose(after, h, atol=1e-5)


def test_images_get_a_convolution_and_others_are_flattened_and_joined_with_it():
    cases = {(): None, (7,): None, (1, 1): None, (2, 9): None, (10, 5): 24, (10, 10, 4): 64, (3, 3, 2, 2): 1}
    for shape, features in (cases | {(30, 40, 3): 140}).items():
        observation = jax.ShapeDtypeStruct(shape, jnp.uint8)
        network = dataclasses.replace(resolve_network("auto", observation, has_prompt=False), hidden_sizes=(16,))
        layers = jax.eval_shape(network(observation, categorical(3), False).init, KEY)["actor"]
        if features is None:
            assert "Conv_0" not in layers and layers["Dense_0"]["kernel"].shape == (int(np.prod(shape)), 16)
        else:
            assert layers["Conv_0"]["kernel"].shape == (9 * int(np.prod(shape[2:])), 16)
            assert layers["Dense_0"]["kernel"].shape == (features * 16, 16)
    flags = make((2, 2, 2), jnp.bool)
    logits, values = sequence(flags, flags.init(KEY), jnp.ones((3, 2, 2, 2, 2), bool))
    assert (logits.shape, logits.dtype, values.shape) == ((3, 2, 3), jnp.float32, (3, 2))
    parts = {"image": jax.ShapeDtypeStruct(IMAGE, jnp.int8), "goal": jax.ShapeDtypeStruct((3,), jnp.float32)}
    convolved = 4 * 3 * 5
    for network, sizes in {CNN((16,), **CONV): convolved + 3, MLP((16,)): 6 * 5 * 2 + 3}.items():
        layers = jax.eval_shape(network(parts, categorical(3), True).init, jax.random.key(0))["critic"]
        assert layers["Dense_0"]["kernel"].shape == (sizes, 16)


def test_arrays_are_joined_in_the_order_of_their_keys():
    parts = {"b": jnp.arange(6, dtype=jnp.int8).reshape(1, 2, 3), "a": (jnp.full((1, 1), 7.5), jnp.array([True]))}
    np.testing.assert_array_equal(flatten_observation(parts, 1), [[7.5, 1, 0, 1, 2, 3, 4, 5]])
    assert flatten_observation({"a": parts["b"]}, 1) is parts["b"]


def test_an_actor_sees_its_part_and_the_critic_all():
    parts = {name: jax.ShapeDtypeStruct((2,), jnp.float32) for name in ("position", "velocity", "privileged")}
    network = MLP((16,), recurrent="gru", recurrent_size=6, actor_observation=("velocity", "position"))
    policy = network(parts, categorical(3), True)
    policy, init = policy._replace(sequence=jax.jit(policy.sequence)), jax.jit(policy.init)
    params = init(jax.random.key(0))
    assert [params[name]["Dense_0"]["kernel"].shape[0] for name in ("actor", "critic")] == [4, 6]
    seen, zeros = {name: jnp.ones((1, 2, 2)) for name in parts}, jnp.zeros((1, 2, 2))
    logits, values = sequence(policy, params, seen)
    other_logits, other_values = sequence(policy, params, seen | {"privileged": zeros})
    assert (logits == other_logits).all() and (values != other_values).all()
    assert (logits != sequence(policy, params, seen | {"velocity": zeros})[0]).all()


@pytest.mark.parametrize("activation", [np.tanh, lambda x: np.maximum(x, 0)], ids=["tanh", "relu"])
def test_layers_are_those_of_the_settings(activation, request):
    """Dense layers, normalised before the activation if asked to."""
    policy = make(hidden_sizes=(7, 5), activation=request.node.callspec.id, layer_norm=True)
    params, outputs = policy.init(KEY), {}
    kernels = {
        role: [layers[name]["kernel"] for name in sorted(layers) if "Dense" in name] for role, layers in params.items()
    }
    shapes = {role: [kernel.shape for kernel in kernels[role]] for role in kernels}
    assert shapes == {"actor": [(4, 7), (7, 5), (5, 3)], "critic": [(4, 7), (7, 5), (5, 1)]}
    assert list(make(hidden_sizes=()).init(KEY)["actor"]) == ["Dense_0"]
    for role, (*hidden, last) in kernels.items():
        x = np.linspace(-1, 1, 4)
        for kernel in hidden:
            x = np.float64(x @ kernel)
            x = activation((x - x.mean()) / np.sqrt(x.var() + 1e-6))
        outputs[role] = x @ last
    logits, values = sequence(policy, params, jnp.linspace(-1, 1, 4)[None, None])
    np.testing.assert_allclose(logits[0, 0], outputs["actor"], rtol=1e-4)
    np.testing.assert_allclose(values[0, 0], outputs["critic"][0], rtol=1e-4)


def curve(product, kernel, inputs):
    return jnp.sum(jnp.sin(product(inputs, kernel)))


def test_gradients_of_the_dense_product_also_of_many_kernels_and_twice():
    both = jax.jit(lambda *arguments: [jax.grad(curve, (1, 2))(f, *arguments) for f in (product, jnp.matmul)])
    for shape, outputs in (((7, 5), 3), ((7, 3), 5), ((2, 4, 5), 5), ((6, 5), 1)):
        inputs, kernel = (jax.random.normal(KEY, size) for size in (shape, (shape[-1], outputs)))
        for ours, plain in zip(*both(kernel, inputs), strict=True):
            np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)

    def gradient_norm(product, kernel, inputs):
        return jnp.sum(jax.grad(curve, 1)(product, kernel, inputs) ** 2)

    differentiate = jax.vmap(jax.grad(gradient_norm, 1), (None, 0, None))
    kernels, inputs = (jax.random.normal(KEY, size) for size in ((3, 4, 2), (6, 4)))
    ours, plain = jax.jit(lambda *x: [differentiate(f, *x) for f in (product, jnp.matmul)])(kernels, inputs)
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape, stride", [((10, 10, 4), 1), ((17, 20, 3), 2)])
def test_the_convolution_is_a_convolution(shape, stride):
    images = jax.random.randint(jax.random.key(0), (2, *shape), 0, 3).astype(jnp.uint8)
    kernel = jax.random.normal(jax.random.key(1), (3, 3, shape[2], 5))
    spare = [(0, -(side - 3) % stride) for side in shape[:2]]

    @jax.jit
    def convolve(images):
        real, layout = images.astype(jnp.float32), ("NHWC", "HWIO", "NHWC")
        expected = jax.lax.conv_general_dilated(real, kernel, (stride, stride), spare, dimension_numbers=layout)
        sums = jax.grad(lambda x: patches(x, stride).sum())(real)
        return patches(images, stride) @ kernel.reshape(-1, 5), expected, sums

    ours, expected, sums = convolve(images)
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    assert (sums >= 1).all(), "every pixel is in some patch"


@pytest.mark.parametrize("shape", [(8, 8), (16, 2)])
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

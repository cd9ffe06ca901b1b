"""The kernels of dense networks, interpreted on a CPU, against NumPy in float64."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import Config, Hyperparams, make_init, make_train_step
from grpo_jax.devices.execution_plan import GPU, HOPPER
from grpo_jax.errors import ConfigError
from grpo_jax.kernels import dense_networks, unserved
from grpo_jax.policies import MLP, hopper

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs jax 0.11")
ROOT = np.sqrt(2 / np.pi)
ACTIVATIONS = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.tanh(ROOT * (x + 0.044715 * x**3))) / 2,
}
ACTIVATIONS["swish"] = ACTIVATIONS["silu"]


@pytest.fixture
def interpreted(monkeypatch):
    """A context in which the kernels run on a CPU; JAX does not interpret products of what is in registers."""
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu", exc_type=ImportError)
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from grpo_jax.kernels import passes

    of_memory = passes.product

    def product(shape, *pairs):
        in_memory = [pair for pair in pairs if not isinstance(pair[0], jax.Array)]
        total = of_memory(shape, *in_memory) if in_memory else 0.0
        return total + sum(
            jnp.dot(left, right[...], preferred_element_type=jnp.float32)
            for left, right in pairs
            if isinstance(left, jax.Array)
        )

    monkeypatch.setattr(passes, "product", product)
    monkeypatch.setattr(passes, "MULTIPROCESSORS", 1)  # so that a block takes several tiles
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", platform="gpu", num_cores=8)
    with contextlib.ExitStack() as stack:
        mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        stack.enter_context(plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()))
        yield


def draw(samples, inputs, hidden, depth, outputs, scale=1.0, seed=0):
    """Parameters, observations, and gradients of the outputs of size `scale / samples`."""
    rng = np.random.default_rng(seed)

    def normal(*shape, scale):
        return np.float32(scale * rng.standard_normal(shape))

    def network(number):
        sizes = [inputs, *[hidden] * depth, number]
        return tuple((normal(i, o, scale=i**-0.5), normal(o, scale=0.3)) for i, o in zip(sizes, sizes[1:]))  # noqa: B905

    params = tuple(map(network, outputs))
    return params, normal(samples, inputs, scale=1.0), tuple(normal(samples, o, scale=scale / samples) for o in outputs)


def in_tf32(x):
    """Rounded to 10 bits of the mantissa, as XLA's products on a GPU round their operands by default."""
    bits = np.float32(x).view(np.uint32)
    return np.float64(((bits + 0xFFF + (bits >> 13 & 1)) & ~np.uint32(0x1FFF)).view(np.float32))


def in_float64(params, x, gradients, activation, operand=np.float64):
    """Outputs and the gradients of parameters and observations; `operand` rounds what is multiplied."""
    function, outputs, into_params, into_x = ACTIVATIONS[activation], [], [], 0.0
    for layers, gradient in zip(params, gradients, strict=True):
        gradient, befores, values, into_layers = np.float64(gradient), [], [operand(x)], []
        for kernel, bias in layers:
            befores.append(values[-1] @ operand(kernel) + bias)
            values.append(operand(function(befores[-1])))
        outputs.append(befores[-1])
        for i in reversed(range(len(layers))):
            if i < len(layers) - 1:
                step = 1e-6
                gradient = gradient * (function(befores[i] + step) - function(befores[i] - step)) / (2 * step)
            into_layers.insert(0, (values[i].T @ operand(gradient), gradient.sum(0)))
            gradient = operand(gradient) @ operand(layers[i][0]).T
        into_params.append(tuple(into_layers))
        into_x = into_x + gradient
    return tuple(outputs), tuple(into_params), into_x


def by_kernels(params, x, gradients, activation, of_x=False):
    if of_x:
        outputs, vjp = jax.vjp(lambda p, x: dense_networks(p, x, activation), params, x)
        return outputs, *vjp(gradients)
    outputs, vjp = jax.vjp(lambda p: dense_networks(p, x, activation), params)
    return outputs, *vjp(gradients), None


def assert_near(found, expected, most=2.5e-3):
    """No error above `most` of an array's largest entry, where TF32 has up to 1.3e-3."""
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=most * np.abs(wanted).max())


@needs_mosaic
@pytest.mark.parametrize(
    ("activation", "samples", "inputs", "hidden", "depth", "outputs", "of_x", "scale"),
    [
        ("tanh", 65, 4, 64, 2, (2, 1), False, 1e8),
        ("relu", 1, 1, 16, 1, (1,), False, 1.0),
        ("gelu", 63, 17, 48, 2, (6, 1), False, 1e-8),
        ("silu", 3, 400, 64, 2, (2,), True, 1.0),
        ("relu", 1000, 40, 32, 1, (2,), False, 1.0),
        ("tanh", 3, 4, 80, 1, (31,), False, 1.0),
        ("swish", 2, 17, 96, 1, (2,), False, 1.0),
        ("gelu", 5, 40, 112, 1, (2,), False, 1.0),
        ("relu", 65, 4, 128, 1, (2,), True, 1.0),
    ],
)
def test_outputs_and_gradients(interpreted, activation, samples, inputs, hidden, depth, outputs, of_x, scale):
    arguments = draw(samples, inputs, hidden, depth, outputs, scale)
    found = by_kernels(*arguments, activation, of_x)
    outputs, into_params, into_x = in_float64(*arguments, activation)
    assert_near(found, (outputs, into_params, into_x if of_x else None))
    if activation in ("tanh", "gelu") and samples > 60:  # enough that no array is right by chance
        by_tf32 = in_float64(*arguments, activation, in_tf32)[:2]
        for got, wanted, usual in zip(*map(jax.tree.leaves, (found[:2], (outputs, into_params), by_tf32)), strict=True):
            error, most = (np.abs(each - wanted).max() / np.abs(wanted).max() for each in (got, usual))
            assert error < 2 * most + 1e-6


@needs_mosaic
def test_rows_of_vmap_with_nan_in_one_large_observations_and_nothing_to_learn_in_others(interpreted):
    rows = [draw(5, 3, 16, 1, (2, 1), seed=seed) for seed in range(3)]
    rows[0][1][:, 0] *= 1e5  # more than float16 holds
    rows[0][1][:, 1] *= 1e3
    rows[0][0][0][0][0][1, 0] = 100.0
    rows[1][1][2, 1] = np.nan
    rows[2] = (*rows[2][:2], tuple(np.zeros_like(gradient) for gradient in rows[2][2]))
    arguments = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    found = jax.vmap(lambda *row: by_kernels(*row, "relu")[:2])(*arguments)
    large, nan, idle = (jax.tree.map(lambda leaf: np.asarray(leaf[i]), found) for i in range(3))  # noqa: B023
    assert_near(large, in_float64(*rows[0], "relu")[:2])
    others = [0, 1, 3, 4]
    assert all(np.isnan(output[2]).all() for output in nan[0])
    assert_near([x[others] for x in nan[0]], [x[others] for x in in_float64(*rows[1], "relu")[0]])
    assert all(np.isnan(kernel).all() for layers in nan[1] for kernel, _ in layers)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(idle[1]))


@needs_mosaic
@pytest.mark.slow
def test_a_grpo_step_on_a_grid_of_rates_with_donation_is_that_of_xla(interpreted, monkeypatch):
    """Returns of Pendulum differ within groups, so that gradients are not 0."""
    monkeypatch.setattr(hopper, "PLATFORMS", ())
    fields = {"num_envs": 4, "group_size": 2, "num_epochs": 1, "num_minibatches": 1, "network": MLP((16,))}
    fields |= {"env_params": {"max_steps_in_episode": 3}, "optimizer": "sgd"}
    rates, moves = jnp.array([1.0, 0.1, 0.0], jnp.float32), {}
    for plan in (GPU, HOPPER):
        plan = dataclasses.replace(plan, steps_per_loop=1)
        config = Config("Pendulum-v1", algorithm="grpo", **fields, execution_plan=plan)
        init = jax.vmap(lambda rate: make_init(config)(jax.random.key(0), Hyperparams(learning_rate=rate)))  # noqa: B023
        states = jax.jit(init)(rates)
        before = jax.tree.map(np.array, states.params)
        after = jax.jit(jax.vmap(make_train_step(config)), donate_argnums=0)(states)[0].params
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(states.params))
        moves[plan.hopper_kernels] = jax.tree.map(lambda new, old: np.asarray(new) - old, after, before)
    for by_kernel, by_xla in zip(*map(jax.tree.leaves, (moves[True], moves[False])), strict=True):
        assert by_xla[0].any() and not by_kernel[2].any()
        assert_near((by_kernel[0], by_kernel[1]), (by_xla[0], by_xla[1]), 5e-3)


@needs_mosaic
def test_second_derivatives_are_refused(interpreted):
    params, x, _ = draw(1, 1, 16, 1, (1,))
    slope = jax.grad(lambda x: dense_networks(params, x, "tanh")[0].sum())
    with pytest.raises(ConfigError, match="no second derivatives: use execution_plan='gpu'"):
        jax.grad(lambda x: slope(x).sum())(x)


@pytest.mark.parametrize(
    ("sizes", "activation", "reason"),
    [
        ([(4, 64, 64, 2), (4, 64, 64, 1)], "tanh", None),
        ([(400, 16, 31)], "relu", None),
        ([(4, 64, 64, 2)], "elu", "activation elu"),
        ([(4, 64, 2), (5, 64, 1)], "tanh", "same inputs"),
        ([(50, 128, 2)], "swish", None),
        *(([(4, *hidden, 2)], "tanh", f"hidden layers {hidden}") for hidden in [(), (20,), (144,), (64, 32), (80, 80)]),
        ([(4, 64, 64, 64, 2)], "tanh", "are not one of 16, 32, ... 128 units, nor two of 16, 32, 48 or 64"),
        ([(4, 64, 32)], "tanh", "more than 31"),
    ],
)
def test_unserved(sizes, activation, reason, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    found = unserved(sizes, activation)
    assert found is None if reason is None else reason in found
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert unserved(sizes, activation) == f"the kernel needs jax 0.11, and this is {jax.__version__}"

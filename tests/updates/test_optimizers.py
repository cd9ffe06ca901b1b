"""Optimisers and schedules: the published formulas, and what cannot be is an error before training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from probes import Probe, acted, bits, check
from small import minibatch_gradient

from grpo_jax import Config, Hyperparams
from grpo_jax.devices.execution_plan import CPU, GPU
from grpo_jax.errors import ConfigError
from grpo_jax.policies import MLP
from grpo_jax.rollouts.collect import collect
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.training.train_step import initial_state
from grpo_jax.updates.batch import make_batch
from grpo_jax.updates.epochs import update_epochs
from grpo_jax.updates.optimizers import MAX_FLAT_PARAMETERS, make_flattening, make_optimizer
from grpo_jax.updates.schedules import scheduled_rate

CONFIG = Config(environment=Probe(), algorithm="ppo", num_envs=4, num_steps=3, num_minibatches=1, network=MLP((3,)))
PLAIN = dataclasses.replace(CONFIG, num_epochs=3, num_microbatches=1, execution_plan=CPU)
RATE = 0.02
PARAMS = {
    "actor": {"kernel": np.float32([[0.3, -0.2], [0.5, 0.1], [-0.4, 0.2]]), "bias": np.float32([0.2, -0.3])},
    "critic": {"kernel": np.float32([[0.7], [-0.6]]), "bias": np.float32([0.1])},
    "free": np.float32([-0.5]),
}
GRADIENTS = [jax.tree.map(lambda leaf, i=i: np.sin(7 * leaf + np.float32(i)), PARAMS) for i in range(3)]


def descend(optimizer, gradients=GRADIENTS, params=PARAMS):
    """The parameters after a step for each gradient."""

    @jax.jit
    def learn(params):
        state = optimizer.init(params)
        for gradient in gradients:
            steps, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, steps)
        return params

    return learn(params)


def made(name, **hyperparams):
    return make_optimizer(name, Hyperparams(**{"max_grad_norm": np.inf} | hyperparams), RATE)


def assert_close(tree, other, **tolerance):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **{"rtol": 1e-5, "atol": 1e-7} | tolerance), tree, other)


# --- formulas --------------------------------------------------------------------------------------------------------

BETAS = {"beta1": 0.8, "beta2": 0.95}


def adam_oracle(g, m, v, w, t, decay=0.0):
    m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
    return m, v, w - RATE * (m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-5) + decay * (w.ndim == 2) * w)


def sgd_oracle(g, m, v, w, t):
    m = 0.8 * m + g
    return m, v, w - RATE * m


ORACLES = {
    "adam": (BETAS, adam_oracle),
    "adamw": (BETAS | {"weight_decay": 0.7}, functools.partial(adam_oracle, decay=0.7)),
    "sgd": ({"beta1": 0.8}, sgd_oracle),
}


@pytest.fixture(scope="module")
def batch():
    """A batch with a gradient."""

    def play(key):
        state = initial_state(CONFIG, key, Hyperparams())
        simulator = Simulator(CONFIG.env, CONFIG.policy, state.params)
        _, trajectory = collect(CONFIG, simulator, state.rollout, *jax.random.split(state.key))
        return make_batch(CONFIG, CONFIG.policy, state, trajectory, Hyperparams())

    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(play, jax.random.key(0)))
    shape = zeros.advantage.shape
    wave = np.sin(np.arange(12.0, dtype=np.float32)).reshape(shape)
    return zeros.replace(
        advantage=wave, target=wave + 1, mask=np.ones(shape, bool), weight=np.ones(shape, np.float32) / 12,
        observation=np.cos(np.arange(24.0, dtype=np.float32)).reshape(*shape, 2),
    )  # fmt: skip


@functools.cache
def gradient_of():
    return jax.jit(
        lambda params, batch: minibatch_gradient(PLAIN, CONFIG.policy, params, batch, jnp.arange(12), Hyperparams())[2]
    )


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "adamw")) for name in ORACLES])
def test_three_updates_are_those_of_the_formula_with_every_plan(name, batch):
    options, oracle = ORACLES[name]
    optimizer = make_optimizer(name, Hyperparams(max_grad_norm=0.1, **options), RATE)
    params = jax.jit(CONFIG.policy.init)(jax.random.key(1))

    @jax.jit
    def learn(params):
        def update(plan):
            config = dataclasses.replace(PLAIN, optimizer=name, execution_plan=plan)
            flatten, _ = make_flattening(config, params)
            state = acted(params, opt_state=optimizer.init(flatten(params)))
            return update_epochs(config, CONFIG.policy, optimizer, state, batch, Hyperparams(), jax.random.key(0))[0]

        return update(CPU).params, update(GPU).params

    leaves, structure = jax.tree.flatten(params)
    rows = [(0.0, 0.0, np.asarray(leaf, np.float64)) for leaf in leaves]
    for t in (1, 2, 3):
        weights = structure.unflatten(jnp.asarray(w, jnp.float32) for _, _, w in rows)
        gradient = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(gradient_of()(weights, batch))]
        norm = np.sqrt(sum(np.sum(g**2) for g in gradient))
        assert norm > 0.1, "so that the gradient is clipped"
        rows = [oracle(0.1 / norm * g, *row, t) for g, row in zip(gradient, rows, strict=True)]
    expected = structure.unflatten(w for _, _, w in rows)
    for learnt in learn(params):
        assert_close(learnt, expected, rtol=1e-3, atol=1e-4)


def test_muon_is_optax():
    optimizer = made("muon", beta1=0.9, beta2=0.95, weight_decay=0.3)
    directly = optax.contrib.muon(
        RATE, beta=0.9, eps=1e-5, weight_decay=0.3, adam_b1=0.9, adam_b2=0.95, adam_weight_decay=0.0
    )
    assert_close(descend(optimizer), descend(directly))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_is_of_matrices_only(name):
    nothing = [jax.tree.map(np.zeros_like, PARAMS)]
    after = descend(made(name, weight_decay=0.5), nothing)
    for part in ("actor", "critic"):
        assert_close(after[part]["kernel"], (1 - 0.5 * RATE) * PARAMS[part]["kernel"])
        assert bits(after[part]["bias"]) == bits(PARAMS[part]["bias"])
    assert bits(after["free"]) == bits(PARAMS["free"])


def test_an_infinite_limit_of_the_norm_is_none():
    large = [jax.tree.map(lambda leaf: 1e6 * leaf, gradient) for gradient in GRADIENTS]
    assert bits(descend(made("sgd"), large)) == bits(descend(optax.sgd(RATE), large))
    clipped = made("sgd", max_grad_norm=0.5)
    steps, _ = jax.jit(lambda gradient: clipped.update(gradient, clipped.init(PARAMS), PARAMS))(large[0])
    np.testing.assert_allclose(optax.tree.norm(steps), 0.5 * RATE, rtol=1e-5)
    nothing = jax.tree.map(np.zeros_like, PARAMS)
    assert bits(descend(made("sgd"), [nothing])) == bits(PARAMS)


# --- schedules -------------------------------------------------------------------------------------------------------

PROGRESS = (0.0, 0.25, 0.5, 1.0, 1.5)
HALF = (1 + np.sqrt(0.5)) / 2
SCHEDULES = [
    ("constant", [1, 1, 1, 1, 1]),
    ("linear", [1, 0.75, 0.5, 0, 0]),
    ("cosine", [1, HALF, 0.5, 0, 0]),
    (optax.cosine_decay_schedule(1.0, 1), [1, HALF, 0.5, 0, 0]),
    (lambda progress: 0.5, [0.5] * 5),
]


def test_schedules_go_from_the_rate_to_the_final_one():
    hyperparams = Hyperparams(learning_rate=0.4, final_learning_rate=0.1)
    for schedule, factors in SCHEDULES:
        rates = [scheduled_rate(schedule, hyperparams, progress) for progress in PROGRESS]
        np.testing.assert_allclose(rates, 0.1 + 0.3 * np.array(factors), rtol=1e-6)


def test_warm_up_rises_from_0_and_the_schedule_follows():
    hyperparams = Hyperparams(learning_rate=0.4, warmup=0.2)
    rates = [scheduled_rate("linear", hyperparams, progress) for progress in (0.0, 0.1, 0.2, 0.6, 1.0)]
    np.testing.assert_allclose(rates, [0, 0.2, 0.4, 0.2, 0], atol=1e-7)
    without = [scheduled_rate("linear", Hyperparams(warmup=value), 0.3) for value in (None, 0.0)]
    assert bits(without[0]) == bits(without[1])


# --- errors ----------------------------------------------------------------------------------------------------------


def stateful(state, after):
    """An optimiser with these states before and after an update."""
    return lambda hyperparams, learning_rate: optax.GradientTransformation(
        lambda params: state, lambda gradient, state, params: (gradient, after)
    )


def left_out(hyperparams, learning_rate):
    return optax.adam(learning_rate, b1=hyperparams.beta1)


STEPS, OTHER_STATE = r"gives .*float32\[3\].* as steps and state.*must keep", stateful(jnp.zeros(()), jnp.zeros(3))
REFUSED = [  # of a config and hyperparameters
    ({"optimizer": "adamm"}, {}, "unknown optimizer 'adamm': did you mean 'adam'"),
    ({"optimizer": optax.adam(1e-3)}, {}, "is a GradientTransformationExtraArgs, but the learning rate changes"),
    ({"optimizer": optax.adam}, {}, r"optimizer=\S*adam cannot update .*traced .hyperparams, learning_rate"),
    ({"optimizer": lambda hyperparams, rate: optax.lbfgs(rate)}, {}, "'value_fn'.*without the loss that a line search"),
    ({"optimizer": left_out}, {}, "may be None"),
    ({"optimizer": lambda hyperparams, rate: optax.adam}, {}, "optimizer=.* cannot update .*no attribute 'init'"),
    ({"optimizer": OTHER_STATE}, {}, STEPS),
    ({"schedule": "cosin"}, {}, "unknown schedule 'cosin': did you mean 'cosine'"),
    ({"schedule": jnp.log}, {}, "schedule=.*factor of learning_rate.*for 0 and 1 it gives .-inf, 0.0"),
]


def test_what_cannot_train_is_refused_before_training():
    for fields, hyperparams, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            check(dataclasses.replace(CONFIG, **fields), Hyperparams(**hyperparams))


def test_numbers_in_the_state_of_a_custom_optimizer_become_arrays():
    check(dataclasses.replace(CONFIG, optimizer=stateful({"n": 0}, {"n": 1})))


def test_small_parameters_of_one_dtype_are_one_vector_for_adam():
    params = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.array(7.0)}
    flatten, unflatten = make_flattening(CONFIG, params)
    assert flatten(params).tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert jax.tree.map(jnp.array_equal, unflatten(flatten(params)), params) == {"a": True, "b": True}
    large = params | {"a": jax.ShapeDtypeStruct((MAX_FLAT_PARAMETERS,), jnp.float32)}
    mixed = params | {"b": jnp.array(7, jnp.bfloat16)}
    muon = dataclasses.replace(CONFIG, optimizer="muon")
    for config, tree in ((CONFIG, large), (CONFIG, mixed), (muon, params)):
        flatten, unflatten = make_flattening(config, tree)
        assert flatten(tree) is tree and unflatten(tree) is tree

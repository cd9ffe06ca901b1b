"""Custom networks and distributions: what is used, those of docs/networks.md, and what is refused before compiling."""

import dataclasses
import importlib.util
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from compilation import compiled
from probes import bits, check

from grpo_jax import GRPO, Config
from grpo_jax.commands.harness.flags import RunFlags, parse
from grpo_jax.environments import Box
from grpo_jax.errors import ConfigError
from grpo_jax.policies import categorical, make_pure_policy
from grpo_jax.recording.run_folder import describe

PAGE = (Path(__file__).parents[2] / "docs" / "networks.md").read_text(encoding="utf-8")
SMALL = {"algorithm": "ppo", "num_envs": 4, "num_steps": 4, "num_minibatches": 2, "num_epochs": 1}


def init(key, observation):
    return jax.random.normal(key, (observation.shape[1], 3))


def apply(params, observation):
    x = observation @ params
    return x[:, :2], x[:, 2]


def linear(*arguments):
    return make_pure_policy(init, apply, *arguments)


def variant(init=init, apply=apply, **options):
    """`linear` with other functions or options."""
    return lambda *arguments: make_pure_policy(init, apply, *arguments, **options)


@dataclasses.dataclass(frozen=True)
class Linear:
    """A network with a setting."""

    scale: float = 1.0

    def __call__(self, *arguments):
        return make_pure_policy(init, lambda *x: [self.scale * output for output in apply(*x)], *arguments)


def recurrent(observation, distribution, critic):
    """A sum over the episode, which begins at the initial carry."""

    def apply_step(params, observation, carry):
        carry = {"sum": carry["sum"] + observation}
        return *apply(params, carry["sum"]), carry

    return make_pure_policy(
        *(init, apply_step, observation, distribution, critic),
        initial_carry={"sum": jnp.full(observation.shape, 0.5)},
        features=lambda params, observation, carry: carry["sum"] + observation,
    )


def test_a_function_a_path_and_a_frozen_dataclass_are_the_same_network():
    configs, x = [Config(network=network, **SMALL) for network in (linear, f"{__name__}:linear", Linear())], jnp.eye(4)
    results = [bits(config.policy.step(jax.jit(config.policy.init)(jax.random.key(0)), x, ())) for config in configs]
    assert results[0] == results[1] == results[2]
    assert configs[0] == Config(network=linear, **SMALL) and hash(configs[0]) == hash(Config(network=linear, **SMALL))
    assert configs[2] == Config(network=Linear(), **SMALL) != Config(network=Linear(2.0), **SMALL)
    by_function, by_path, by_fields = (describe(config)["network"] for config in configs)
    assert by_function["function"] == "linear" and by_path == {"path": f"{__name__}:linear"} | by_function
    assert by_fields["class"]["class"] == "Linear" and by_fields["scale"] == 1.0


def test_a_network_from_the_command_line_has_no_tuned_layers():
    flags = ["--environment", "PointRobot-misc", "--algorithm", "ppo"]
    assert parse(RunFlags, flags).config.network.recurrent == "gru"
    config = parse(RunFlags, [*flags, "--network", f"{__name__}:linear"]).config
    assert not config.policy.has_carry and config.num_epochs == 8, "other tuned settings stay"
    with pytest.raises(ConfigError, match="recurrent='mingru' has no effect on a custom network"):
        parse(RunFlags, [*flags, f"--network={__name__}:linear", "--recurrent", "mingru"])


def test_free_parameters_and_missing_critics():
    network = variant(init=lambda key, x: jnp.zeros((3, 1)), apply=lambda params, x: (x @ params, None))
    policy = Config(environment="Pendulum-v1", network=network, num_envs=4, algorithm="grpo").policy
    params = policy.init(jax.random.key(0))
    assert params["free"].shape == (1,) and set(params) == {"network", "free"}
    assert (policy.distribution.num_outputs, policy.distribution.num_parameters) == (1, 2) and not policy.has_critic
    parameters, value, _ = policy.step({**params, "free": jnp.array([7.0])}, jnp.ones((4, 3)), ())
    assert parameters.shape == (4, 2) and (parameters[:, 1] == 7.0).all() and value is None


class Normed(nn.Module):
    num_outputs: int

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(x)
        return nn.Dense(self.num_outputs)(x), nn.Dense(1)(x)[:, 0]


def normed(trainable=None):
    """The module as pure functions."""
    functions = Normed(2).init, Normed(2).apply
    return lambda *arguments: make_pure_policy(*functions, *arguments)._replace(trainable=trainable)


REFUSED = [
        (Normed, "network/batch_stats/BatchNorm_0/mean, which is no parameter"),
        (Normed(2), "network/batch_stats/BatchNorm_0/mean, which is no parameter"),
        (normed(), "network/batch_stats/BatchNorm_0/mean, which is no parameter.*LayerNorm.*trainable"),
        (variant(apply=lambda p, x: (x @ p, x[:, 0])), r"float32\[4, 3\] instead of float32\[4, 2\].* \[N, 2\]"),
        (variant(apply=lambda p, x: ((x @ p[:, :2]).astype("bfloat16"), x[:, 0])), r"bfloat16\[4, 2\] instead of"),
        (variant(apply=lambda p, x: ((x @ p)[:, :2], x[:, :1])), r"values float32\[4, 1\] instead of float32\[4\]"),
        (variant(apply=lambda p, x: ((x @ p)[:, :2], None)), "gives no value, but the algorithm has a critic"),
        (variant(apply=lambda p, x: (x @ p)[:, :2]), "step fails with ValueError.*; apply gives outputs, value"),
        (variant(init=lambda key, x: {}), "init gives {}, which holds no arrays"),
        (variant(init=lambda key, x: {"w": init(key, x), "key": key}), "network/key of type key.* floating-point"),
        (variant(init=lambda key, x: {"w": jnp.tanh}), "init fails with TypeError"),
        (variant(apply=lambda p, x, c: (*apply(p, x), c + 1.5), initial_carry=0), r"int32\[4\], but after it float32"),
        (lambda observation, distribution: None, "fails with TypeError.* takes 2 positional arguments"),
        (lambda *arguments: None, "gives NoneType, but must give a Policy"),
        ("grpo_jax:nothing", "'grpo_jax' has no 'nothing'"),
        (7, "network=7 must be a name"),
        (dataclasses.make_dataclass("Unfrozen", [], namespace={"__call__": linear})(), "cannot be hashed"),
]  # fmt: skip


def test_errors_say_what_is_wrong_with_a_network():
    for network, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            check(Config(network=network, **SMALL))
    # Statistics that stay as they are:
    check(Config(network=normed(lambda path: "batch_stats" not in path), **SMALL))


def test_features_have_an_axis_of_their_own():
    algorithm = GRPO._replace(penalties=(lambda prediction, batch, hyperparams: prediction.features[..., 0],))
    fields = SMALL | {"algorithm": algorithm, "group_size": 2, "cut_episodes": True}
    with pytest.raises(ConfigError, match=r"features are float32\[1, 8\].* \[S, N, F\]"):
        check(Config(network=variant(features=lambda params, x: x[:, 0]), **fields))
    check(Config(network=variant(features=lambda params, x: x @ params), **fields))


def over_actions(space):
    return categorical(space.num_actions)


REFUSED_CHANGES = [
    ({"log_prob": lambda parameters, action: action}, r"log_prob gives int32\[3\] instead of float32\[3\]"),
    ({"entropy": lambda parameters: parameters}, r"entropy gives float32\[3, 2\]"),
    ({"mode": lambda parameters: parameters}, r"mode gives float32\[3, 2\] instead of int32\[3\]"),
    ({"to_environment": lambda action: action[:, None]}, r"to_environment gives int32\[3, 1\]"),
    ({"num_free": 3}, "num_free=3"),
    ({"kl": lambda parameters: 0.0}, "kl fails with TypeError"),
]


def test_a_distribution_by_its_path_and_what_is_wrong_with_others():
    for change, message in REFUSED_CHANGES:
        with pytest.raises(ConfigError, match=message):
            check(Config(action_distribution=lambda space, change=change: categorical(2)._replace(**change), **SMALL))
    for family in (f"{__name__}:over_actions", over_actions):
        assert Config(action_distribution=family, **SMALL).policy.distribution.num_outputs == 2
    with pytest.raises(ConfigError, match="must give a Distribution"):
        Config(action_distribution=lambda space: space, **SMALL)


LIBRARIES = {"nnx": "flax", "equinox": "equinox"}


def run_page(page):
    """What the page defines, without blocks whose libraries are missing."""
    found = {"__name__": "my_networks"}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        if all(map(importlib.util.find_spec, re.findall(r"^import (\w+)", block, flags=re.MULTILINE))):
            exec(compile(block, "networks.md", "exec"), found)
    return found


@pytest.fixture(scope="module")
def names():
    """The same, without a train step."""
    return run_page(re.sub(r"^state.*\n", "", PAGE, flags=re.MULTILINE))


@pytest.mark.slow
def test_the_page_runs():
    assert run_page(PAGE)["metrics"]["environment/steps"] > 0


def test_the_page_configures_policies(names):
    assert names["recurrent"].policy.has_carry
    assert names["pendulum"].policy.distribution.num_outputs == 2


LIGHT = ["linen", "recurrent"]


@pytest.mark.parametrize("library", [*LIGHT, *(pytest.param(name, marks=pytest.mark.slow) for name in LIBRARIES)])
def test_a_sequence_is_its_steps(names, library):
    pytest.importorskip(LIBRARIES.get(library, "flax"))
    network = recurrent if library == "recurrent" else names[f"{library}_network"]
    policy = Config(network=network, **SMALL).policy
    params, is_first = jax.jit(policy.init)(jax.random.key(0)), jnp.array([[1, 0], [0, 0], [0, 1], [1, 0]], bool)
    observations = jax.random.normal(jax.random.key(1), (4, 2, 4))
    fresh = policy.initial_carry(params, 2)
    carry = before = jax.tree.map(jnp.ones_like, fresh)
    parameters, values = jax.jit(policy.sequence)(params, observations, before, is_first)
    step = jax.jit(policy.step)
    for t in range(4):
        carry = jax.tree.map(lambda new, old, t=t: jnp.where(is_first[t][:, None], new, old), fresh, carry)
        step_parameters, value, carry = step(params, observations[t], carry)
        np.testing.assert_allclose(parameters[t], step_parameters, atol=1e-5)
        np.testing.assert_allclose(values[t], value, atol=1e-5)
    assert bits(params) != bits(jax.jit(policy.init)(jax.random.key(1)))
    if library == "recurrent":
        assert policy.has_carry and (fresh["sum"] == 0.5).all()
        features = policy.features(params, observations, before, is_first)
        np.testing.assert_allclose(features[3], carry["sum"], atol=1e-6)


def test_beta_has_the_numbers_of_scipy(names):
    low, high = (-2.0, 0.0), (2.0, 1.0)
    distribution = compiled(names["beta"](Box(low, high)))
    parameters, other = 2.0 * jax.random.normal(jax.random.key(0), (2, 5, 4))

    def frozen(parameters):
        a, b = np.split(1.0 + np.logaddexp(0.0, np.asarray(parameters, np.float64)), 2, axis=-1)
        return scipy.stats.beta(a, b, loc=low, scale=np.subtract(high, low))

    oracle, other_oracle = frozen(parameters), frozen(other)
    actions = np.array(low) + np.subtract(high, low) * np.random.default_rng(0).uniform(0.01, 0.99, (5, 2))
    log_prob = distribution.log_prob(parameters, jnp.asarray(actions, jnp.float32))
    np.testing.assert_allclose(log_prob, oracle.logpdf(actions).sum(-1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(distribution.entropy(parameters), oracle.entropy().sum(-1), rtol=1e-4, atol=1e-4)
    nodes = np.linspace(low, high, 20_001)[1:-1, None]
    density = oracle.pdf(nodes)
    kl = (density * (oracle.logpdf(nodes) - other_oracle.logpdf(nodes))).sum(0) * (nodes[1, 0] - nodes[0, 0])
    np.testing.assert_allclose(distribution.kl(parameters, other), kl.sum(-1), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(distribution.kl(parameters, parameters), 0.0, atol=1e-5)
    highest = nodes[density.argmax(0), 0, np.arange(2)]
    np.testing.assert_allclose(distribution.mode(parameters), highest, atol=1e-3)

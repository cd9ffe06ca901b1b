"""The networks and the distribution of docs/networks.md: numbers, learning, and runs that are resumed."""

import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from compilation import compiled
from probes import bits

from grpo_jax import Config
from grpo_jax.environments import Box

PAGE = (Path(__file__).parents[2] / "docs" / "networks.md").read_text(encoding="utf-8")
LIBRARIES = {"linen": "flax", "nnx": "flax", "equinox": "equinox"}
each_library = pytest.mark.parametrize(
    "library", [name if name == "linen" else pytest.param(name, marks=pytest.mark.slow) for name in LIBRARIES]
)


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


@pytest.fixture
def network(names, library):
    pytest.importorskip(LIBRARIES[library])
    return names[f"{library}_network"]


@pytest.mark.slow
def test_the_page_runs():
    assert run_page(PAGE)["metrics"]["environment/steps"] > 0


def test_the_page_configures_policies(names):
    assert names["recurrent"].policy.has_carry
    assert names["pendulum"].policy.distribution.num_outputs == 2


@each_library
def test_a_sequence_is_its_steps(network):
    policy = Config(algorithm="ppo", network=network).policy
    params = jax.jit(policy.init)(jax.random.key(0))
    observations = jax.random.normal(jax.random.key(1), (2, 3, 4))
    parameters, values = jax.jit(policy.sequence)(params, observations, (), jnp.zeros((2, 3), bool))
    step = jax.jit(policy.step)
    for t in range(2):
        step_parameters, value, _ = step(params, observations[t], ())
        np.testing.assert_allclose(parameters[t], step_parameters, atol=1e-5)
        np.testing.assert_allclose(values[t], value, atol=1e-5)
    assert bits(params) != bits(jax.jit(policy.init)(jax.random.key(1)))


# --- the Beta distribution -------------------------------------------------------------------------------------------

LOW, HIGH = (-2.0, 0.0), (2.0, 1.0)


@pytest.fixture(scope="module")
def beta(names):
    """The distribution, parameters `[5, 4]` and others, and for each the frozen distributions of scipy."""
    distribution = compiled(names["beta"](Box(LOW, HIGH)))
    both = 2.0 * jax.random.normal(jax.random.key(0), (2, 5, 4))

    def frozen(parameters):
        a, b = np.split(1.0 + np.logaddexp(0.0, np.asarray(parameters, np.float64)), 2, axis=-1)
        return scipy.stats.beta(a, b, loc=LOW, scale=np.subtract(HIGH, LOW))

    return distribution, *both, *map(frozen, both)


def test_beta_has_the_numbers_of_scipy(beta):
    distribution, parameters, other, oracle, other_oracle = beta
    actions = np.array(LOW) + np.subtract(HIGH, LOW) * np.random.default_rng(0).uniform(0.01, 0.99, (5, 2))
    log_prob = distribution.log_prob(parameters, jnp.asarray(actions, jnp.float32))
    np.testing.assert_allclose(log_prob, oracle.logpdf(actions).sum(-1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(distribution.entropy(parameters), oracle.entropy().sum(-1), rtol=1e-4, atol=1e-4)
    nodes = np.linspace(LOW, HIGH, 20_001)[1:-1, None]
    density = oracle.pdf(nodes)
    kl = (density * (oracle.logpdf(nodes) - other_oracle.logpdf(nodes))).sum(0) * (nodes[1, 0] - nodes[0, 0])
    np.testing.assert_allclose(distribution.kl(parameters, other), kl.sum(-1), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(distribution.kl(parameters, parameters), 0.0, atol=1e-5)
    highest = nodes[density.argmax(0), 0, np.arange(2)]
    np.testing.assert_allclose(distribution.mode(parameters), highest, atol=1e-3)

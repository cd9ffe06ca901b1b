"""The small processes are what they say, and the estimators of their gradients are measured right."""

import jax
import numpy as np
import pytest

from experiments.harness import tabular
from grpo_jax import Config
from grpo_jax.policies import MLP


def known(make_process):
    process = make_process()
    policy = Config(environment=process, network=MLP((), actor_init_gain=1.0), num_envs=32).policy
    params = jax.jit(policy.init)(jax.random.key(0))
    return process, policy, params, *exact_gradient(process, policy, params)


exact_gradient = jax.jit(tabular.exact_gradient, static_argnums=(0, 1))


@pytest.fixture(scope="module", params=tabular.PROCESSES, ids=lambda make: make.__name__)
def process(request):
    return known(request.param)


def expected_return(process, logits):
    """By following the distribution over states for 400 steps, in float64."""
    transitions, rewards, starts = (np.array(part) for part in (process.transitions, process.rewards, process.starts))
    policy = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    onward = np.concatenate([transitions, 1 - transitions.sum(-1, keepdims=True)], axis=-1)
    at, total, length = starts, 0.0, 0.0
    for _ in range(400):
        total += np.einsum("s,sa,sat,sat->", at, policy, onward, rewards)
        length += at.sum()
        at = np.einsum("s,sa,sat->t", at, policy, transitions)
    return total, length


def test_the_gradient_is_that_of_finite_differences(process):
    process, policy, params, gradient, exact = process
    (layer,) = params["actor"].values()
    logits = np.asarray(layer["kernel"], np.float64) + np.asarray(layer["bias"], np.float64)
    total, length = expected_return(process, logits)
    np.testing.assert_allclose(exact.expected_return, total, rtol=1e-4)
    np.testing.assert_allclose(exact.episode_length, length, rtol=1e-4)
    (ours,) = gradient["actor"].values()
    for s, a in np.ndindex(logits.shape):
        step = np.zeros_like(logits)
        step[s, a] = 1e-5
        slope = (expected_return(process, logits + step)[0] - expected_return(process, logits - step)[0]) / 2e-5
        np.testing.assert_allclose(ours["kernel"][s, a], slope, rtol=2e-3, atol=1e-5)

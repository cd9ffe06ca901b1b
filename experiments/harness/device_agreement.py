"""Whether an accelerator computes and trains as a CPU does, for `experiments.gpu_hour`.

Outputs and gradients of networks, by the plans of a GPU, are compared with float64 numbers of the CPU. A train step of
a few algorithms runs on the CPU and on the attached accelerator, from the same state, with the accelerator's execution
plan and matrix products in float32; once as it is used there, on Hopper with its kernel. Sampled actions hang on the
last bits of the logits: a few may differ, and then so do the episodes that follow from them. What has to agree is what
the step has learnt.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import Config, Hyperparams, make_init, make_train_step
from grpo_jax.errors import ConfigError
from grpo_jax.policies import MLP, Transformer

PLANS_OF_A_GPU = "hopper", "gpu"
NETWORKS = {  # the environment, the network, samples, and seeds
    "1,000 samples of CartPole": ("CartPole-v1", MLP(), 1000, 1),
    "65,536 samples of CartPole": ("CartPole-v1", MLP(), 65536, 1),
    "65,536 samples of Pendulum, ReLU": ("Pendulum-v1", MLP((128,), "relu"), 65536, 1),
    "1,000 samples of Breakout, 32 units": ("Breakout-MinAtar", MLP((32, 32)), 1000, 1),
    "128 samples of CartPole, 300 seeds": ("CartPole-v1", MLP(), 128, 300),
}
CASES: dict[str, dict[str, Any]] = {
    "PPO, CartPole": {"environment": "CartPole-v1", "algorithm": "ppo", "num_steps": 32},
    "PPO, CartPole, plan of the device": {"environment": "CartPole-v1", "algorithm": "ppo", "num_steps": 32}
    | {"execution_plan": "auto"},
    "GRPO, CartPole": {"environment": "CartPole-v1", "algorithm": "grpo", "group_size": 4},
    "PPO, Pendulum, GRU": {"environment": "Pendulum-v1", "algorithm": "ppo", "num_steps": 32}
    | {"network": MLP(recurrent="gru")},
    "PPO, Breakout": {"environment": "Breakout-MinAtar", "algorithm": "ppo", "num_steps": 16},
    # Of one token, so that some of the first completions are right.
    "GRPO, tokens": {"environment": "tokens:sort-1", "algorithm": "grpo", "num_envs": 1024, "group_size": 4}
    | {"network": Transformer(width=32, num_layers=1, num_heads=2)},
}


def network_errors(name: str) -> dict[str, float]:
    """Largest errors of outputs and gradients against float64, of each plan, as parts of an array's largest entry."""
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        wanted = [np.asarray(leaf) for leaf in outputs_and_gradients(*NETWORKS[name], "cpu", np.float64)]

    def error(found, wanted):
        return float(np.abs(np.float64(found) - wanted).max() / np.abs(wanted).max())

    found = {}
    for plan in PLANS_OF_A_GPU:
        with contextlib.suppress(ConfigError):  # "hopper", where the GPU is another one
            found[plan] = outputs_and_gradients(*NETWORKS[name], plan, np.float32)
    return {plan: max(map(error, leaves, wanted)) for plan, leaves in found.items()}


def outputs_and_gradients(
    environment: str, network: MLP, num_samples: int, num_seeds: int, plan: str, dtype: Any
) -> list[jax.Array]:
    """What an actor and its critic make of random numbers, which are the same for all plans and dtypes."""
    config = Config(environment=environment, algorithm="ppo", network=network, execution_plan=plan)
    policy, rng = config.policy, np.random.default_rng(0)

    def draw(leaf):
        numbers = rng.standard_normal((num_seeds, *leaf.shape)) / max(leaf.shape[:1], default=1) ** 0.5
        return numbers.astype(np.float32).astype(dtype)

    def outputs(params, observations):
        """As in a rollout, and as in an update."""
        carry, is_first = policy.initial_carry(params, num_samples), jnp.zeros((1, num_samples), bool)
        return policy.step(params, observations, carry)[:2], policy.sequence(
            params, observations[None], carry, is_first
        )

    def both(params, observations, gradients):
        found, pull_back = jax.vjp(lambda params: outputs(params, observations), params)
        return found, pull_back(gradients)

    observations = jax.ShapeDtypeStruct((num_samples, *config.env.observation.shape), np.float32)
    shapes = jax.eval_shape(policy.init, jax.random.key(0)), observations
    inputs = jax.tree.map(draw, (*shapes, jax.eval_shape(outputs, *shapes)))
    return jax.tree.leaves(jax.jit(jax.vmap(both))(*inputs))


def step_differences(name: str) -> dict[str, float]:
    """The largest relative difference of a metric, and differences of parameters: between devices, and by the step."""
    size = {"num_envs": 16, "num_epochs": 2, "num_minibatches": 4}
    config, results = Config(**{"execution_plan": jax.default_backend()} | size | CASES[name]), []
    precision = None if config.plan.hopper_kernels else "float32"  # which would turn the kernel off
    for device in (jax.devices("cpu")[0], jax.devices()[0]):
        with jax.default_device(device), jax.default_matmul_precision(precision):
            state = jax.jit(make_init(config))(jax.random.key(0), Hyperparams())
            after, metrics = jax.jit(make_train_step(config))(state)
            results.append(jax.device_get((state.params, after.params, metrics)))
    (start, there, expected), (_, here, metrics) = results
    return {
        "metrics": max(
            float(np.nanmax(np.abs(value - expected[name]) / (np.abs(expected[name]) + 1e-3), initial=0.0))
            for name, value in metrics.items()
        ),
        "parameters": largest_difference(here, there),
        "step": largest_difference(there, start),
    }


def largest_difference(tree, other) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))

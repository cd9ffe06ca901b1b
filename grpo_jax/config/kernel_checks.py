"""Kernels that are lowered for a GPU when a `Config` is made, so that what they cannot do is an error there."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from grpo_jax.config.dry_run import make_update
from grpo_jax.config.fields import Fields
from grpo_jax.environments import group_parameters
from grpo_jax.errors import ConfigError
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.rollouts.rollout_kernel import kernel_unroll
from grpo_jax.updates.gradient_kernel import make_kernel_gradient
from grpo_jax.updates.minibatches import make_minibatch

_GPU = AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")


def check_kernels(config: Fields) -> None:
    """Raises ConfigError if a kernel of the execution plan cannot serve the environment, policy or algorithm."""
    algorithm = config.algorithm
    if config.plan.rollout_kernel:
        if algorithm.greedy_member or algorithm.start.all_actions or algorithm.num_branches:
            raise ConfigError(
                "rollout_kernel=True samples every action and keeps no states, but this algorithm has greedy_member, "
                "all_actions or num_branches; leave out one of the two"
            )
        _lower("rollout_kernel", config, _make_rollout(config))
    if config.plan.gradient_kernel:
        if config.num_microbatches is not None:
            raise ConfigError(
                f"gradient_kernel=True divides minibatches by itself, but num_microbatches={config.num_microbatches}; "
                "leave out one of the two"
            )
        _lower("gradient_kernel", config, make_update(config, _first_gradient))


def _lower(field, config, function):
    """Lowers a function of a key: Triton's rules need no GPU, but the name of one."""
    key = jax.random.key(0)
    try:
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=_GPU)):
            jax.jit(function).trace(key).lower(lowering_platforms=("cuda",))
    except (NotImplementedError, TypeError, ValueError) as error:
        reason = str(error).split(". Please file an issue")[0]
        raise ConfigError(
            f"{field}=True cannot serve {config.env.name!r} with this policy and algorithm: {reason}; use a plan "
            "without this kernel, such as execution_plan='gpu'"
        ) from error


def _make_rollout(config):
    def rollout(key):
        params = config.policy.init(key)
        environment_params = group_parameters(config.env, None, config.num_groups, config.group_size)
        simulator = Simulator(config.env, config.policy, params, starts_per_rollout=config.starts_per_rollout)
        return kernel_unroll(
            simulator,
            simulator.reset(environment_params, key, config.num_envs),
            key,
            num_steps=config.window_steps,
            auto_reset=config.algorithm.start.auto_reset,
            keep_final=config.algorithm.baseline is not None,
        )

    return rollout


def _first_gradient(algorithm, policy, params, batch, indices, hyperparams, **options):
    minibatch = make_minibatch(algorithm, batch, indices)
    return make_kernel_gradient(algorithm, policy, batch, hyperparams)(params, minibatch)

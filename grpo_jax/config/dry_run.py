"""An update on shapes only: slots that do not fit together raise an error when the `Config` is made."""

import functools

import jax
import jax.numpy as jnp

from grpo_jax.config.environment_checks import empty_reward_parts
from grpo_jax.config.fields import Fields
from grpo_jax.environments import Environment
from grpo_jax.errors import ConfigError
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.policies import bind_frozen, partition
from grpo_jax.policies.scoring import bind_reference
from grpo_jax.rollouts.finals import num_finals
from grpo_jax.types import Batch, PyTree, Trajectory
from grpo_jax.updates.batch import make_batch
from grpo_jax.updates.minibatches import minibatch_gradient


class AnyHyperparams(Hyperparams):
    """The defaults, and a number for each coefficient that a variant's own subclass may add."""

    def __getattr__(self, name: str) -> float:
        if name.startswith("_"):
            raise AttributeError(name)
        return 1.0


def check_slots(config: Fields) -> None:
    """Runs the slots on shapes only; raises ConfigError with the error of a slot that does not fit."""
    try:
        jax.eval_shape(functools.partial(_first_gradient, config), jax.random.key(0))
        _check_baseline_state(config)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"the algorithm and this configuration do not fit: {error}") from error


def _first_gradient(config: Fields, key: jax.Array) -> PyTree:
    """Loss, metrics and gradient for the first minibatch of a trajectory of zeros."""
    policy, hyperparams = config.policy, AnyHyperparams()
    params = policy.init(key)
    batch, _ = trial_batch(config, params, hyperparams)
    params, frozen = partition(policy, params)
    bound = bind_reference(bind_frozen(policy, frozen), params)
    indices = jnp.arange(batch.mask.shape[1] // config.num_minibatches)
    return minibatch_gradient(
        *(config.algorithm, bound, params, batch, indices, hyperparams),
        num_microbatches=config.num_microbatches,
        plan=config.plan,
    )


def initial_baseline(config: Fields) -> PyTree:
    """The state of a stateful baseline before the first rollout: zeros; None for an algorithm without one."""
    if not config.algorithm.stateful_baseline:
        return None
    return jax.tree.map(jnp.zeros_like, _state_after_a_rollout(config, None))


def _state_after_a_rollout(config, before):
    """The shapes of a baseline's state."""

    def after(key, before):
        return trial_batch(config, config.policy.init(key), AnyHyperparams(), before)[1]

    return jax.eval_shape(after, jax.random.key(0), before)


def _check_baseline_state(config):
    """Raises ValueError if the state of a stateful baseline would change its type, which a loop cannot carry."""
    if not config.algorithm.stateful_baseline:
        return
    first = _state_after_a_rollout(config, None)
    second = _state_after_a_rollout(config, first)
    types = [jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", state) for state in (first, second)]
    if types[0] != types[1]:
        raise ValueError(
            f"the slot 'baseline' returns a state of {types[0]} after one rollout, but of {types[1]} after another; "
            "each must have the same structure, shapes and dtypes"
        )


def trial_batch(
    config: Fields, params: PyTree, hyperparams: Hyperparams, baseline_state: PyTree = None
) -> tuple[Batch, PyTree]:
    """The results of `make_batch` for a trajectory of zeros."""
    return make_batch(
        *(config.algorithm, config.policy, params, _trajectory(config, params), params, hyperparams, config.group_size),
        num_windows=config.num_windows,
        share_prompts=config.share_prompts,
        shuffle_blocks=config.shuffle_blocks,
        limit_terminates=config.env.limit_terminates,
        baseline_state=baseline_state,
    )


def _trajectory(config: Fields, params) -> Trajectory:
    """A trajectory of zeros in the shapes of this run."""
    shape = (config.window_steps, config.num_training_groups * config.group_size)
    real, flag, count = jnp.zeros(shape), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32)
    observation = jax.tree.map(lambda leaf: jnp.zeros(shape + leaf.shape, leaf.dtype), config.env.observation)
    carry = config.policy.initial_carry(params, shape[1], empty_prompts(config.env, shape[1]))
    distribution, value = config.policy.sequence(params, observation, carry, flag)
    action = config.policy.distribution.mode(distribution)
    masked = config.env.action_mask is not None or config.truncate_sampling
    action_mask = jnp.ones(distribution.shape, bool) if masked else None
    if config.logits_chunk is not None:
        distribution = None
    carry = jax.tree.map(lambda leaf: leaf[None], config.policy.sequence_carry(carry))
    trajectory = Trajectory(
        *(observation, action, real, flag, flag, flag, real, distribution, value, value, real, count, real, carry),
        action_mask,
    )
    if config.algorithm.greedy_member:
        trajectory = trajectory._replace(greedy=flag)
    if config.env.imposed is not None:
        trajectory = trajectory._replace(imposed=flag)
    if config.algorithm.start.all_actions:
        trajectory = trajectory._replace(given=flag)
    if config.algorithm.num_branches:
        trajectory = trajectory._replace(value=real, next_value=real)
    if config.algorithm.baseline is not None:
        num_final = num_finals(config.env, config.window_steps, config.algorithm.start.auto_reset)
        final = jax.tree.map(lambda leaf: jnp.zeros((num_final, *leaf.shape[1:]), leaf.dtype), (observation, carry))
        final_value = None if value is None else jnp.zeros((num_final, shape[1]))
        trajectory = trajectory._replace(final_observation=final[0], final_carry=final[1], final_value=final_value)
    if config.env.task is not None or config.env.outcome is not None:
        trajectory = trajectory._replace(reward_parts=empty_reward_parts(config, shape))
    return trajectory


def empty_prompts(env: Environment, num_envs: int) -> jax.Array | None:
    """Prompts of zeros in the shape of the environment's; None without prompts."""
    if env.prompt is None:
        return None
    prompt = jax.eval_shape(lambda key: env.prompt(env.reset(key, env.params)[0], env.params), jax.random.key(0))
    return jnp.zeros((num_envs, *prompt.shape), prompt.dtype)

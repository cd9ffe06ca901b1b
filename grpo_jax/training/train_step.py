"""The train step, whole: one iteration, a pure function from state to state."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.config.acting import acting_policy
from grpo_jax.config.config import Config
from grpo_jax.config.dry_run import initial_baseline
from grpo_jax.environments import EnvParams, group_parameters
from grpo_jax.errors import ConfigError
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.policies import partition
from grpo_jax.policies.normalization import initial_normalizer, merge_rollout, scaled_rewards
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.training import budget
from grpo_jax.training.experience import collect, most_varied_groups
from grpo_jax.training.metrics import rollout_metrics
from grpo_jax.types import Metrics, PyTree, TrainState
from grpo_jax.updates.batch import make_batch
from grpo_jax.updates.epochs import Learner, update_epochs
from grpo_jax.updates.optimizers import make_optimizer
from grpo_jax.updates.schedules import learning_rates


def make_init(config: Config) -> Callable[..., TrainState]:
    """`init(key, hyperparams, env_params=None, params=None) -> TrainState`, pure: `vmap` it over all four.

    `env_params` are parameters of the environment by name, instead of the config's: one value for all groups, or an
    array `[num_groups]`, one for each. Rollouts keep them, and `evaluate` plays under them. `params` are the policy's,
    and those of a reference policy, instead of random ones.
    """

    def init(
        key: jax.Array, hyperparams: Hyperparams, env_params: EnvParams = None, params: PyTree = None
    ) -> TrainState:
        hyperparams.check()
        # Copies, and no array twice: the state is to be donated, and the caller's arrays must outlive it.
        hyperparams = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), hyperparams)
        if any(leaf.ndim for leaf in jax.tree.leaves(hyperparams)):
            raise ConfigError("init makes one state, of scalar hyperparameters; for arrays of them use jax.vmap(init)")
        key, key_params, key_reset = jax.random.split(key, 3)
        params = config.policy.init(key_params) if params is None else jax.tree.map(jnp.array, params)
        trained, _ = partition(config.policy, params)
        environment_params = group_parameters(config.env, env_params, config.num_groups, config.group_size)
        simulator = Simulator(config.env, config.policy, params)
        rollout = simulator.reset(environment_params, key_reset, config.num_envs)
        rates = learning_rates(config.schedule, hyperparams, progress=0.0)
        optimizer = make_optimizer(config.optimizer, hyperparams, rates, config.moments_dtype)
        return TrainState(
            params=params,
            reference_params=None if config.algorithm.reference is None else jax.tree.map(jnp.copy, trained),
            optimizer=jax.tree.map(jnp.copy, optimizer.init(trained)),
            rollout=config.algorithm.start.keep(rollout, rollout),
            normalizer=initial_normalizer(
                rollout.observation, observations=config.normalize_observations, rewards=config.normalize_rewards
            ),
            baseline=initial_baseline(config),
            key=key,
            kl_coef=jnp.array(hyperparams.kl_coef),
            iteration=jnp.zeros((), jnp.int32),
            steps=budget.zero(),
            last_steps=jnp.array(config.steps_per_iteration, jnp.int32),
            episodes=budget.zero(),
            hyperparams=hyperparams,
        )

    return init


def make_train_step(config: Config) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
    """`train_step(state) -> (state, metrics)`: one iteration, pure. Compose it with `jit`, `vmap` and `lax.scan`."""
    algorithm = config.algorithm

    def train_step(state: TrainState) -> tuple[TrainState, Metrics]:
        hyperparams = state.hyperparams
        if algorithm.kl_controller is not None:
            hyperparams = hyperparams.replace(kl_coef=state.kl_coef)
        progress = budget.share_done(state, config.steps_per_iteration)
        key, key_start, key_rollout, key_update = jax.random.split(state.key, 4)
        # The statistics change only after the update: it must see the observations as the behaviour policy saw them.
        policy = acting_policy(config, state.normalizer, hyperparams)

        simulator = Simulator(
            config.env, policy, state.params, hyperparams.discount, config.plan, config.starts_per_rollout
        )
        rollout, trajectory = collect(config, simulator, state.rollout, key_start, key_rollout, hyperparams.reward_clip)
        normalizer = merge_rollout(state.normalizer, trajectory)
        kept = scaled_rewards(normalizer, trajectory, hyperparams.reward_clip)
        if config.num_kept_groups is not None:
            kept = most_varied_groups(kept, config.group_size, config.num_kept_groups)
        batch, baseline = make_batch(
            algorithm,
            policy,
            state.params,
            kept,
            state.reference_params,
            hyperparams,
            config.group_size,
            num_windows=config.num_windows,
            share_prompts=config.share_prompts,
            shuffle_blocks=config.shuffle_blocks,
            limit_terminates=config.env.limit_terminates,
            baseline_state=state.baseline,
        )

        rates = learning_rates(config.schedule, hyperparams, progress)
        learner, update_metrics = update_epochs(
            algorithm,
            policy,
            make_optimizer(config.optimizer, hyperparams, rates, config.moments_dtype),
            Learner(state.params, state.optimizer),
            batch,
            hyperparams,
            key_update,
            reference_params=state.reference_params,
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
            num_microbatches=config.num_microbatches,
            plan=config.plan,
        )

        iteration = state.iteration + 1
        reference_params = state.reference_params
        if algorithm.reference is not None:
            trained, _ = partition(policy, learner.params)
            reference_params = algorithm.reference(reference_params, trained, iteration, hyperparams)

        metrics = rollout_metrics(trajectory, batch, config.group_size) | update_metrics
        metrics["environment/steps"] += config.trunk_steps
        metrics["optim/learning_rate"] = rates.default
        if rates.critic is not None:
            metrics["optim/critic_learning_rate"] = rates.critic

        kl_coef = state.kl_coef
        if algorithm.kl_controller is not None:
            kl = metrics["policy/kl_behaviour" if algorithm.reference is None else "policy/kl_reference"]
            kl_coef = algorithm.kl_controller(kl_coef, kl, hyperparams)
            metrics["policy/kl_coef"] = kl_coef
        state = TrainState(
            params=learner.params,
            reference_params=reference_params,
            optimizer=learner.optimizer,
            rollout=rollout,
            normalizer=normalizer,
            baseline=baseline,
            key=key,
            kl_coef=kl_coef,
            iteration=iteration,
            steps=budget.add(state.steps, metrics["environment/steps"], config.steps_per_iteration),
            last_steps=metrics["environment/steps"].astype(jnp.int32),
            episodes=budget.add(state.episodes, jnp.sum(trajectory.ended), config.steps_per_iteration),
            hyperparams=state.hyperparams,
        )
        return state, metrics

    return train_step

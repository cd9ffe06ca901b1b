"""The train step, whole: one iteration, a pure function from state to state."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.config import Config, behaviour_policy, kept_with
from grpo_jax.environments import EnvParams, group_parameters
from grpo_jax.errors import ConfigError
from grpo_jax.hyperparams import Hyperparams, completed
from grpo_jax.objectives.reductions import mean_or_missing, missing
from grpo_jax.policies import Policy, partition
from grpo_jax.policies.normalization import initial_normalizer, merge_rollout
from grpo_jax.rollouts.collect import collect, kept_groups
from grpo_jax.rollouts.outcomes import add_outcome, scaled_rewards
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.training.budget import fraction_done
from grpo_jax.training.metrics import own_metrics, rollout_metrics
from grpo_jax.types import Metrics, PyTree, RewardParts, RolloutState, StepCount, TrainState, Trajectory
from grpo_jax.updates.batch import make_batch
from grpo_jax.updates.epochs import update_epochs
from grpo_jax.updates.lengths import first_steps
from grpo_jax.updates.optimizers import make_flattening, make_optimizer
from grpo_jax.updates.schedules import scheduled_rate

ADVANTAGE = "advantage/by_environment"
"""The metric `[B]` of an outcome by the host: the mean advantage of each environment's steps; `missing()` where nothing
is learnt from them, and everywhere with `num_kept_groups`, which mixes them."""


class Played(NamedTuple):
    """What an iteration has played, from which it learns."""

    rollout: RolloutState  # after the last step, to keep for the next rollout
    trajectory: Trajectory  # [T, B]
    keys: jax.Array  # [2], of the state's: the next state's, and the update's


def make_train_step(config: Config) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
    """`train_step(state) -> (state, metrics)`: one iteration, pure. Compose it with `jit`, `vmap` and `lax.scan`.

    The same function for the same config, traced once: the checks' trace is the one that is compiled.

    Raises:
      ConfigError: the environment has a host side, which acts between the halves.
    """
    if config.env.host is not None:
        raise ConfigError(
            f"{config.env.name!r} is rewarded on the host, which no train step calls; use run, or make_play and "
            "make_learn in a loop of your own, as grpo_jax.training.host_side shows"
        )
    play, learn = make_play(config), make_learn(config)

    def train_step(state: TrainState) -> tuple[TrainState, Metrics]:
        return learn(state, play(state))

    return kept_with(config, ("train step",), lambda: jax.jit(train_step, inline=True))


def make_play(config: Config) -> Callable[[TrainState], Played]:
    """`play(state) -> played`: the rollout of an iteration, pure."""

    def play(state: TrainState) -> Played:
        key, key_start, key_rollout, key_update = jax.random.split(state.key, 4)
        policy = behaviour_policy(config, state.normalizer, _adapted(config, state))
        discount = state.hyperparams.discount
        simulator = Simulator(config.env, policy, state.params, discount, config.plan, config.starts_per_rollout)
        rollout, trajectory = collect(config, simulator, state.rollout, key_start, key_rollout)
        return Played(rollout, trajectory, jnp.stack([key, key_update]))

    return kept_with(config, ("play",), lambda: jax.jit(play, inline=True))


def make_learn(config: Config, length: int | None = None) -> Callable[..., tuple[TrainState, Metrics]]:
    """`learn(state, played, outcome=None) -> (state, metrics)`: the rest of an iteration, pure.

    `outcome` has the rewards that the host side of an environment gives for `played`: see `HostSide`. With it the
    metrics have `ADVANTAGE`. The networks read only the first `length` steps, all for None: no later step may be valid.
    Up to rounding, results do not depend on the length.
    """

    def learn(state: TrainState, played: Played, outcome: RewardParts | None = None) -> tuple[TrainState, Metrics]:
        hyperparams = _adapted(config, state)
        policy = behaviour_policy(config, state.normalizer, hyperparams)
        rollout, trajectory, (key, key_update) = played
        if outcome is not None:
            discount, auto_reset = state.hyperparams.discount, False
            rollout, trajectory = add_outcome(config.env, discount, auto_reset, rollout, trajectory, outcome)
        # Only the next iteration sees these statistics: the update must see observations as they were acted upon.
        normalizer = merge_rollout(state.normalizer, trajectory)

        # Compare: advantages, targets, masks and weights, which stay fixed during the epochs.
        kept = kept_groups(config, scaled_rewards(normalizer, trajectory, hyperparams.reward_clip))
        batch = make_batch(config, policy, state, kept, hyperparams, length)

        # Learn: epochs of minibatches.
        rate = scheduled_rate(config.schedule, hyperparams, fraction_done(state))
        optimizer = make_optimizer(config.optimizer, hyperparams, rate)
        read = first_steps(batch, length)
        learner, metrics = update_epochs(config, policy, optimizer, state, read, hyperparams, key_update)

        # Record: metrics, counts, and the state of the next iteration.
        metrics = rollout_metrics(config, trajectory, batch) | {"optim/learning_rate": rate} | metrics
        state = state.replace(
            params=learner.params,
            opt_state=learner.opt_state,
            rollout=rollout,
            normalizer=normalizer,
            key=key,
            iteration=state.iteration + 1,
            steps=state.steps.plus(metrics["environment/steps"]),
            last_steps=metrics["environment/steps"].astype(jnp.int32),
            episodes=state.episodes.plus(jnp.sum(trajectory.ended)),
        )
        state, metrics = _adapt(config, policy, state, metrics)
        metrics |= own_metrics(config, trajectory, batch, hyperparams, metrics)
        if outcome is not None:
            advantage, mask = (each.reshape(len(trajectory.valid), -1) for each in (batch.advantage, batch.mask))
            means = mean_or_missing(advantage, mask, axis=0)
            metrics[ADVANTAGE] = means if config.num_kept_groups is None else jnp.full(config.num_envs, missing())
        return state, metrics

    return kept_with(config, ("learn", length), lambda: jax.jit(learn, inline=True))


def _adapted(config: Config, state: TrainState) -> Hyperparams:
    """The hyperparameters, with the coefficients that controllers have set."""
    hyperparams = state.hyperparams
    if config.algorithm.kl_controller is not None:
        hyperparams = hyperparams.replace(kl_coef=state.kl_coef)
    if config.algorithm.entropy_controller is not None:
        is_low = state.entropy <= hyperparams.entropy_target
        hyperparams = hyperparams.replace(entropy_coef=jnp.where(is_low, state.entropy_coef, 0.0))
    return hyperparams


def _adapt(config: Config, policy: Policy, state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
    """Moves what follows the policy from iteration to iteration: the reference policy and the coefficients."""
    algorithm, hyperparams = config.algorithm, _adapted(config, state)
    if algorithm.reference is not None:
        trained, _ = partition(policy, state.params)
        reference = algorithm.reference(state.reference_params, trained, state.iteration, hyperparams)
        state = state.replace(reference_params=reference)
    if algorithm.kl_controller is not None:
        kl = metrics["policy/kl_behaviour" if algorithm.reference is None else "policy/kl_reference"]
        state = state.replace(kl_coef=algorithm.kl_controller(state.kl_coef, kl, hyperparams))
        metrics = metrics | {"policy/kl_coef": state.kl_coef}
    if algorithm.entropy_controller is not None:
        entropy = metrics["policy/entropy"]
        coefficient = algorithm.entropy_controller(state.entropy_coef, entropy, hyperparams)
        # An iteration without an update has no entropy: the last one stays.
        last = jnp.where(jnp.isfinite(entropy), entropy, state.entropy).astype(jnp.float32)
        state = state.replace(entropy_coef=coefficient, entropy=last)
        metrics = metrics | {"policy/entropy_coef": coefficient}
    return state, metrics


def initial_state(
    config: Config, key: jax.Array, hyperparams: Hyperparams, env_params: EnvParams = None, params: PyTree = None
) -> TrainState:
    """The state before the first iteration: see `train.make_init`."""
    # Copies, and no array twice: the state is to be donated, and the caller's arrays must outlive it.
    hyperparams = completed(hyperparams, config.hyperparams_class)
    hyperparams = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), hyperparams)
    key, key_params, key_reset = jax.random.split(key, 3)
    params = config.policy.init(key_params) if params is None else jax.tree.map(jnp.array, params)
    trained, _ = partition(config.policy, params)
    environment_params = group_parameters(config.env, env_params, config.num_groups, config.group_size)
    rollout = Simulator(config.env, config.policy, params).reset(environment_params, key_reset, config.num_envs)
    optimizer = make_optimizer(config.optimizer, hyperparams, scheduled_rate(config.schedule, hyperparams, 0.0))
    flatten, _ = make_flattening(config, trained)

    def zero():
        return jnp.zeros((), jnp.int32)

    return TrainState(
        params=params,
        reference_params=None if config.algorithm.reference is None else jax.tree.map(jnp.copy, trained),
        opt_state=jax.tree.map(jnp.copy, optimizer.init(flatten(trained))),
        rollout=config.algorithm.start.keep(rollout, rollout),
        normalizer=initial_normalizer(
            rollout.observation, observations=config.normalize_observations, rewards=config.normalize_rewards
        ),
        key=key,
        kl_coef=jnp.array(hyperparams.kl_coef),
        entropy_coef=jnp.array(hyperparams.entropy_coef),
        entropy=jnp.full((), jnp.inf, jnp.float32),
        iteration=zero(),
        steps=StepCount(zero(), zero()),
        last_steps=jnp.array(config.steps_per_iteration, jnp.int32),
        episodes=StepCount(zero(), zero()),
        hyperparams=hyperparams,
    )

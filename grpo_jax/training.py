"""The train step, whole: a pure function from state to state; and `run`, which drives it to a budget."""

import functools
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grpo_jax import budget
from grpo_jax.collection import collect, most_varied_groups
from grpo_jax.config import Config
from grpo_jax.environments import EnvParams, parameters_of_groups, parameters_of_rows
from grpo_jax.errors import ConfigError, as_count
from grpo_jax.groups import one_carry_per_group, reset_groups
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.losses import explained_variance
from grpo_jax.memory import told_what_fits
from grpo_jax.normalization import initial_normalizer, learnt_rewards, merge_rollout
from grpo_jax.sampling import acting_policy
from grpo_jax.sharding import ENVS, lay_out, mesh_of_rows, over_rows, pad_rows, replicated, state_shardings
from grpo_jax.slots import episode_scores
from grpo_jax.types import Batch, Metrics, PyTree, TrainState, Trajectory
from grpo_jax.updates import Learner, learning_rate, make_batch, make_optimizer, update_epochs


def make_init(config: Config) -> Callable[..., TrainState]:
    """`init(key, hyperparams, env_params=None, params=None) -> TrainState`, pure: `vmap` it over all four.

    `env_params` are parameters of the environment by name, in place of the config's: one value for all groups, or an
    array `[num_groups]`, one for each. Rollouts keep them, and `evaluate` plays under them. `params` are the policy's,
    and those of a reference policy, in place of random ones.
    """

    def init(
        key: jax.Array, hyperparams: Hyperparams, env_params: EnvParams = None, params: PyTree = None
    ) -> TrainState:
        # Copies, and no array twice: the state is to be donated, and the caller's arrays must outlive it.
        hyperparams = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), hyperparams)
        if any(leaf.ndim for leaf in jax.tree.leaves(hyperparams)):
            raise ConfigError("init makes one state, of scalar hyperparameters; for arrays of them use jax.vmap(init)")
        key, key_params, key_reset = jax.random.split(key, 3)
        params = config.policy.init(key_params) if params is None else jax.tree.map(jnp.array, params)
        environment_params = parameters_of_groups(config.env, env_params, config.num_groups, config.group_size)
        rollout = reset_groups(config.policy, params, config.env, environment_params, key_reset, config.num_envs, 1)
        return TrainState(
            params=params,
            reference_params=None if config.algorithm.reference is None else jax.tree.map(jnp.copy, params),
            optimizer=make_optimizer(hyperparams, progress=0.0).init(params),
            rollout=config.algorithm.start.keep(rollout, rollout),
            normalizer=initial_normalizer(
                rollout.observation, observations=config.normalize_observations, rewards=config.normalize_rewards
            ),
            key=key,
            kl_coef=jnp.array(hyperparams.kl_coef),
            iteration=jnp.zeros((), jnp.int32),
            steps=budget.zero(),
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
        progress = budget.share(state.steps, config.steps_per_iteration, hyperparams.total_steps)
        key, key_start, key_rollout, key_update = jax.random.split(state.key, 4)
        # The same statistics throughout the iteration: the update sees what the behaviour policy saw.
        policy = acting_policy(config, state.normalizer, hyperparams)

        rollout, trajectory = collect(config, policy, state.params, state.rollout, hyperparams, key_start, key_rollout)
        normalizer = merge_rollout(state.normalizer, trajectory)
        learnt = trajectory
        if config.num_kept_groups is not None:
            learnt = most_varied_groups(learnt, config.group_size, config.num_kept_groups)
        if config.share_prompts:
            learnt = one_carry_per_group(learnt, config.group_size)
        learnt = learnt_rewards(normalizer, learnt, hyperparams.reward_clip)
        batch = make_batch(
            algorithm,
            policy,
            state.params,
            learnt,
            state.reference_params,
            hyperparams,
            config.group_size,
            config.num_windows,
        )

        learner, update_metrics = update_epochs(
            algorithm,
            policy,
            make_optimizer(hyperparams, progress),
            Learner(state.params, state.optimizer),
            batch,
            hyperparams,
            key_update,
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
            num_microbatches=config.num_microbatches,
        )

        iteration = state.iteration + 1
        reference_params = state.reference_params
        if algorithm.reference is not None:
            reference_params = algorithm.reference(reference_params, learner.params, iteration, hyperparams)

        metrics = rollout_metrics(trajectory, batch, config.group_size) | update_metrics
        metrics["environment/steps"] += config.lead_steps
        metrics["optim/learning_rate"] = learning_rate(hyperparams, progress)

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
            key=key,
            kl_coef=kl_coef,
            iteration=iteration,
            steps=budget.add(state.steps, metrics["environment/steps"], config.steps_per_iteration),
            episodes=budget.add(state.episodes, jnp.sum(trajectory.ended), config.steps_per_iteration),
            hyperparams=state.hyperparams,
        )
        return state, metrics

    return train_step


def rollout_metrics(trajectory: Trajectory, batch: Batch, group_size: int) -> Metrics:
    """What a rollout was like. Episodes count in the iteration they end in; NaN where none did."""
    ended = trajectory.ended
    count = jnp.sum(ended)
    nan_if_none = jnp.where(count > 0, 0.0, jnp.nan)
    returns, lengths = trajectory.episode_return, trajectory.episode_length.astype(jnp.float32)
    metrics = {
        "environment/steps": jnp.sum(trajectory.valid, dtype=jnp.int32),
        "episode/count": count.astype(jnp.float32),
        "episode/return_mean": jnp.mean(returns, where=ended),
        "episode/return_min": jnp.min(returns, where=ended, initial=jnp.inf) + nan_if_none,
        "episode/return_max": jnp.max(returns, where=ended, initial=-jnp.inf) + nan_if_none,
        "episode/length_mean": jnp.mean(lengths, where=ended),
        "episode/length_min": jnp.min(lengths, where=ended, initial=jnp.inf) + nan_if_none,
        "episode/length_max": jnp.max(lengths, where=ended, initial=-jnp.inf) + nan_if_none,
        "advantage/abs_mean": jnp.mean(jnp.abs(batch.advantage), where=batch.mask),
    }
    if group_size > 1:
        scores = episode_scores(trajectory, group_size)
        metrics["group/zero_variance_fraction"] = jnp.mean(jnp.all(scores == scores[:, :1], axis=1))
        metrics["group/score_std_mean"] = jnp.mean(jnp.std(scores, axis=1))
    if batch.value is not None:
        metrics["value/explained_variance"] = explained_variance(batch.value, batch.target, batch.mask)
    return metrics


MAX_CHUNK = 1000
"""Iterations from one report to the next, at most, of a run that episodes alone bound."""


class Chunk(NamedTuple):
    """Some iterations of a run, on the host; `R` rows (seeds × hyperparameters)."""

    metrics: dict[str, np.ndarray]  # each [n, R]; a row whose budget is spent has 0 environment/steps, else NaN
    steps: np.ndarray  # int64 [n, R] environment steps since the start of the run
    iteration: int  # of the first of the n
    seconds: float  # since training started


class Progress(NamedTuple):
    """Where a run stands between two chunks: all that it takes to go on, in this process or in another."""

    # Each leaf [R, ...], of several processes with rows that pad; the next chunk takes them: copy what is to be kept
    states: TrainState
    steps: np.ndarray  # int64 [R] environment steps made
    iteration: int  # iterations made by the row that made most
    seconds: float  # of training


class RunResult(NamedTuple):
    """What `run` returns; of a run that went on from elsewhere, the metrics and steps of its own iterations."""

    states: TrainState  # as in Progress
    metrics: dict[str, np.ndarray]  # each [num_iterations, R]; empty if there was nothing left to do
    steps: np.ndarray  # int64 [num_iterations, R]
    compile_seconds: float
    train_seconds: float  # with those of `start`


def check_mesh(config: Config, mesh: Mesh) -> None:
    """Raises ConfigError if the mesh does not divide the environments of a row."""
    num_devices = mesh.shape.get(ENVS, 1)
    if config.num_envs % num_devices:
        above = -(-config.num_envs // num_devices) * num_devices
        raise ConfigError(
            f"num_envs={config.num_envs} environments cannot be split evenly over {ENVS}={num_devices} devices; use "
            f"num_envs={above} (best a multiple of group_size on each device)"
        )


def initial_states(
    config: Config,
    hyperparams: Hyperparams,
    keys: jax.Array,
    env_params: EnvParams = None,
    params: PyTree = None,
    *,
    mesh: Mesh | None = None,
) -> TrainState:
    """The states that `run` starts from, `[R, ...]`: one row for each key. Pure. Padded to what the mesh divides."""
    num_rows, init = keys.shape[0], make_init(config)
    rows = keys, hyperparams.broadcast(num_rows), parameters_of_rows(config.env, env_params, num_rows), params
    if mesh is None:
        return jax.vmap(init)(*rows)
    return over_rows(lambda row: init(*row), mesh)(pad_rows(rows, mesh))


def run(
    config: Config,
    hyperparams: Hyperparams,
    keys: jax.Array,
    *,
    env_params: EnvParams = None,
    params: PyTree = None,
    max_episodes: float = math.inf,
    start: Progress | None = None,
    report: Callable[[Chunk], None] | None = None,
    save: Callable[[Progress], None] | None = None,
    num_chunks: int = 50,
    mesh: Mesh | None = None,
) -> RunResult:
    """Trains one row for each key, all in one compiled program, until each has spent `hyperparams.total_steps`.

    Rows, and if asked for the environments of each, are split over devices (`grpo_jax.sharding`).

    A row stops before the iteration that could exceed its budget, and then stays as it is, bitwise, while others go
    on (one-episode groups make as many steps as their episodes last).

    Args:
      config: what to run.
      hyperparams: leaves are scalars, for all rows, or `[R]`, one for each.
      keys: `[R]` keys, as from `jax.random.split(key, R)`; a row is a function of its key,
        its hyperparameters and its env_params alone.
      env_params: parameters of the environment by name, in place of the config's: one value for all rows, or an array
        `[R]` or `[R, num_groups]`.
      params: of the policies to start from, each leaf `[R, ...]`; random ones by default.
      max_episodes: a row also stops once it has completed this many; `total_steps` may then be infinite.
      start: where to go on from, of a run with these same arguments; the result is bitwise that of one run if the
        devices and the rows on each are as many as before, and else to rounding. By default from the beginning.
      report: called on the host with each chunk of iterations as it is done.
      save: called after `report` with where the run stands, and once before the first chunk.
      num_chunks: about how often to report if all steps of a rollout are made; the numbers do not depend on it.
      mesh: of `sharding.make_mesh`; by default one with a device for each row, as far as they go.

    Raises:
      ConfigError: if the budget does not allow a single iteration or has no end, `keys` is not an array of keys or an
        empty one, `num_chunks` is no positive integer, or the mesh does not divide the environments.
      MemoryError: if the rows need more memory than there is, with what to lower.
    """
    budget.check_budget(config, hyperparams, max_episodes)
    if keys.ndim != (1 if jax.dtypes.issubdtype(keys.dtype, jax.dtypes.prng_key) else 2):
        raise ConfigError(
            "keys must be an array of keys, one for each row, as from jax.random.split(jax.random.key(0), num_rows)"
        )
    num_rows, num_chunks = keys.shape[0], as_count("num_chunks", num_chunks)
    if num_rows == 0:
        raise ConfigError("keys is empty, and one row is trained for each key; use jax.random.split(key, 1) or more")
    mesh = mesh_of_rows(num_rows) if mesh is None else mesh
    check_mesh(config, mesh)
    num_iterations = budget.most_steps(config, hyperparams, max_episodes) // config.steps_per_iteration
    limits = budget.make_budget(hyperparams.total_steps, max_episodes, num_rows, unit=config.steps_per_iteration)
    limits = pad_rows(limits, mesh)
    within_budget = jax.jit(_within_budget, out_shardings=replicated(mesh))

    def going_on(states):
        return np.asarray(within_budget(states, limits))[:num_rows].any()

    # Without a limit of steps only the longest possible episodes bound it, which seldom are as long.
    longest = num_iterations if np.all(np.isfinite(hyperparams.total_steps)) else MAX_CHUNK
    chunk_length = min(-(-num_iterations // num_chunks), longest)

    init = functools.partial(initial_states, config, mesh=mesh)
    started, compile_seconds, chunks = time.perf_counter(), 0.0, []
    with told_what_fits(num_rows) as memory:
        layout = state_shardings(mesh, jax.eval_shape(init, hyperparams, keys, env_params, params))
        if start is None:
            states = jax.jit(init, out_shardings=layout)(hyperparams, keys, env_params, params)
            progress = Progress(states, np.zeros(num_rows, np.int64), iteration=0, seconds=0.0)
        else:  # copies, as the program takes its arguments' buffers
            progress = start._replace(states=lay_out(start.states, mesh))
        if going_on(progress.states):
            chunk_of_rows = over_rows(_budgeted_chunk(config, chunk_length), mesh)
            layouts = layout, replicated(mesh)
            program = jax.jit(lambda *rows: chunk_of_rows(rows), donate_argnums=0, out_shardings=layouts)
            program = memory.of(program.lower(progress.states, limits).compile())
            compile_seconds = time.perf_counter() - started
        if save is not None:
            save(_of_rows(progress))
        started = time.perf_counter() - progress.seconds
        while going_on(progress.states):
            states, metrics = program(progress.states, limits)
            chunk = _on_the_host(metrics, progress, started)
            steps, iteration = chunk.steps[-1], progress.iteration + len(chunk.steps)
            progress = Progress(states, steps, iteration, chunk.seconds)
            chunks.append(chunk)
            if report is not None:
                report(chunk)
            if save is not None:
                save(_of_rows(progress))
    train_seconds = time.perf_counter() - started
    metrics = {name: np.concatenate([c.metrics[name] for c in chunks]) for name in (chunks and chunks[0].metrics)}
    steps = np.concatenate([np.zeros((0, num_rows), np.int64), *(chunk.steps for chunk in chunks)])
    return RunResult(_of_rows(progress).states, metrics, steps, compile_seconds, train_seconds)


def _on_the_host(metrics: Metrics, before: Progress, started: float) -> Chunk:
    """What a chunk made; the iterations after the last row stopped are none."""
    metrics = {name: np.asarray(value)[: len(before.steps)].T for name, value in metrics.items()}
    made = metrics["environment/steps"].astype(np.int64)
    num_made = np.flatnonzero(made.any(axis=1))[-1] + 1
    return Chunk(
        metrics={name: value[:num_made] for name, value in metrics.items()},
        steps=before.steps + np.cumsum(made[:num_made], axis=0),
        iteration=before.iteration,
        seconds=time.perf_counter() - started,
    )


def _of_rows(progress: Progress) -> Progress:
    """Without the rows that only pad; of several processes, to which that would be communication, with them."""
    num_rows = len(progress.steps)
    if jax.process_count() > 1:
        return progress
    return progress._replace(
        states=jax.tree.map(lambda leaf: leaf if len(leaf) == num_rows else leaf[:num_rows], progress.states)
    )


def _within_budget(state: TrainState, limit: budget.Budget) -> jax.Array:
    return budget.allows_another(limit, state.steps, state.episodes)


def _budgeted_chunk(config: Config, length: int) -> Callable[[tuple[TrainState, budget.Budget]], tuple]:
    """Iterations of a row, a state and its budget, which change nothing once the budget is spent."""
    train_step = make_train_step(config)

    def stay(state):
        _, metrics = jax.eval_shape(train_step, state)

        def nothing(metric):
            is_real = jnp.issubdtype(metric.dtype, jnp.floating)
            return jnp.full(metric.shape, jnp.nan if is_real else 0, metric.dtype)

        return state, jax.tree.map(nothing, metrics)

    def chunk(row):
        state, limit = row
        # XLA unrolls a loop of one iteration, and what it then fuses with is rounded differently: none is of one.
        is_asked = np.arange(max(length, 2)) < length

        def step(state, is_asked):
            return jax.lax.cond(is_asked & _within_budget(state, limit), train_step, stay, state)

        return jax.lax.scan(step, state, is_asked)

    return chunk

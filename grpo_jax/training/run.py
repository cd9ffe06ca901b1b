"""`run`: train steps of all rows, in chunks, until their budgets are spent."""

import functools
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grpo_jax.config.config import Config
from grpo_jax.devices.memory import explain_out_of_memory
from grpo_jax.devices.mesh import ENVS, make_row_mesh, over_rows, pad_rows, replicated, shard_states, state_shardings
from grpo_jax.environments import EnvParams, row_parameters
from grpo_jax.errors import ConfigError, as_count
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.training import budget
from grpo_jax.training.train_step import make_init, make_train_step
from grpo_jax.types import Metrics, PyTree, TrainState

MAX_CHUNK = 1000
"""The most iterations between two reports of a run that only `max_episodes` limits."""


class Chunk(NamedTuple):
    """`n` successive iterations of a run, on the host; `R` rows (seeds × hyperparameters)."""

    metrics: dict[str, np.ndarray]  # each [n, R]; once a row's budget is spent, environment/steps is 0, others are NaN
    steps: np.ndarray  # int64 [n, R] environment steps since the start of the run
    iteration: int  # of the first of the n
    seconds: float  # since training started


class Progress(NamedTuple):
    """The progress of a run between two chunks: all that is needed to resume it, in this process or in another."""

    # [R, ...], with padding rows in multi-process runs. Donated to the next chunk: copy what you keep
    states: TrainState
    steps: np.ndarray  # int64 [R] environment steps made
    iteration: int  # iterations made, by the row with the most
    seconds: float  # of training


class RunResult(NamedTuple):
    """The result of `run`. After `resume_from`, metrics and steps are those of the iterations made since."""

    states: TrainState  # as in Progress
    metrics: dict[str, np.ndarray]  # each [num_iterations, R]; empty if there was nothing left to do
    steps: np.ndarray  # int64 [num_iterations, R]
    compile_seconds: float
    train_seconds: float  # including those of `resume_from`


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
    """The states that `run` starts from, `[R, ...]`: one row for each key, padded to what the mesh divides. Pure."""
    num_rows, init = keys.shape[0], make_init(config)
    rows = keys, hyperparams.broadcast(num_rows), row_parameters(config.env, env_params, num_rows), params
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
    resume_from: Progress | None = None,
    report: Callable[[Chunk], None] | None = None,
    save: Callable[[Progress], None] | None = None,
    num_chunks: int = 50,
    mesh: Mesh | None = None,
) -> RunResult:
    """Trains one row for each key, all in one compiled program, until each has spent `hyperparams.total_steps`.

    Rows are split over devices, and if the mesh has an axis for them the environments of each row too.

    A row stops before the iteration that could exceed its budget, and then stays bitwise unchanged while others
    continue (one-episode groups make as many steps as their episodes last).

    Args:
      config: what to run.
      hyperparams: leaves are scalars, for all rows, or `[R]`, one for each.
      keys: `[R]` keys, as from `jax.random.split(key, R)`; a row is a function of its key, its hyperparameters and its
        env_params only.
      env_params: parameters of the environment by name, instead of the config's: one value for all rows, or an array
        `[R]` or `[R, num_groups]`.
      params: of the policies to start from, each leaf `[R, ...]`; random ones by default.
      max_episodes: a row also stops once it has completed this many; `total_steps` may then be infinite.
      resume_from: the progress of an earlier run with the same arguments. The result is that of one run without an
        interruption: bitwise with the same devices and rows on each, and otherwise up to rounding.
      report: called on the host with each chunk of iterations when it is done.
      save: called with the run's progress once before the first chunk, and after each `report`.
      num_chunks: approximate number of reports; results do not depend on it.
      mesh: the devices, from `grpo_jax.make_mesh`; by default the rows are split over the devices.

    Raises:
      ConfigError: the budget does not allow a single iteration or has no end, `keys` is not an array of keys or is
        empty, `num_chunks` is not a positive integer, or the mesh does not divide the environments.
      MemoryError: the rows need more memory than there is; the message says what to lower.
    """
    budget.check_budget(config, hyperparams, max_episodes)
    check_keys(keys)
    num_rows, num_chunks = keys.shape[0], as_count("num_chunks", num_chunks)
    mesh = make_row_mesh(num_rows) if mesh is None else mesh
    check_mesh(config, mesh)
    num_iterations = budget.most_steps(config, hyperparams, max_episodes) // config.steps_per_iteration
    limits = budget.make_budget(hyperparams.total_steps, max_episodes, num_rows, unit=config.steps_per_iteration)
    limits = pad_rows(limits, mesh)
    within_budget = jax.jit(_within_budget, out_shardings=replicated(mesh))

    def has_budget(states):
        return np.asarray(within_budget(states, limits))[:num_rows].any()

    # Without a limit of steps num_iterations assumes episodes of the greatest length, which are rare: report earlier.
    longest = num_iterations if np.all(np.isfinite(hyperparams.total_steps)) else MAX_CHUNK
    chunk_length = min(-(-num_iterations // num_chunks), longest)

    init = functools.partial(initial_states, config, mesh=mesh)
    started, compile_seconds, chunks = time.perf_counter(), 0.0, []
    with explain_out_of_memory(num_rows) as memory:
        layout = state_shardings(mesh, jax.eval_shape(init, hyperparams, keys, env_params, params))
        if resume_from is None:
            states = jax.jit(init, out_shardings=layout)(hyperparams, keys, env_params, params)
            progress = Progress(states, np.zeros(num_rows, np.int64), iteration=0, seconds=0.0)
        else:  # copies, as the program's arguments are donated
            progress = resume_from._replace(states=shard_states(resume_from.states, mesh))
        if has_budget(progress.states):
            chunk_of_rows = over_rows(_budgeted_chunk(config, chunk_length), mesh)
            layouts = layout, replicated(mesh)
            program = jax.jit(lambda *rows: chunk_of_rows(rows), donate_argnums=0, out_shardings=layouts)
            program = memory.measure(program.lower(progress.states, limits).compile())
            compile_seconds = time.perf_counter() - started
        if save is not None:
            save(_without_padding(progress))
        started = time.perf_counter() - progress.seconds
        while has_budget(progress.states):
            states, metrics = program(progress.states, limits)
            chunk = _to_host(metrics, progress, started)
            steps, iteration = chunk.steps[-1], progress.iteration + len(chunk.steps)
            progress = Progress(states, steps, iteration, chunk.seconds)
            chunks.append(chunk)
            if report is not None:
                report(chunk)
            if save is not None:
                save(_without_padding(progress))
    train_seconds = time.perf_counter() - started
    metrics = {name: np.concatenate([c.metrics[name] for c in chunks]) for name in (chunks and chunks[0].metrics)}
    steps = np.concatenate([np.zeros((0, num_rows), np.int64), *(chunk.steps for chunk in chunks)])
    return RunResult(_without_padding(progress).states, metrics, steps, compile_seconds, train_seconds)


def check_keys(keys: jax.Array) -> None:
    """Raises ConfigError unless `keys` are `[R]` keys of one row or more."""
    if keys.ndim != (1 if jax.dtypes.issubdtype(keys.dtype, jax.dtypes.prng_key) else 2):
        raise ConfigError(
            "keys must be an array of keys, one for each row, as from jax.random.split(jax.random.key(0), num_rows)"
        )
    if keys.shape[0] == 0:
        raise ConfigError("keys is empty, and one row is trained for each key; use jax.random.split(key, 1) or more")


def _to_host(metrics: Metrics, before: Progress, started: float) -> Chunk:
    """A chunk as NumPy arrays, without the iterations after the last row stopped."""
    metrics = {name: np.asarray(value)[: len(before.steps)].T for name, value in metrics.items()}
    made = metrics["environment/steps"].astype(np.int64)
    num_made = np.flatnonzero(made.any(axis=1))[-1] + 1
    return Chunk(
        metrics={name: value[:num_made] for name, value in metrics.items()},
        steps=before.steps + np.cumsum(made[:num_made], axis=0),
        iteration=before.iteration,
        seconds=time.perf_counter() - started,
    )


def _without_padding(progress: Progress) -> Progress:
    """Without padding rows; several processes keep them, as removing them would need communication."""
    num_rows = len(progress.steps)
    if jax.process_count() > 1:
        return progress
    return progress._replace(
        states=jax.tree.map(lambda leaf: leaf if len(leaf) == num_rows else leaf[:num_rows], progress.states)
    )


def _within_budget(state: TrainState, limit: budget.Budget) -> jax.Array:
    return budget.allows_another(limit, state.steps, state.episodes)


def _budgeted_chunk(config: Config, length: int) -> Callable[[tuple[TrainState, budget.Budget]], tuple]:
    """`(state, budget) -> (state, metrics)`: iterations of one row, which change nothing once its budget is spent."""
    train_step = make_train_step(config)

    def stay(state):
        _, metrics = jax.eval_shape(train_step, state)

        def empty(metric):
            is_real = jnp.issubdtype(metric.dtype, jnp.floating)
            return jnp.full(metric.shape, jnp.nan if is_real else 0, metric.dtype)

        return state, jax.tree.map(empty, metrics)

    def chunk(row):
        state, limit = row
        # XLA unrolls a loop of one iteration and fuses it with other code, which rounds differently: none is of one.
        in_chunk = np.arange(max(length, 2)) < length

        def step(state, in_chunk):
            return jax.lax.cond(in_chunk & _within_budget(state, limit), train_step, stay, state)

        return jax.lax.scan(step, state, in_chunk)

    return chunk

"""`run`: train steps of all rows, in chunks, until their budgets are spent."""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grpo_jax.config import Config
from grpo_jax.devices.memory import explain_out_of_memory
from grpo_jax.devices.mesh import (
    ENVS,
    ROWS,
    make_row_mesh,
    over_rows,
    pad_rows,
    replicated,
    shard_states,
    state_shardings,
)
from grpo_jax.environments import EnvParams, row_parameters
from grpo_jax.errors import ConfigError, as_count
from grpo_jax.host_calls import finished
from grpo_jax.hyperparams import Hyperparams
from grpo_jax.objectives.reductions import missing
from grpo_jax.training import budget
from grpo_jax.training.checks import check_run, try_on_shapes
from grpo_jax.training.evaluations import Evaluations, make_evaluation
from grpo_jax.training.progress import (
    Chunk,
    Progress,
    RunResult,
    apply_callback,
    initial_progress,
    joined,
    to_host,
    with_ends,
    with_evaluation,
    with_returns,
    without_padding,
)
from grpo_jax.training.train import make_init
from grpo_jax.training.train_step import make_train_step
from grpo_jax.types import PyTree, TrainState

NUM_CHUNKS = 50
"""The approximate number of chunks of a run, unless their length is given."""

MAX_CHUNK = 1000
"""The most iterations of a chunk of a run that only `max_episodes` limits."""


def check_mesh(config: Config, mesh: Mesh) -> None:
    """Raises ConfigError if the mesh does not divide `num_envs`, or splits rows and environments that call the host."""
    num_devices = mesh.shape.get(ENVS, 1)
    if config.env.on_host and mesh.size > mesh.shape[ROWS] > 1:
        raise ConfigError(
            f"{config.env.name!r} calls the host, but JAX has no such calls where a mesh splits rows and also their "
            f"environments or policy, as {dict(mesh.shape)} does; use make_mesh(seeds={mesh.size}), or seeds=1"
        )
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
    resume_from: Progress | None = None,
    callback: Callable[[Progress, Chunk | None], Progress | None] | None = None,
    chunk_length: int | None = None,
    evaluate_every: int = 0,
    evaluation_episodes: int = 32,
    stop_when: Callable[[Evaluations], np.ndarray] | None = None,
    mesh: Mesh | None = None,
) -> RunResult:
    """Trains one row for each key, all in one compiled program, until each has spent the budget of its hyperparameters.

    Rows are split over devices, and if the mesh has an axis for them the environments of each row too.

    A row ends before the iteration that would exceed its `total_steps`, if it took as many steps as the last one
    (one-episode groups make as many as their episodes last), or after its `num_iterations` or `max_episodes`. It then
    stays bitwise unchanged while others continue. The result says what ended it, and how much it used.

    Args:
      config: what to run.
      hyperparams: leaves are scalars, for all rows, or `[R]`, one for each.
      keys: `[R]` keys, as from `jax.random.split(key, R)`; a row is a function of its key, its hyperparameters and its
        env_params only.
      env_params: parameters of the environment by name, instead of the config's: one value for all rows, or an array
        `[R]` or `[R, num_groups]`.
      params: of the policies to start from, each leaf `[R, ...]`; random ones by default.
      resume_from: the progress of an earlier run with the same arguments. The result is that of one run without an
        interruption: bitwise with the same devices and rows on each, and otherwise up to rounding.
      callback: called on the host with the progress, before the first chunk of iterations (with None) and after each
        (with the chunk). It may return a changed progress, to go on from: `progress._replace(states=...)` for a
        curriculum or the selection of a population, `progress._replace(stopped=...)` to stop rows.
      chunk_length: iterations between two calls of the callback; by default about a fiftieth of the run. Without
        changes by the callback, results do not depend on it.
      evaluate_every: iterations between two evaluations, each at the end of a chunk and the last one at the end of the
        run, also if a callback ends it; 0 for none. The metrics get `evaluation/return_sampled` and
        `evaluation/return_greedy`, NaN in between.
      evaluation_episodes: episodes of an evaluation, and again as many with greedy actions.
      stop_when: called after each evaluation with all of them so far; returns bool `[R]`, the rows to stop, as
        `reached_return` and `no_progress` do, or one bool for all rows.
      mesh: the devices, from `grpo_jax.make_mesh`; by default the rows are split over the devices.

    Raises:
      ConfigError: the budget does not allow a single iteration or has no end, `keys` is not an array of keys or is
        empty, a number of iterations or episodes is not a positive integer, `stop_when` comes without evaluations, or
        the mesh does not divide the environments.
      MemoryError: the rows need more memory than there is; the message says what to lower.
    """
    check_run(config, hyperparams)
    check_keys(keys)
    check_evaluations(evaluate_every, evaluation_episodes, stop_when)
    num_rows = keys.shape[0]
    mesh = make_row_mesh(num_rows) if mesh is None else mesh
    check_mesh(config, mesh)
    chunk_length = _chunk_length(config, hyperparams, chunk_length, evaluate_every)
    use_of_budget = jax.jit(_use_of_budget, out_shardings=replicated(mesh))

    def limits(progress):
        return pad_rows(budget.make_budget(hyperparams, progress.stopped), mesh)

    def updated(progress):
        return with_ends(progress, *jax.tree.map(np.asarray, use_of_budget(progress.states, limits(progress))))

    init = functools.partial(initial_states, config, mesh=mesh)
    started, compile_seconds, chunks = time.perf_counter(), 0.0, []
    with explain_out_of_memory(num_rows) as memory:
        layout = state_shardings(mesh, jax.eval_shape(init, hyperparams, keys, env_params, params))
        if resume_from is None:
            start = jax.jit(init, out_shardings=layout)
            states = finished(start, hyperparams, keys, env_params, params, num_devices=mesh.size)
            progress = initial_progress(states, num_rows)
        else:  # copies, as the program's arguments are donated
            progress = resume_from._replace(states=shard_states(resume_from.states, mesh))
        progress = updated(_called(callback, updated(progress), None, mesh))
        if not progress.ended.all():
            chunk_of_rows = over_rows(_budgeted_chunk(config, chunk_length), mesh)
            layouts = layout, replicated(mesh)
            program = jax.jit(lambda *rows: chunk_of_rows(rows), donate_argnums=0, out_shardings=layouts)
            program = memory.measure(program.lower(progress.states, limits(progress)).compile())
            compile_seconds = time.perf_counter() - started
        evaluation = make_evaluation(config, keys, evaluation_episodes, mesh)
        started = time.perf_counter() - progress.seconds
        while not progress.ended.all():
            states, metrics = finished(program, progress.states, limits(progress), num_devices=mesh.size)
            chunk = to_host(metrics, progress, started)
            before, iteration = progress.iteration, progress.iteration + len(chunk.steps)
            progress = updated(progress._replace(states=states, steps=chunk.steps[-1], iteration=iteration))
            if evaluate_every:
                is_due = iteration // evaluate_every > before // evaluate_every or progress.ended.all()
                returns = evaluation(states, iteration) if is_due else None
                progress = updated(with_evaluation(progress, returns, stop_when)) if is_due else progress
                chunk = with_returns(chunk, returns)
            progress = progress._replace(seconds=time.perf_counter() - started)
            chunks.append(chunk)
            called = _called(callback, progress, chunk, mesh)
            progress = progress if called is progress else updated(called)
        if evaluate_every and progress.iteration not in progress.evaluations.iterations[-1:]:  # the callback ended it
            returns = evaluation(progress.states, progress.iteration)
            progress = with_evaluation(progress, returns, stop_when=None)
            chunks[-1:] = [with_returns(chunk, returns) for chunk in chunks[-1:]]
    train_seconds = time.perf_counter() - started
    metrics, steps = joined(chunks, num_rows)
    seconds, ends = (compile_seconds, train_seconds), (progress.ended_by, progress.used)
    return RunResult(without_padding(progress).states, metrics, steps, *seconds, progress.evaluations, *ends)


def check_evaluations(every: int, num_episodes: int, stop_when: Callable | None) -> None:
    """Raises ConfigError for numbers that are not counts, or a criterion that is no function or lacks evaluations."""
    if every != 0:
        as_count("evaluate_every", every)
    as_count("evaluation_episodes", num_episodes)
    if stop_when is not None and not every:
        raise ConfigError("stop_when decides by evaluations, but there are none; set evaluate_every, such as 10")
    if stop_when is not None and not callable(stop_when):
        raise ConfigError(f"stop_when={stop_when!r} is not a function; use one, such as reached_return({stop_when!r})")


def _chunk_length(config: Config, hyperparams: Hyperparams, chunk_length: int | None, evaluate_every: int) -> int:
    """Iterations of the compiled program."""
    num_iterations = budget.most_steps(config, hyperparams) // config.steps_per_iteration
    if chunk_length is None:
        # Without a limit of steps num_iterations assumes episodes of the greatest length, which are rare.
        is_known = hyperparams.num_iterations is not None or np.all(np.isfinite(hyperparams.total_steps))
        longest = num_iterations if is_known else MAX_CHUNK
        chunk_length = min(-(-num_iterations // NUM_CHUNKS), longest)
    length = min(as_count("chunk_length", chunk_length), num_iterations)
    return min(length, evaluate_every) if evaluate_every else length


def _called(callback: Callable | None, progress: Progress, chunk: Chunk | None, mesh: Mesh) -> Progress:
    """The progress after a call of the callback."""
    given = without_padding(progress)
    changed = apply_callback(callback, given, chunk)
    return progress if changed is given else changed._replace(states=shard_states(changed.states, mesh))


def check_keys(keys: jax.Array) -> None:
    """Raises ConfigError unless `keys` are `[R]` keys of one row or more."""
    if keys.ndim != (1 if jax.dtypes.issubdtype(keys.dtype, jax.dtypes.prng_key) else 2):
        raise ConfigError(
            "keys must be an array of keys, one for each row, as from jax.random.split(jax.random.key(0), num_rows)"
        )
    if keys.shape[0] == 0:
        raise ConfigError("keys is empty, and one row is trained for each key; use jax.random.split(key, 1) or more")


def _use_of_budget(states: TrainState, limit: budget.Budget) -> tuple:
    """Which limits are spent, and the fraction of each that is used."""
    return budget.spent(limit, states), budget.fractions_done(states)


def _budgeted_chunk(config: Config, length: int) -> Callable[[tuple[TrainState, budget.Budget]], tuple]:
    """`(state, budget) -> (state, metrics)`: iterations of one row, which change nothing once its budget is spent."""
    train_step = make_train_step(config)

    def stay(state):
        metrics = try_on_shapes(config, state.hyperparams)

        def empty(metric):
            is_real = jnp.issubdtype(metric.dtype, jnp.floating)
            return jnp.full(metric.shape, missing() if is_real else 0, metric.dtype)

        return state, jax.tree.map(empty, metrics)

    def chunk(row):
        state, limit = row
        # XLA unrolls a loop of one iteration and fuses it with other code, which rounds differently: none is of one.
        in_chunk = np.arange(max(length, 2)) < length

        def step(state, in_chunk):
            goes_on = budget.allows_another(limit, state)
            return jax.lax.cond(in_chunk & goes_on, train_step, stay, state)

        return jax.lax.scan(step, state, in_chunk)

    return chunk

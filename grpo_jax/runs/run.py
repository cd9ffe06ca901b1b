"""`run`: train steps of all rows, in chunks, until their budgets are spent."""

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grpo_jax.config import Config, kept_with
from grpo_jax.devices.mesh import make_row_mesh, over_rows, pad_rows, replicated, shard_states, state_shardings
from grpo_jax.environments import EnvParams
from grpo_jax.errors import ConfigError, as_count
from grpo_jax.evaluation.episodes import check_evaluable
from grpo_jax.host_calls import finished
from grpo_jax.hyperparams import Hyperparams, completed
from grpo_jax.policies.normalization import Normalizer
from grpo_jax.runs.chunks import budgeted_chunk, budgeted_learn, budgeted_play
from grpo_jax.runs.end_warnings import end_warnings
from grpo_jax.runs.evaluations import Evaluate, make_evaluation
from grpo_jax.runs.programs import compiling, explain_out_of_memory, kept_programs
from grpo_jax.runs.progress import (
    Callback,
    Chunk,
    Progress,
    Scored,
    apply_callback,
    initial_progress,
    to_host,
    with_ends,
    with_evaluation,
    with_returns,
    without_padding,
)
from grpo_jax.runs.result import RunResult, joined
from grpo_jax.runs.run_spec import setting_columns, settings_of
from grpo_jax.training import budget
from grpo_jax.training.checks import BUDGETS, check_mesh, check_options, check_read, check_rows, check_run, makes_params
from grpo_jax.training.host_side import host_outcome, played_with_host, steps_to_learn, with_choices
from grpo_jax.training.train import initial_states
from grpo_jax.training.train_step import ADVANTAGE
from grpo_jax.types import Metrics, PyTree, TrainState

NUM_CHUNKS = 50
"""The approximate number of chunks of a run, unless their length is given."""

MAX_CHUNK = 1000
"""The most iterations of a chunk of a run that only `max_episodes` limits."""


def run(
    config: Config,
    hyperparams: Hyperparams,
    keys: jax.Array,
    *,
    env_params: EnvParams = None,
    params: PyTree | Callable[[], PyTree] = None,
    normalizer: Normalizer | None = None,
    resume_from: Progress | None = None,
    evaluate: Evaluate | None = None,
    callback: Callback | None = None,
    chunk_length: int | None = None,
    mesh: Mesh | None = None,
) -> RunResult:
    """Trains one row for each key, all in one compiled program, until each has spent the budget of its hyperparameters.

    `config, hyperparams = tuned("CartPole-v1", "ppo")` are settings known to work; the classes have plain defaults.

    A row ends before the iteration that would exceed its `total_steps`, if it took as many steps as the last one
    (one-episode groups make as many as their episodes last), or after its `num_iterations` or `max_episodes`. It then
    stays bitwise unchanged while others continue. Rows are split over devices, and so may be the environments of each.

    Args:
      config: what to run. Another run of the same `Config`, on as many rows, traces nothing again.
      hyperparams: leaves are scalars, for all rows, or `[R]`, one for each.
      keys: `[R]` keys, as from `jax.random.split(key, R)`; a row is a function of its own arguments only.
      env_params: parameters of the environment by name, instead of the config's: one value for all rows, or an array
        `[R]` or `[R, num_groups]`.
      params: of the policies to start from, each leaf `[R, ...]`; random ones by default. The states have a copy of
        them: of a function that makes them, the only one.
      normalizer: with the statistics of observations of these policies, each leaf `[R, ...]`, if they are normalised;
        `policies = load(folder, row="all")` has both, `policies.params` and `policies.normalizer`.
      resume_from: the progress of an earlier run with the same arguments, or with a smaller budget. The result equals
        one run without an interruption, bitwise with the same devices and rows on each, otherwise up to rounding; after
        a smaller budget only if the schedule is constant.
      evaluate: `Evaluate(every=10)` evaluates the policies every 10 iterations; None never does.
      callback: called on the host with the progress, before the first chunk of iterations (with None) and after each
        (with the chunk). It may return a changed progress, to go on from: `progress._replace(states=...)` for a
        curriculum or the selection of a population, `progress._replace(stopped=...)` to stop rows.
      chunk_length: iterations between two calls of the callback, which do not change results; by default about a
        fiftieth of the run.
      mesh: the devices, from `grpo_jax.make_mesh`; by default the rows are split over the devices.

    Warns of a run in which no episode ended or most updates were skipped, and of a budget of which 5% are left.

    Raises:
      ConfigError: the budget does not allow an iteration or has no end, or an argument does not fit the others.
      MemoryError: the rows need more memory than there is; the message says what to lower.
    """
    check_run(config, hyperparams)
    check_read((config, hyperparams))
    rows = Rows(
        *(config, hyperparams, keys, env_params, params, normalizer),
        *(resume_from, evaluate, callback, chunk_length, mesh),
    )
    result = rows.run()
    if resume_from is None:  # else the result is of a part of the run
        for text in end_warnings(config, rows.hyperparams, result).values():
            warnings.warn(text, stacklevel=2)
    return result


@dataclasses.dataclass
class Rows:
    """The rows of a run: the arguments of `run`, after its checks of the config and hyperparameters."""

    config: Config
    hyperparams: Hyperparams
    keys: jax.Array
    env_params: EnvParams = None
    params: PyTree | Callable[[], PyTree] = None
    normalizer: Normalizer | None = None
    resume_from: Progress | None = None
    evaluate: Evaluate | None = None
    callback: Callback | None = None
    chunk_length: int | None = None
    mesh: Mesh | None = None
    say: Callable[[str], None] = lambda text: None

    def __post_init__(self):
        self.hyperparams = completed(self.hyperparams, self.config.hyperparams_class)
        check_rows(self.hyperparams, self.keys)
        check_options(self.config, self.hyperparams, self.params, self.callback, self.mesh)
        self.mesh = make_row_mesh(len(self.keys)) if self.mesh is None else self.mesh
        check_mesh(self.config, self.mesh)
        self.chunk_length = _chunk_length(self.config, self.hyperparams, self.chunk_length, self.evaluate)
        self._types, self._programs, self._compile_seconds, self._started = None, {}, 0.0, 0.0
        layout = replicated(self.mesh)
        self._use_of_budget = self._kept("budget", lambda: jax.jit(_use_of_budget, out_shardings=layout))

    def run(self) -> RunResult:
        """Makes the iterations that are left."""
        started, num_rows = time.perf_counter(), len(self.keys)
        with kept_programs(), explain_out_of_memory(num_rows):
            if jax.process_count() == 1:
                compiling.set()
            try:
                progress = self.start()
                progress = self.with_budget(self.call(progress, None))
                if not progress.ended.all():
                    self.compile(progress.states, self._limits(progress))
                    self._compile_seconds = time.perf_counter() - started
            finally:
                compiling.clear()
            self._started = time.perf_counter() - progress.seconds
            progress, chunks = self.train(progress)
        metrics, steps = joined(chunks, num_rows)
        seconds = self._compile_seconds, time.perf_counter() - self._started
        ends = progress.evaluations, progress.ended_by, progress.used
        columns = setting_columns(self.hyperparams, self.env_params, self.config.env.params)
        states = without_padding(progress).states
        return RunResult(states, metrics, steps, *seconds, *ends, settings_of(columns, num_rows))

    def start(self) -> Progress:
        """The progress before the first chunk. Its states are copies, as the program's arguments are donated."""
        params, resume_from = self.params, self.resume_from
        if makes_params(params):  # a resumed run needs only their shapes
            params = params() if resume_from is None else resume_from.states.params
            check_options(self.config, self.hyperparams, params)
        given = self.hyperparams, self.keys, self.env_params, params, self.normalizer
        self._types = jax.tree.structure(given), tuple(map(jax.typeof, jax.tree.leaves(given)))
        init = functools.partial(initial_states, self.config, mesh=self.mesh)
        init = self._kept("begin", functools.partial(jax.jit, init, inline=True))  # traced once for both uses
        self._layout = self._kept("layout", lambda: state_shardings(self.mesh, jax.eval_shape(init, *given)))
        self._update = {"donate_argnums": 0, "out_shardings": (self._layout, replicated(self.mesh))}
        if resume_from is not None:
            states = shard_states(resume_from.states, self.mesh)
            given = pad_rows(self.hyperparams.broadcast(len(self.keys)), self.mesh)
            budgets = {name: getattr(given, name) for name in BUDGETS}  # they may be larger than before
            budgets = jax.device_put(jax.tree.map(jnp.copy, budgets), self._layout.hyperparams)
            states = states.replace(hyperparams=states.hyperparams.replace(**budgets))
            return self.with_budget(resume_from._replace(states=states))
        begin = self._kept("init", lambda: jax.jit(init, out_shardings=self._layout))
        states = finished(begin, *given, num_devices=self.mesh.size)
        return self.with_budget(initial_progress(states, len(self.keys)))

    def compile(self, *given: PyTree) -> jax.stages.Compiled:
        """The program of a chunk of iterations, or, of an environment with a host side, that of a rollout."""
        if self.config.env.host is not None:
            return self._program("rollout", budgeted_play, given)
        chunk = functools.partial(budgeted_chunk, length=self.chunk_length)
        return self._program(f"{self.chunk_length} iterations", chunk, given, **self._update)

    def _program(self, name: str, make: Callable, given: tuple, **options: Any) -> jax.stages.Compiled:
        """The program of a function of one row, `make(config)`, over all rows, compiled when it is needed first."""

        def program():
            rows_function = over_rows(make(self.config), self.mesh)
            return jax.jit(lambda *rows: rows_function(rows), **options)

        if name not in self._programs:
            if len(self._programs) > 1:  # beside the rollout and a first update
                self.say(f"compiling the {name}")
            began = time.perf_counter()
            self._programs[name] = self._kept(name, program).lower(*given).compile()
            seconds = time.perf_counter() - began
            self._compile_seconds, self._started = self._compile_seconds + seconds, self._started + seconds
        return self._programs[name]

    def advance(self, progress: Progress) -> tuple[TrainState, Metrics, Scored | None]:
        """The states after a chunk of iterations, its metrics, `[R, n]`, and what the host has scored."""
        states, limits = progress.states, self._limits(progress)
        play = functools.partial(finished, self.compile(states, limits), num_devices=self.mesh.size)
        if self.config.env.host is None:
            return *play(states, limits), None
        keys = pad_rows(self.keys, self.mesh)
        ended = np.pad(progress.ended, (0, len(keys) - len(self.keys)), mode="edge")  # padding copies the last row
        states = with_choices(self.config, states, keys, progress.iteration)
        played = played_with_host(self.config, play, states, limits)
        outcome, length = host_outcome(self.config, played, np.flatnonzero(~ended)), steps_to_learn(played)
        # The update reads little more than the longest episode, and is compiled for a length when that comes first.
        learn, given = functools.partial(budgeted_learn, length=length), (states, limits, played, outcome)
        update = self._program(f"update of up to {length} {self.config.env.step_word}", learn, given, **self._update)
        states, metrics = finished(update, *given, num_devices=self.mesh.size)
        end, advantage = played.rollout, metrics.pop(ADVANTAGE)[:, 0]
        scored = end.environment, end.environment_params, outcome, advantage
        return states, metrics, Scored(*jax.tree.map(np.asarray, scored))

    def train(self, progress: Progress) -> tuple[Progress, list[Chunk]]:
        """Runs chunks until all rows have ended; returns the final progress, and the chunks."""
        chunks: list[Chunk] = []
        evaluate = self.evaluate
        if evaluate is not None:
            evaluation = make_evaluation(self.config, self.keys, evaluate.episodes, self.mesh)
        while not progress.ended.all():
            began = time.perf_counter() - self._started
            states, metrics, scored = self.advance(progress)
            chunk = to_host(metrics, progress, self._started)
            before, iteration = progress.iteration, progress.iteration + len(chunk.steps)
            progress = progress._replace(states=states, steps=chunk.steps[-1], iteration=iteration)
            progress = self.with_budget(progress)
            if evaluate is not None:
                is_due = iteration // evaluate.every > before // evaluate.every or progress.ended.all()
                returns = evaluation(states, iteration) if is_due else None
                if is_due:
                    progress = self.with_budget(with_evaluation(progress, returns, evaluate.stop_when))
                chunk = with_returns(chunk, returns)
            progress = progress._replace(seconds=time.perf_counter() - self._started)
            chunks.append(chunk)
            called = self.call(progress, chunk._replace(duration=chunk.seconds - began, scored=scored))
            progress = progress if called is progress else self.with_budget(called)
        if evaluate is not None and progress.iteration not in progress.evaluations.iterations[-1:]:
            returns = evaluation(progress.states, progress.iteration)  # the callback ended the run
            progress = with_evaluation(progress, returns, stop_when=None)
            chunks[-1:] = [with_returns(chunk, returns) for chunk in chunks[-1:]]
        return progress, chunks

    def call(self, progress: Progress, chunk: Chunk | None) -> Progress:
        """The progress after a call of the callback."""
        given = without_padding(progress)
        changed = apply_callback(self.callback, given, chunk)
        return progress if changed is given else changed._replace(states=shard_states(changed.states, self.mesh))

    def with_budget(self, progress: Progress) -> Progress:
        """The progress with what is used of the budgets."""
        use = self._use_of_budget(progress.states, self._limits(progress))
        return with_ends(progress, *jax.tree.map(np.asarray, use))

    def _kept(self, name: Hashable, make: Callable) -> Any:
        """What another run of this config, on as many rows, takes as it is, so that it traces nothing."""
        return kept_with(self.config, (name, self.mesh, self._types), make)

    def _limits(self, progress: Progress) -> budget.Budget:
        return pad_rows(budget.make_budget(self.hyperparams, progress.stopped), self.mesh)


def _chunk_length(config: Config, hyperparams: Hyperparams, chunk_length: int | None, evaluate: Evaluate | None) -> int:
    """Iterations between two calls of the callback: one, where the host acts in each."""
    num_iterations = budget.most_steps(config, hyperparams) // config.steps_per_iteration
    if chunk_length is None:
        # Without a limit of steps num_iterations assumes episodes of the greatest length, which are rare.
        is_known = hyperparams.num_iterations is not None or np.all(np.isfinite(hyperparams.total_steps))
        longest = num_iterations if is_known else MAX_CHUNK
        chunk_length = min(-(-num_iterations // NUM_CHUNKS), longest)
    length = min(as_count("chunk_length", chunk_length), num_iterations if config.env.host is None else 1)
    if evaluate is None:
        return length
    if not isinstance(evaluate, Evaluate):
        raise ConfigError(f"evaluate={evaluate!r} does not say when to evaluate; use Evaluate(every=10)")
    check_evaluable(config)
    return min(length, evaluate.every)


def _use_of_budget(states: TrainState, limit: budget.Budget) -> tuple:
    """Which limits are spent, and the fraction of each that is used."""
    return budget.spent(limit, states), budget.fractions_done(states)

"""Checks before anything is compiled: the budget of a run, and one iteration on shapes."""

import functools
import traceback
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import Mesh

from grpo_jax.algorithms import SLOT_CALLS, algorithms_with, name_of
from grpo_jax.config import Config, kept_with
from grpo_jax.devices.mesh import ENVS, ROWS
from grpo_jax.environments.spaces import Discrete
from grpo_jax.errors import OTHER_WORDS, ConfigError, are_alike, describe_arrays, function_name, in_short, user_code
from grpo_jax.hyperparams import Hyperparams, advice_on, completed
from grpo_jax.importing import is_custom
from grpo_jax.policies.networks import MLP, Transformer
from grpo_jax.rollouts.outcomes import outcome_shapes
from grpo_jax.training.budget import check_budget
from grpo_jax.training.train_step import initial_state, make_learn, make_play
from grpo_jax.types import Metrics, PyTree, TrainState, first_difference
from grpo_jax.updates.lengths import rounded_length
from grpo_jax.updates.schedules import check_schedule

_NUM_ENVS = 3
BUDGETS = "total_steps", "num_iterations", "max_episodes"
"""The hyperparameters that the host reads."""


def check_run(config: Config, hyperparams: Hyperparams) -> None:
    """Raises ConfigError for hyperparameters or a budget that are invalid, and for a config whose parts do not fit."""
    if not isinstance(config, Config):
        raise ConfigError(f"config={config!r} must be a Config, such as Config('CartPole-v1')")
    if not isinstance(hyperparams, Hyperparams):
        raise ConfigError(f"hyperparams={hyperparams!r} must be Hyperparams, such as Hyperparams(learning_rate=1e-3)")
    if config.env.host is not None:
        check_one_process(f"{config.env.name!r} is rewarded on the host")
    check_budget(config, hyperparams)
    try_on_shapes(config, hyperparams)


def check_one_process(what: str) -> None:
    """Raises ConfigError if there are several processes, for what needs one."""
    if jax.process_count() > 1:
        raise ConfigError(f"{what}, by one process; leave --coordinator out")


def check_rows(hyperparams: Hyperparams, keys: jax.Array) -> None:
    """Raises ConfigError unless `keys` are `[R]` keys of one row or more, and hyperparameters are scalars or `[R]`."""
    if not isinstance(keys, jax.Array | np.ndarray) or keys.ndim != (
        1 if jax.dtypes.issubdtype(keys.dtype, jax.dtypes.prng_key) else 2
    ):
        raise ConfigError("keys must be one key for each row; for four seeds: jax.random.split(jax.random.key(0), 4)")
    if keys.shape[0] == 0:
        raise ConfigError("keys is empty, and one row is trained for each key; use jax.random.split(key, 1) or more")
    for name, value in vars(hyperparams).items():
        if value is not None and np.shape(value) not in ((), keys.shape[:1]):
            raise ConfigError(
                f"{name} has shape {list(np.shape(value))}, but there are {keys.shape[0]} keys; give one value for all "
                "rows, or one for each key"
            )


def check_options(
    config: Config, hyperparams: Hyperparams, params: PyTree = None, callback: Any = None, mesh: Any = None
) -> None:
    """Raises ConfigError for options of `run` that are something else, or parameters of another policy."""
    if callback is not None and not callable(callback):
        raise ConfigError(f"callback={callback!r} must be a function (progress, chunk)")
    if not isinstance(mesh, Mesh | None):
        raise ConfigError(f"mesh={mesh!r} must be a mesh, such as grpo_jax.make_mesh(seeds=2)")
    if params is None or makes_params(params):
        return
    begun = _begun(config, jax.tree.structure(completed(hyperparams, config.hyperparams_class)))
    expected, given = jax.tree.structure(begun.out_info.params), jax.tree.structure(params)
    if given != expected:
        raise ConfigError(f"params have the structure {given}, but the policy's is {expected}")


def makes_params(params: PyTree) -> bool:
    """Whether these are not parameters, but a function that makes them. Modules of other libraries may be both."""
    return callable(params) and jax.tree_util.all_leaves([params])


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


def try_on_shapes(config: Config, hyperparams: Hyperparams) -> Metrics:
    """Runs `init` and a train step on shapes, once for each config and structure of hyperparameters (which are None).

    Returns the shapes of the metrics. Raises ConfigError for an algorithm, a network, a distribution, an optimiser or a
    schedule that does not fit, with what to write instead.
    """
    structure = jax.tree.structure(completed(hyperparams, config.hyperparams_class))
    key = "shapes", structure, jax.config.jax_enable_x64
    return kept_with(config, key, lambda: _try_on_shapes(config, structure))


def _try_on_shapes(config: Config, structure: Any) -> Metrics:
    check_schedule(config.schedule)
    if is_custom(config.action_distribution) or not isinstance(config.network, MLP | Transformer):
        _check_distribution(config)
    try:
        with jax.disable_jit(False):  # which would trace every step of a loop
            state = _begun(config, structure).out_info
            after, metrics = jax.eval_shape(functools.partial(_step, config), state)
    except ConfigError:
        raise
    except Exception as error:  # of a custom slot, or other code of the user
        advice = _advice(config, error)
        raise ConfigError(f"the algorithm and this configuration do not fit: {in_short(error)}{advice}") from error
    if difference := first_difference(state, after):
        path, before, changed = difference
        raise ConfigError(
            f"the state's {path} is {before} before an iteration, but {changed} after it; both must have the same "
            "structure, shapes and dtypes"
        )
    return metrics


def _begun(config: Config, structure: Any) -> jax.stages.Traced:
    """The trace of what makes the state before the first iteration."""
    begin, key = jax.jit(functools.partial(initial_state, config)), jax.eval_shape(jax.random.key, 0)
    hyperparams = structure.unflatten([jax.ShapeDtypeStruct((), jnp.float32)] * structure.num_leaves)
    return kept_with(config, ("begun", structure, jax.config.jax_enable_x64), lambda: begin.trace(key, hyperparams))


def _step(config: Config, state: TrainState) -> tuple[TrainState, Metrics]:
    """A train step; the outcome of a host side is 0."""
    zeros = jax.tree.map(jnp.zeros_like, outcome_shapes(config.env, config.num_envs))
    length = None if config.env.host is None else rounded_length(1, config.window_steps)  # compiled most often
    return make_learn(config, length)(state, make_play(config)(state), zeros)


def check_read(*runs: tuple[Config, Hyperparams]) -> None:
    """Raises ConfigError for hyperparameters that are not the defaults although none of these runs reads them."""
    unread: dict[str, Any] = {}
    for _, hyperparams in runs:
        unread |= changed(hyperparams)
    for config, hyperparams in runs:
        unread = {name: unread[name] for name in unread_fields(config, hyperparams, unread)}
    if unread:
        algorithms = " or ".join(dict.fromkeys(name_of(config.algorithm) for config, _ in runs))
        shown = ", ".join(f"{name}={value}" for name, value in unread.items())
        known = ((name, algorithms_with(name)) for name in unread)
        readers = "".join(f"; {name} is read by {' and '.join(found)}" for name, found in known if found)
        raise ConfigError(f"changed, but not read by {algorithms}: {shown}; leave it out{readers}")


def changed(hyperparams: Hyperparams) -> dict[str, Any]:
    """The values that a train step computes with, where they are not the defaults in float32."""
    values = {name: value for name, value in vars(hyperparams).items() if name not in BUDGETS and value is not None}
    defaults = {name: hyperparams.__dataclass_fields__[name].default for name in values}
    return {
        name: value
        for name, value in values.items()
        if defaults[name] is None or np.any(np.asarray(value, np.float32) != np.float32(defaults[name]))
    }


def unread_fields(config: Config, hyperparams: Hyperparams, names: Iterable[str]) -> list[str]:
    """Those of the hyperparameters on which neither a train step nor the state before the first one depends."""
    structure, names = jax.tree.structure(completed(hyperparams, config.hyperparams_class)), list(names)
    if not names:
        return []
    try_on_shapes(config, hyperparams)
    key = "read", structure, jax.config.jax_enable_x64
    read = kept_with(config, key, lambda: _read_fields(config, structure))
    return [name for name in names if name not in read]


def _read_fields(config: Config, structure: Any) -> set[str]:
    """The hyperparameters that the metrics and the state after an iteration depend on."""
    with jax.disable_jit(False):
        begin = _begun(config, structure)
        step = jax.jit(functools.partial(_step, config)).trace(begin.out_info)
    after, metrics = jax.tree.map(lambda _: True, step.out_info)
    unread = {"hyperparams": jax.tree.map(lambda _: False, after.hyperparams)}
    before = jax.tree.unflatten(jax.tree.structure(after), _inputs_of(step, (after.replace(**unread), metrics)))
    at_first = structure.unflatten(_inputs_of(begin, before.replace(**unread))[1:])  # but for the key
    return {name for each in (before.hyperparams, at_first) for name, is_read in vars(each).items() if is_read}


def _inputs_of(traced: jax.stages.Traced, outputs: PyTree) -> list[bool]:
    """Which inputs those outputs depend on where `outputs` is True; one that is an input does not count."""
    program = traced.jaxpr.jaxpr
    pairs = zip(jax.tree.leaves(outputs), program.outvars, strict=True)
    return dce_jaxpr(program, [wanted and variable not in program.invars for wanted, variable in pairs])[1]


def _advice(config: Config, error: Exception) -> str:
    """What to write instead, if the error came from a function in a slot of the algorithm, or from calling it."""
    if isinstance(error, AttributeError) and isinstance(error.obj, Hyperparams):
        if error.name in OTHER_WORDS:
            return f"; {error.name} is {OTHER_WORDS[error.name]} here"
        return f"; {advice_on(error.name, error.obj)}"
    codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    for slot, call in SLOT_CALLS.items():
        for function in jax.tree.leaves(getattr(config.algorithm, slot), is_leaf=callable):
            code = getattr(function, "__code__", None)
            name = getattr(function, "__qualname__", "")
            if code is not None and (code in codes or (name and f"{name}()" in str(error))):
                advice = '; with_hyperparams(f, "clip_low") passes numbers by name' if "hyperparams" in call else ""
                return f"; {name} fills the slot {slot}, which is called as {call}{advice}"
    return ""


def _check_distribution(config: Config) -> None:
    """Tries every function of a custom distribution on shapes."""
    distribution, space = config.policy.distribution, config.env.action_space
    name = f"action_distribution={function_name(config.action_distribution)}"
    parameters = jax.ShapeDtypeStruct((_NUM_ENVS, distribution.num_parameters), jnp.float32)

    def shapes(part, *arguments):
        with user_code(f"{name}: {part} fails"):
            return jax.eval_shape(getattr(distribution, part), *arguments)

    action, number = shapes("sample", parameters, jax.random.key(0)), jax.ShapeDtypeStruct((_NUM_ENVS,), jnp.float32)
    others = {"mode": ((), action), "log_prob": ((action,), number)}
    others |= {"entropy": ((), number), "kl": ((parameters,), number)}
    for part, (arguments, expected) in others.items():
        if not are_alike(given := shapes(part, parameters, *arguments), expected):
            raise ConfigError(
                f"{name}: {part} gives {describe_arrays(given)} instead of {describe_arrays(expected)} for {_NUM_ENVS} "
                "actions; modes are like samples, the others one number for each action"
            )
    size = () if isinstance(space, Discrete) else (len(space[0]),)
    if getattr(taken := shapes("to_environment", action), "shape", None) != (_NUM_ENVS, *size):
        raise ConfigError(
            f"{name}: to_environment gives {describe_arrays(taken)} for {_NUM_ENVS} actions in {space}; make it "
            f"{[_NUM_ENVS, *size]}"
        )

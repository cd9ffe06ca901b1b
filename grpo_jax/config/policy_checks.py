"""Checks of the policy when a `Config` is made; networks and distributions of the user's own are tried on shapes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.config.descriptions import are_alike, describe_arrays, describe_function
from grpo_jax.config.dry_run import empty_prompts
from grpo_jax.config.fields import Fields
from grpo_jax.environments.spaces import Discrete
from grpo_jax.errors import ConfigError, nearest
from grpo_jax.policies import Distribution, Policy, partition
from grpo_jax.types import PyTree, by_path

BUILT_IN_FIELDS = (
    *("hidden_sizes", "activation", "layer_norm", "conv_channels", "recurrent", "recurrent_size", "shared_critic"),
    *("critic_hidden_sizes", "critic_activation", "hidden_scale", "actor_scale", "critic_scale", "transformer"),
    "actor_observation",
)
"""The fields of the networks that have a name."""

_ACTIVATIONS = ("tanh", "relu", "gelu", "silu", "elu", "leaky_relu", "sigmoid", "softplus")
_NUM_STEPS, _NUM_ENVS = 2, 3


def check_policy(config: Fields) -> None:
    """Checks the fields of the policy, and the functions of a network and a distribution of the user's own."""
    for field in ("network", "action_distribution"):
        _check_value(field, getattr(config, field))
    for field in ("activation", "critic_activation"):
        _check_activation(field, getattr(config, field))
    for field in ("critic_hidden_sizes", "critic_activation"):
        if config.shared_critic and getattr(config, field) is not None:
            raise ConfigError(
                f"{field}={getattr(config, field)!r} is for a critic that is a network of its own, but "
                "shared_critic=True; leave out one of the two"
            )
    if config.has_own_network:
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
        for field in BUILT_IN_FIELDS:
            if getattr(config, field) != defaults[field]:
                raise ConfigError(
                    f"{field}={getattr(config, field)!r} has no effect on a network of your own; leave it out, and set "
                    "it in the network"
                )
    if config.has_own_network or config.has_own_distribution:
        policy = _call("network", config, lambda: config.policy)
        if not isinstance(policy, Policy):
            raise ConfigError(
                f"{_name(config, 'network')} gives {type(policy).__name__}, but must give a Policy; write a function "
                "(observation, distribution, critic) -> Policy, such as one that returns make_pure_policy(...)"
            )
        _check_distribution(config, policy.distribution)
    if config.has_own_network:
        _check_network(config, policy)
    if config.policy.trainable is not None:
        _check_trainable(config)


def _check_value(field: str, value: Any) -> None:
    if not isinstance(value, str) and not callable(value):
        raise ConfigError(f"{field}={value!r} must be a name, a path 'package.module:name' or a function")
    try:
        hash(value)
    except TypeError as error:
        raise ConfigError(f"{field}={value!r} cannot be hashed; use a function or a frozen dataclass") from error


def _check_activation(field: str, name: str | None) -> None:
    if name is None and field == "critic_activation":
        return
    activation = getattr(nn, str(name), None)
    if not callable(activation) or isinstance(activation, type):
        raise ConfigError(f"unknown {field} {name!r}: {nearest(str(name), _ACTIVATIONS)}")


def _check_network(config: Fields, policy: Policy) -> None:
    """Tries every function of the policy on shapes."""
    name, num_parameters, num_free = _name(config, "network"), *policy.distribution[:2]
    key, observation = jax.random.key(0), config.env.observation
    params = _shapes("network", config, "init", policy.init, key)
    _check_params(name, params)

    def observations(*shape):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*shape, *leaf.shape), leaf.dtype), observation)

    def check(function, results, shape, batch):
        """Parameters and values of these leading dimensions."""
        parameters, value = results
        size = num_parameters - num_free
        free = f", followed by the distribution's {num_free} free ones" if num_free else ""
        _check_array(
            f"{name}: {function} gives distribution parameters", parameters, (*shape, num_parameters),
            f"the outputs must be [{batch}, {size}] (distribution.num_outputs){free}",
        )  # fmt: skip
        if not policy.has_critic and config.algorithm.critic is not None or policy.has_critic and value is None:
            raise ConfigError(
                f"{name}: {function} gives no value, but the algorithm has a critic; return one, [{batch}]"
            )
        if value is not None:
            _check_array(f"{name}: {function} gives values", value, shape, f"they must be [{batch}]")

    def start(params):
        return policy.initial_carry(params, _NUM_ENVS, empty_prompts(config.env, _NUM_ENVS))

    carry = _shapes("network", config, "initial_carry", start, params)
    *results, after = _shapes("network", config, "step", policy.step, params, observations(_NUM_ENVS), carry)
    check("step", results, (_NUM_ENVS,), "N")
    if not are_alike(carry, after):
        raise ConfigError(
            f"{name}: the carry before a step is {describe_arrays(carry)}, but after it {describe_arrays(after)}; both "
            "must have the same structure, shapes and dtypes"
        )
    is_first = jax.ShapeDtypeStruct((_NUM_STEPS, _NUM_ENVS), bool)
    arguments = params, observations(*is_first.shape), jax.eval_shape(policy.sequence_carry, carry), is_first
    check("sequence", _shapes("network", config, "sequence", policy.sequence, *arguments), is_first.shape, "S, N")
    if policy.features is not None:
        features = _shapes("network", config, "features", policy.features, *arguments)
        if getattr(features, "ndim", None) != 3 or features.shape[:2] != is_first.shape:
            raise ConfigError(f"{name}: features are {describe_arrays(features)}, but must be one array [S, N, F]")


def _check_trainable(config: Fields) -> None:
    params = jax.eval_shape(config.policy.init, jax.random.key(0))
    trained, _ = _call("network", config, lambda: partition(config.policy, params), ": trainable")
    if not jax.tree.leaves(trained):
        raise ConfigError(
            f"{_name(config, 'network')}: trainable is False for every parameter, so nothing would be trained; make it "
            f"True for some of {', '.join(by_path(params))}"
        )


def _check_params(name: str, params: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ConfigError(
                f"{name}: init gives {jax.tree_util.keystr(path)} of type {leaf.dtype}, but the optimiser needs "
                "floating-point arrays; leave the others out"
            )


def _check_distribution(config: Fields, distribution: Distribution) -> None:
    """Tries every function of a distribution on shapes."""
    name, space = _name(config, "action_distribution"), config.env.action_space
    if not 0 <= distribution.num_free <= distribution.num_parameters or distribution.num_parameters < 1:
        raise ConfigError(
            f"{name}: num_parameters={distribution.num_parameters} and num_free={distribution.num_free}; use at least "
            "one parameter, and no more free ones than there are"
        )
    batch = (_NUM_ENVS,)
    parameters = jax.ShapeDtypeStruct((*batch, distribution.num_parameters), jnp.float32)

    def shapes(function, *arguments):
        return _shapes("action_distribution", config, function, getattr(distribution, function), *arguments)

    action = shapes("sample", parameters, jax.random.key(0))
    mode = shapes("mode", parameters)
    if not are_alike(action, mode):
        raise ConfigError(
            f"{name}: samples are {describe_arrays(action)}, but modes {describe_arrays(mode)}; make them alike"
        )
    for function, arguments in (("log_prob", (action,)), ("entropy", ()), ("kl", (parameters,))):
        result = shapes(function, parameters, *arguments)
        _check_array(f"{name}: {function} gives", result, batch, "it must be [N], one number for each action")
    size = () if isinstance(space, Discrete) else (len(space[0]),)
    taken = shapes("to_environment", action)
    if getattr(taken, "shape", None) != (*batch, *size):
        raise ConfigError(
            f"{name}: to_environment gives {describe_arrays(taken)} for {_NUM_ENVS} actions in {space}; make it "
            f"{list((_NUM_ENVS, *size))}"
        )


def _check_array(what: str, array: Any, shape: tuple[int, ...], instead: str) -> None:
    if not are_alike(array, jax.ShapeDtypeStruct(shape, jnp.float32)):
        raise ConfigError(f"{what} {describe_arrays(array)} instead of float32{list(shape)}; {instead}")


def _shapes(field: str, config: Fields, part: str, function: Callable, *arguments: PyTree) -> Any:
    return _call(field, config, lambda: jax.eval_shape(function, *arguments), f": {part}")


def _call(field: str, config: Fields, function: Callable, part: str = "") -> Any:
    """The result of the user's own code; any error in it is a ConfigError with its name."""
    try:
        return function()
    except ConfigError:
        raise
    except Exception as error:
        message = str(error).strip() or "no message"
        raise ConfigError(f"{_name(config, field)}{part} fails with {type(error).__name__}: {message}") from error


def _name(config: Fields, field: str) -> str:
    return describe_function(field, getattr(config, field))

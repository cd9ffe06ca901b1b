"""Custom networks: policies from two pure functions, and checks of what the functions of a policy give."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.errors import ConfigError, are_alike, describe_arrays, function_name, user_code
from grpo_jax.importing import import_custom
from grpo_jax.observations import leading_shape
from grpo_jax.policies.distributions import Distribution
from grpo_jax.policies.policy import Policy
from grpo_jax.types import PyTree, by_path


def make_pure_policy(
    init: Callable,
    apply: Callable,
    observation: PyTree,
    distribution: Distribution,
    critic: bool,
    *,
    initial_carry: PyTree | Callable | None = None,
    features: Callable | None = None,
) -> Policy:
    """A policy from pure functions, such as the `init` and `apply` of a flax module.

        def network(observation, distribution, critic):
            module = Module(distribution.num_outputs)
            return make_pure_policy(module.init, module.apply, observation, distribution, critic)

        Config(network=network)

    The policy's parameters are `{"network": params}`, with an entry "free" for the free parameters of the distribution.

    Args:
      init: `(key, observation [1, ...]) -> params`, a pytree of floating-point arrays.
      apply: `(params, observation [N, ...]) -> outputs [N, distribution.num_outputs], value [N]`, both float32. The
        value may be None if `critic` is false, and is ignored then. With an initial carry: one step, `(params,
        observation [N, ...], carry) -> outputs, value, carry`, which the update scans over the sequence, with the carry
        reset at the first step of each episode.
      observation, distribution, critic: the arguments of the network function.
      initial_carry: the carry of one environment at the start of an episode, a pytree of arrays. None: the policy has
        no carry.
      features: `(params, observation [N, ...]) -> [N, F]`, the input of the actor's head, for penalties that read
        `prediction.features`. With an initial carry: `(params, observation, carry) -> [N, F]`.

    Raises:
      ConfigError: from the policy's `init`, if there are no parameters.
    """
    has_carry = initial_carry is not None

    def init_all(key):
        example = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), observation)
        params = init(key, example)
        if not jax.tree.leaves(params):
            raise ConfigError(f"init gives {params!r}, which holds no arrays; return the parameters of the network")
        return {"network": params} | distribution.init_free()

    def initial(params, num_envs, prompt=None):
        carry = initial_carry if has_carry else ()
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_envs, *jnp.shape(leaf))), carry)

    def step(params, observation, carry):
        if has_carry:
            outputs, value, carry = apply(params["network"], observation, carry)
        else:
            outputs, value = apply(params["network"], observation)
        return distribution.join_free(outputs, params), value if critic else None, carry

    def features_step(params, observation, carry):
        if has_carry:
            return features(params["network"], observation, carry), step(params, observation, carry)[2]
        return features(params["network"], observation), carry

    over_sequence = functools.partial(_over_sequence, initial if has_carry else None)
    return Policy(
        init=init_all,
        initial_carry=initial,
        step=step,
        sequence=lambda *arguments: tuple(over_sequence(step, *arguments)),
        distribution=distribution,
        has_critic=critic,
        has_carry=has_carry,
        features=features and (lambda *arguments: over_sequence(features_step, *arguments)[0]),
    )


def _over_sequence(initial: Callable | None, step: Callable, params, observations, carry, is_first) -> list[PyTree]:
    """The outputs of a step, all but the carry, for a sequence `[S, N, ...]`; `initial` is None without a carry."""
    if initial is None:
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), observations)
        *outputs, _ = step(params, flat, carry)
        return jax.tree.map(lambda leaf: leaf.reshape(*is_first.shape, *leaf.shape[1:]), outputs)
    fresh = initial(params, is_first.shape[1])

    def body(carry, now):
        observation, first = now

        def reset(new, old):
            return jnp.where(first.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

        *outputs, carry = step(params, observation, jax.tree.map(reset, fresh, carry))
        return carry, outputs

    return jax.lax.scan(body, carry, (observations, is_first))[1]


def make_custom_policy(
    network: str | Callable, observation: PyTree, distribution: Distribution, critic: bool
) -> Policy:
    """The policy of a custom network, whose functions check their outputs.

    Args:
      network: a function `(observation, distribution, critic) -> Policy`, its path "package.module:name", or a module
        of flax linen that gives outputs and a value, or its class, which is called with the number of outputs.
      observation, distribution, critic: its arguments.

    Raises:
      ConfigError: the network gives something else, or fails. Its functions raise ConfigError for parameters that are
        not floating-point, or statistics that gradient steps would change, for outputs, values or features of the wrong
        shape or dtype, and for a carry that changes.
    """
    name = f"network={function_name(network)}"
    network = import_custom(network, "network")
    with user_code(f"{name} fails"):
        if isinstance(network, type) and issubclass(network, nn.Module):
            network = network(distribution.num_outputs)
        if is_module := isinstance(network, nn.Module):
            network = functools.partial(make_pure_policy, network.init, network.apply)
        policy = network(observation, distribution, critic)
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"{name} gives {type(policy).__name__}, but must give a Policy; write a function "
            "(observation, distribution, critic) -> Policy, such as one that returns make_pure_policy(...)"
        )
    family = policy.distribution
    free = f", followed by the distribution's {family.num_free} free ones" if family.num_free else ""

    def check_outputs(part, results, shape, batch):
        """Parameters and values of these leading dimensions."""
        parameters, value = results
        _check_array(
            f"{name}: {part} gives distribution parameters", parameters, (*shape, family.num_parameters),
            f"the outputs must be [{batch}, {family.num_outputs}] (distribution.num_outputs){free}",
        )  # fmt: skip
        if critic and (value is None or not policy.has_critic):
            raise ConfigError(f"{name}: {part} gives no value, but the algorithm has a critic; return one, [{batch}]")
        if value is not None:
            _check_array(f"{name}: {part} gives values", value, shape, f"they must be [{batch}]")

    def check_step(results, params, observation, carry):
        *outputs, new_carry = results
        check_outputs("step", outputs, leading_shape(observation, 1), "N")
        if not are_alike(carry, new_carry):
            raise ConfigError(
                f"{name}: the carry before a step is {describe_arrays(carry)}, but after it "
                f"{describe_arrays(new_carry)}; both must have the same structure, shapes and dtypes"
            )

    def check_features(x, params, observation, carry, is_first):
        if getattr(x, "ndim", None) != 3 or x.shape[:2] != is_first.shape:
            raise ConfigError(f"{name}: features are {describe_arrays(x)}, but must be one array [S, N, F]")

    def checked(part, check):
        def call(*arguments):
            with user_code(f"{name}: {part} fails", "; apply gives outputs, value" if part == "step" else ""):
                results = jax.tree.map(jnp.asarray, getattr(policy, part)(*arguments))
            check(results, *arguments)
            return results

        return call

    checks = {
        "init": lambda params, key: _check_parameters(name, policy, params, is_module),
        "initial_carry": lambda *_: None,
        "step": check_step,
        "sequence": lambda results, *inputs: check_outputs("sequence", results, inputs[-1].shape, "S, N"),
        "features": check_features,
    }
    changed = {part: checked(part, check) for part, check in checks.items() if getattr(policy, part) is not None}
    return policy._replace(**changed)


_COLLECTIONS = {"batch_stats", "cache", "intermediates", "perturbations"}  # of flax, beside its params
_INSTEAD = (
    "Gradient steps change all parameters, and running statistics are none: write a layer without, such as LayerNorm, "
    "or normalize_observations=True, or keep them as they are: the policy's field trainable"
)


def _check_parameters(name: str, policy: Policy, params: PyTree, is_module: bool) -> None:
    """Raises ConfigError for arrays that are no parameters, but would be changed by gradient steps."""
    for path, leaf in by_path(params).items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ConfigError(
                f"{name}: init gives {path} of type {leaf.dtype}, but the optimiser needs floating-point arrays; "
                f"leave the others out. {_INSTEAD}"
            )
        with user_code(f"{name}: trainable fails"):
            is_trained = policy.trainable is None or policy.trainable(path)
        parts = path.split("/")
        beside_params = is_module and parts[0] == "network" and parts[1] != "params"
        if is_trained and (beside_params or not _COLLECTIONS.isdisjoint(parts)):
            raise ConfigError(f"{name}: init gives {path}, which is no parameter. {_INSTEAD}")


def _check_array(what: str, array: Any, shape: tuple[int, ...], instead: str) -> None:
    if not are_alike(array, jax.ShapeDtypeStruct(shape, jnp.float32)):
        raise ConfigError(f"{what} {describe_arrays(array)} instead of float32{list(shape)}; {instead}")

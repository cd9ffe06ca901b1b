"""Custom networks, whose outputs are checked wherever their functions are called or traced."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.errors import ConfigError, are_alike, describe_arrays, describe_function, user_code
from grpo_jax.importing import import_custom
from grpo_jax.observations import leading_shape
from grpo_jax.policies.distributions import Distribution
from grpo_jax.policies.policy import Policy
from grpo_jax.policies.pure_policy import make_pure_policy
from grpo_jax.types import PyTree, by_path


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
    name = describe_function("network", network)
    network = import_custom(network, "network")
    if isinstance(network, type) and issubclass(network, nn.Module):
        network = network(distribution.num_outputs)
    is_module = isinstance(network, nn.Module)
    if is_module:
        policy = make_pure_policy(network.init, network.apply, observation, distribution, critic)
    else:
        with user_code(f"{name} fails"):
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
        if (critic and not policy.has_critic) or (policy.has_critic and value is None):
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
            with user_code(f"{name}: {part} fails"):
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
    "or normalize_observations=True, or keep them as they are with make_pure_policy(..., trainable=...)"
)


def _check_parameters(name: str, policy: Policy, params: PyTree, is_module: bool) -> None:
    """Raises ConfigError for arrays that are no parameters, but would be changed by gradient steps."""
    for path, leaf in by_path(params).items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ConfigError(
                f"{name}: init gives {path} of type {leaf.dtype}, but the optimiser needs floating-point arrays; "
                f"leave the others out. {_INSTEAD}"
            )
        parts, is_trained = path.split("/"), True
        if policy.trainable is not None:
            with user_code(f"{name}: trainable fails"):
                is_trained = policy.trainable(path)
        beside_params = is_module and parts[0] == "network" and parts[1] != "params"
        if is_trained and (beside_params or not _COLLECTIONS.isdisjoint(parts)):
            raise ConfigError(f"{name}: init gives {path}, which is no parameter. {_INSTEAD}")


def _check_array(what: str, array: Any, shape: tuple[int, ...], instead: str) -> None:
    if not are_alike(array, jax.ShapeDtypeStruct(shape, jnp.float32)):
        raise ConfigError(f"{what} {describe_arrays(array)} instead of float32{list(shape)}; {instead}")

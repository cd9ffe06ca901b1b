"""Parameters in two parts: those that gradient steps change, and those that stay frozen.

Each part has the structure of the whole, with None for the leaves of the other part, as in equinox.
"""

from collections.abc import Callable

import jax

from grpo_jax.errors import ConfigError
from grpo_jax.policies.policy import OF_PARAMS, Policy
from grpo_jax.types import PyTree, by_path


def partition(policy: Policy, params: PyTree) -> tuple[PyTree, PyTree]:
    """The trained and the frozen part of the parameters: `(params, None)` if the policy trains all of them.

    Raises:
      ConfigError: it would train none.
    """
    if policy.trainable is None:
        return params, None

    def is_trained(path, _):
        return bool(policy.trainable(jax.tree_util.keystr(path, simple=True, separator="/")))

    trained = jax.tree_util.tree_map_with_path(is_trained, params)
    if not any(jax.tree.leaves(trained)):
        raise ConfigError(
            "trainable is False for every parameter of the network, so nothing would be trained; make it True for some "
            f"of {', '.join(by_path(params))}"
        )
    return _select(trained, params, True), _select(trained, params, False)


def combine(trained: PyTree, frozen: PyTree) -> PyTree:
    """The whole parameters, from the two parts of a `partition`."""
    if frozen is None:
        return trained
    return jax.tree.map(lambda x, y: y if x is None else x, trained, frozen, is_leaf=lambda x: x is None)


def bind_frozen(policy: Policy, frozen: PyTree) -> Policy:
    """The policy as a function of its trained parameters, with the frozen part as constants."""
    if frozen is None:
        return policy

    def bound(function: Callable) -> Callable:
        return lambda trained, *arguments: function(combine(trained, frozen), *arguments)

    def init(key: jax.Array) -> PyTree:
        return partition(policy, policy.init(key))[0]

    return policy.map(bound, OF_PARAMS)._replace(init=init, trainable=None)


def _select(trained: PyTree, params: PyTree, part: bool) -> PyTree:
    return jax.tree.map(lambda is_trained, leaf: leaf if is_trained is part else None, trained, params)

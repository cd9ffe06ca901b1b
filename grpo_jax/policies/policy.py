"""The interface of every policy, and its parameters in two parts: those that gradient steps change, and the rest.

Each part has the structure of the whole, with None for the leaves of the other part, as in equinox.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from grpo_jax.errors import ConfigError
from grpo_jax.policies.distributions import Distribution
from grpo_jax.types import PyTree, by_path


class Policy(NamedTuple):
    """Pure functions of an actor and, if it has one, its critic.

    The carry is what a recurrent policy or a transformer keeps from step to step, each leaf `[N, ...]`; for other
    policies it has no leaves. `is_first` marks the first observation of an episode: `sequence` resets the carry to the
    initial one before it processes that observation. Gradients are by `jax.grad` or `jax.vjp`: `jax.jvp` raises.
    """

    init: Callable  # (key) -> params
    initial_carry: Callable  # (params, num_envs, prompt [num_envs, P] or None) -> carry at the start of an episode
    step: Callable  # (params, observation [N, ...], carry) -> distribution parameters [N, P], value [N] or None, carry
    sequence: Callable  # (params, observation [S, N, ...], carry, is_first [S, N]) -> [S, N, P], value [S, N] or None
    distribution: Distribution
    has_critic: bool
    has_carry: bool  # if so, an output depends on earlier steps, and updates need whole sequences
    sequence_carry: Callable = lambda carry: carry  # (carry) -> the part of it that `sequence` needs
    # (params, observation [S, N, ...], carry, is_first [S, N]) -> [S, N, F], the input of the actor's head; optional
    features: Callable | None = None
    head: Callable | None = None  # (params, features [..., F]) -> distribution parameters [..., P]; optional
    # (params, features [..., F]) -> value [...]; optional, and None if the critic does not share the actor's features
    value_head: Callable | None = None
    # Steps whose distributions an update computes at once, from features and head (see `score`). Rollouts then keep
    # the log-probabilities of actions, but no distributions. None: all at once.
    logits_chunk: int | None = None
    cast: Callable = lambda params: params  # (params) -> params in the dtypes of `step`: once a rollout, not each step
    max_steps: int | None = None  # the most steps that fit into the carry; None: any number
    # (carry, num_steps) -> carry with space for this many steps of an episode, which may be less than before; optional
    resize: Callable | None = None
    # (path such as "actor/Dense_0/kernel") -> bool: gradient steps change this parameter; None: they change all
    trainable: Callable | None = None
    rounding: float = 0.0  # log-probabilities of a rollout and its update differ by this part of their size (bfloat16)
    sampling_mask: Callable | None = None  # (parameters [N, P]) -> bool [N, num_actions]: may be sampled; None: all may

    def map(self, change: Callable[[Callable], Callable], names: tuple[str, ...]) -> "Policy":
        """The policy with changed functions of these names, of those that it has.

        `OF_PARAMS` are the functions whose first argument is the parameters, and `OF_OBSERVATION` those whose second
        one is the observation.
        """
        return self._replace(**{name: change(getattr(self, name)) for name in names if getattr(self, name) is not None})


OF_OBSERVATION = ("step", "sequence", "features")
OF_PARAMS = ("initial_carry", "head", "value_head", *OF_OBSERVATION)


def partition(policy: Policy, params: PyTree) -> tuple[PyTree, PyTree]:
    """The trained and the frozen part of the parameters: `(params, None)` if the policy trains all of them.

    Raises:
      ConfigError: it would train none.
    """
    if policy.trainable is None:
        return params, None

    paths = by_path(params)
    trained = jax.tree.unflatten(jax.tree.structure(params), [bool(policy.trainable(path)) for path in paths])
    if not any(jax.tree.leaves(trained)):
        raise ConfigError(
            "trainable is False for every parameter of the network, so nothing would be trained; make it True for some "
            f"of {', '.join(paths)}"
        )

    def part(of_trained):
        return jax.tree.map(lambda is_trained, leaf: leaf if is_trained is of_trained else None, trained, params)

    return part(True), part(False)


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

    trained = policy.map(bound, OF_PARAMS)
    return trained._replace(init=lambda key: partition(policy, policy.init(key))[0], trainable=None)

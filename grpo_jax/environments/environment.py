"""The interface of every environment: pure functions of an explicit state, without automatic resets."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.environments.codec import Codec, plain_codec
from grpo_jax.environments.spaces import ActionSpace
from grpo_jax.types import PyTree, RewardParts


class Transition(NamedTuple):
    """The result of one step, before any reset."""

    state: Any  # the new state
    observation: PyTree  # of the new state, even if the episode has ended: one array, or any pytree of arrays
    reward: jax.Array  # float32 scalar
    terminated: jax.Array  # bool: the new state is terminal
    truncated: jax.Array  # bool: the time limit ends the episode, and the new state is not terminal
    reward_parts: RewardParts | None = None  # each [K]: the reward is the weighted sum of K parts; None: it has none
    info: Mapping[str, Any] = {}  # what the environment reports beside these: see `Environment.extras`


class HostSide(NamedTuple):
    """What an environment leaves to the host between compiled programs: what groups play, and what it is worth.

    A run is then two programs, the rollout and the update, which call nothing, so that JAX keeps them for the next
    start. Both functions give NumPy arrays for `R` rows (seeds × hyperparameters) at once.
    """

    # (keys, iteration, num_groups) -> the parameters, by name, that groups play, each [R, num_groups, ...]: always the
    # same for the keys [R], with which the rows began, and the number of iterations before
    choose: Callable
    # (states, params), each leaf [R, B, ...] -> RewardParts, as `Environment.outcome` gives, all three [R, B, K]
    outcome: Callable
    # (states, params) -> parameters by name, each [R, B, ...], with which the same rollout is played again, or None to
    # go on with it; None in place of this function: a rollout is played once
    again: Callable | None = None
    in_steps: bool = False  # the outcome is [R, B, max_steps, K], and not [R, B, K]


class Environment(NamedTuple):
    """Pure functions of a single environment; `vmap` runs many in parallel."""

    name: str
    reset: Callable  # (key, params) -> state, observation
    step: Callable  # (key, state, action, params) -> Transition
    params: Mapping[str, Any]  # default value of each traced parameter, a NumPy array
    observation: PyTree  # shape and dtype of each array of one observation, a jax.ShapeDtypeStruct
    action_space: ActionSpace
    action_mask: Callable | None  # (state, params) -> bool [num_actions]: the legal actions; None: all always are
    max_steps: int  # the time limit: an episode is truncated at this length, and earlier only with `truncates_early`
    # If True, a time limit counts as termination (no bootstrapping).
    limit_terminates: bool = False
    # (state, params) -> int32 [P]: the tokens that a policy reads before the first observation, padded with -1
    prompt: Callable | None = None
    task: Any = None  # the `tokens.Task` of a token environment
    on_host: bool = False  # resets or steps call the host, from within compiled programs
    host: HostSide | None = None  # in place of an outcome: one by the host, between compiled programs
    # (states, params), each leaf [B, ...] -> RewardParts [B, K]: the reward of whole episodes, added to that of their
    # last step; or RewardParts [B, max_steps, K]: added to the rewards of their steps, in order. It is called once, on
    # the final states of a rollout, so rollouts must have one episode each.
    outcome: Callable | None = None
    # (state, params) -> int32: the action, counted from 0, that the environment itself takes here; -1: the policy acts
    forced_action: Callable | None = None
    extras: tuple[str, ...] = ()  # the entries of the info that rollouts keep
    # A step can make NaN or inf of a finite state (physics do): rollouts discard such steps, see `Simulator.unroll`.
    can_diverge: bool = False
    reward_names: tuple[str, ...] = ()  # of the K parts of the outcome, for metrics
    truncates_early: bool = False  # the critic then values the observation after every step, in the loop of steps
    own_codec: Codec | None = None  # between the environment's own values and these; None: they are the same
    step_word: str = "environment steps"  # what the console calls steps; each iteration gets a line if it is another

    @property
    def codec(self) -> Codec:
        """Between the environment's own observations and actions and those of policies."""
        return self.own_codec or plain_codec(self.observation)

    @property
    def words(self) -> tuple[str, str]:
        """What tables call the score of an episode, and steps: "return" and "steps", or "reward" and "tokens"."""
        is_default = self.step_word == self._field_defaults["step_word"]
        return ("return", "steps") if is_default else ("reward", self.step_word)


def with_standard_promotion(environment: Environment) -> Environment:
    """The environment, whose own code mixes dtypes as JAX does by default, also where `jax_numpy_dtype_promotion` is
    "strict" for the rest of the program."""

    names = "reset", "step", "action_mask", "prompt", "outcome", "forced_action"
    given = {name: function for name in names if (function := getattr(environment, name)) is not None}
    return environment._replace(**{name: jax.numpy_dtype_promotion("standard")(f) for name, f in given.items()})


def diverged(before: Any, transition: Transition) -> jax.Array:
    """Whether a step made NaN or inf of a number of the state that was finite, of the observation or of the reward."""

    def finite(x):
        return jnp.isfinite(x) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.ones(x.shape, bool)

    states = map(jnp.asarray, jax.tree.leaves(before)), map(jnp.asarray, jax.tree.leaves(transition.state))
    broken = [jnp.any(finite(old) & ~finite(new)) for old, new in zip(*states, strict=True)]
    seen = jax.tree.leaves((transition.observation, transition.reward))
    return jnp.any(jnp.stack([*broken, *(jnp.any(~finite(x)) for x in seen)]))


def threefry(key: jax.Array) -> jax.Array:
    """Converts a key of any generator to one of threefry, the generator for environments.

    Under `vmap` the random numbers of rbg keys depend on the other keys of the batch: equal keys may draw different
    numbers, and different keys equal ones. A threefry key is returned unchanged, raw or typed: an environment may keep
    it in its state, whose type must not change.
    """
    if str(jax.random.key_impl(key)) == "threefry2x32":
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key)[..., :2], impl="threefry2x32")


def transition(
    state: Any, observation: PyTree, reward: jax.Array, terminated: jax.Array, truncated: jax.Array
) -> Transition:
    """A `Transition` with the right dtypes. A step that is both terminated and truncated counts as terminated."""
    terminated = jnp.asarray(terminated, bool)
    return Transition(
        state=state,
        observation=observation,
        reward=jnp.asarray(reward, jnp.float32),
        terminated=terminated,
        truncated=jnp.asarray(truncated, bool) & ~terminated,
    )

"""Warm starts: supervised learning from correct completions, until enough sampled ones are correct."""

import collections
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.config import Config
from grpo_jax.devices.mesh import make_row_mesh, over_rows
from grpo_jax.environments import group_parameters
from grpo_jax.environments.tokens import PAD, Task
from grpo_jax.errors import ConfigError
from grpo_jax.evaluation.generation import answer
from grpo_jax.policies import Policy, combine, partition
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.runs.programs import kept_programs
from grpo_jax.types import PyTree

NUM_ANSWERS = 512  # sampled to measure an accuracy
UPDATES_PER_CHUNK = 25


class WarmStart(NamedTuple):
    """The result of supervised learning, one for each of `R` rows."""

    params: PyTree  # each leaf [R, ...], on the host
    accuracy: np.ndarray  # [R] fraction of sampled completions that are correct, on training prompts
    updates: np.ndarray  # [R] gradient steps


_Learner = collections.namedtuple("_Learner", "params, opt_state, key, accuracy, updates")


def warm_start(config: Config, keys: jax.Array, *, batch_size: int = 128, **options: Any) -> WarmStart:
    """Trains one policy for each key on a token task's solutions, until enough of its sampled answers are correct.

    Args:
      config: of an environment such as "tokens:sort-5", else a ConfigError.
      keys: `[R]`, one for all randomness of each row.
      batch_size: solutions of training prompts in each gradient step.
      options: see `imitate`; `target` is required.
    """
    if config.env.task is None:
        raise ConfigError(f"{config.env.name!r} has no solutions to learn from; use a token task such as tokens:sort-5")

    def loss(params: PyTree, key: jax.Array) -> jax.Array:
        return imitation_loss(config, params, key, batch_size)

    def accuracy(params: PyTree, key: jax.Array) -> jax.Array:
        return answer(config, params, key, num_prompts=NUM_ANSWERS).correct.mean()

    return imitate(config, keys, loss, accuracy, **options)


@kept_programs()
def imitate(
    config: Config,
    keys: jax.Array,
    loss: Callable[[PyTree, jax.Array], jax.Array],
    accuracy: Callable[[PyTree, jax.Array], jax.Array],
    *,
    target: float,
    learning_rate: float = 2e-3,
    max_updates: int = 20_000,
) -> WarmStart:
    """Minimises a loss by Adam for each key, until an accuracy reaches the target.

    Each row stops there, so that all start reinforcement learning from about the same accuracy.

    Args:
      config: its policy is trained.
      keys: `[R]`, one for the initial weights and all randomness of each row.
      loss: `(params, key) -> scalar`, such as `imitation_loss`; the key draws a batch.
      accuracy: `(params, key) -> scalar`; the key draws samples.
      target: fraction of correct samples, in (0, 1]; checked every `UPDATES_PER_CHUNK` updates.
      learning_rate: Adam's step size, positive.
      max_updates: a row stops after this many, even below the target.
    """
    if not (0 < target <= 1 and 0 < learning_rate < math.inf):
        wrong = f"target={target} must be a fraction of right answers, such as 0.5"
        raise ConfigError(f"{wrong}, and learning_rate={learning_rate} a positive number, such as 2e-3")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))

    def start(key: jax.Array) -> _Learner:
        key, key_params = jax.random.split(key)
        params = config.policy.init(key_params)
        opt_state = optimizer.init(partition(config.policy, params)[0])
        return _Learner(params, opt_state, key, jnp.zeros(()), jnp.zeros((), jnp.int32))

    def update(learner: _Learner, _) -> tuple[_Learner, None]:
        key, key_batch = jax.random.split(learner.key)
        trained, frozen = partition(config.policy, learner.params)
        gradient = jax.grad(lambda trained: loss(combine(trained, frozen), key_batch))(trained)
        steps, state = optimizer.update(gradient, learner.opt_state)
        params = combine(optax.apply_updates(trained, steps), frozen)
        return learner._replace(params=params, opt_state=state, key=key, updates=learner.updates + 1), None

    def unfinished(learner: _Learner) -> jax.Array:
        return (learner.accuracy < target) & (learner.updates < max_updates)

    def learn(learner: _Learner) -> _Learner:
        learner, _ = jax.lax.scan(update, learner, length=UPDATES_PER_CHUNK)
        key, key_answer = jax.random.split(learner.key)
        return learner._replace(key=key, accuracy=accuracy(learner.params, key_answer))

    def learn_on(learner: _Learner) -> _Learner:
        return jax.lax.cond(unfinished(learner), learn, lambda learner: learner, learner)

    learners = jax.jit(jax.vmap(start))(keys)
    chunk = jax.jit(over_rows(learn_on, make_row_mesh(len(keys))), donate_argnums=0)
    while unfinished(learners).any():
        learners = chunk(learners)
    return WarmStart(*jax.device_get((learners.params, learners.accuracy, learners.updates)))


def imitation_loss(config: Config, params: PyTree, key: jax.Array, batch_size: int) -> jax.Array:
    """`completion_loss` of the solutions of random problems, `batch_size` of the training prompts; pure."""
    env, policy = config.env, config.policy
    environment_params = group_parameters(env, None, batch_size, 1)
    start = Simulator(env, policy, params).reset(environment_params, key, batch_size)
    problem = start.environment.problem
    solution = jax.vmap(env.task.solution)(problem)
    is_forced = jax.vmap(functools.partial(_is_forced, env.task))
    forced = None if env.task.forced_token is None else is_forced(problem, solution)
    return completion_loss(policy, params, start.policy_carry, start.observation, solution, forced)


def _is_forced(task: Task, problem: PyTree, solution: jax.Array) -> jax.Array:
    """`[max_length]` bool: the tokens of a solution that the environment writes."""
    place = jnp.arange(task.max_length)
    return jax.vmap(lambda t: task.forced_token(problem, jnp.where(place < t, solution, PAD)))(place) >= 0


def completion_loss(
    policy: Policy,
    params: PyTree,
    carry: PyTree,
    observation: jax.Array,
    completions: jax.Array,
    forced: jax.Array | None = None,
) -> jax.Array:
    """Mean of -log p(token | tokens before) over the policy's tokens of completions; pure.

    Args:
      policy, params: of tokens.
      carry: after all tokens of the prompts but the last.
      observation: int `[N]`, the last tokens of the prompts.
      completions: int `[N, L]`, -1 after the end.
      forced: bool `[N, L]`: tokens that the environment writes, which are not learnt; None: none.
    """
    is_learnt = completions >= 0 if forced is None else (completions >= 0) & ~forced
    completions = jnp.maximum(completions, 0).T
    observation = jnp.concatenate([observation[None], completions[:-1]])
    is_first = jnp.zeros(completions.shape, bool).at[0].set(True)
    logits, _ = policy.sequence(params, observation, policy.sequence_carry(carry), is_first)
    return -jnp.mean(policy.distribution.log_prob(logits, completions), where=is_learnt.T)

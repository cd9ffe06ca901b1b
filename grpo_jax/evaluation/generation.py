"""Completions of prompts, and answers to the problems of a token task."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import Config, kept_with
from grpo_jax.devices.execution_plan import ExecutionPlan, resolve_plan
from grpo_jax.environments import Environment, EnvParams, group_parameters
from grpo_jax.environments.environment import transition
from grpo_jax.environments.spaces import Discrete
from grpo_jax.environments.tokens import accuracy, well_formed
from grpo_jax.errors import ConfigError, as_count
from grpo_jax.policies import Policy
from grpo_jax.policies.sampling import with_temperature, with_truncation
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.types import PyTree, by_path


class Sampling(NamedTuple):
    """How completions are sampled."""

    num_samples: int = 1  # completions of each prompt, which is read once for all of them
    num_steps: int | None = None  # the most tokens of a completion; None: as many as the policy's cache holds
    end_token: int | tuple[int, ...] | None = None  # or any of several: a completion's last token; None: has num_steps
    temperature: jax.Array | float = 1.0  # logits are divided by it; 0 takes the most probable token
    top_k: jax.Array | float | None = None  # sample only these most probable tokens; None: all
    top_p: jax.Array | float | None = None  # sample only the most probable tokens of this total probability; None: all
    min_p: jax.Array | float | None = None  # sample only tokens at least this probable, relative to the most probable
    stops: tuple[jax.Array, jax.Array] | None = None  # what finds texts that end a completion too, see `follow`
    answers: jax.Array | None = None  # [N, num_samples, num_steps] int32 tokens that others write; -1: the policy does


class Completions(NamedTuple):
    """Completions of `N` prompts, `num_samples` of each, of at most `num_steps` tokens."""

    tokens: jax.Array  # [N, num_samples, num_steps] int32, -1 after the end
    log_probs: jax.Array  # [N, num_samples, num_steps] under the distribution sampled from, 0 after the end
    lengths: jax.Array  # [N, num_samples] int32, including the end token


class Answers(NamedTuple):
    """Completions of `N` prompts of a token task, `K` of each."""

    prompts: jax.Array  # [N, P], -1 for padding
    completions: jax.Array  # [N, K, max_steps], -1 after the end
    correct: jax.Array  # [N, K] bool
    well_formed: jax.Array  # [N, K] bool: in the task's format, correct or not


def generate(
    policy: Policy,
    params: PyTree,
    prompts: jax.Array,
    key: jax.Array,
    sampling: Sampling | None = None,
    *,
    plan: str | ExecutionPlan = "auto",
) -> Completions:
    """Samples completions, token by token, as rollouts do. Pure: `jit` it, `vmap` it over params and keys.

    Args:
      policy: a policy with prompts, such as the `config.policy` of a transformer.
      params: parameters of the policy, such as `state.params`.
      prompts: `[N, P]` int32, at least one token each; -1 where there is none, on either side.
      key: of the samples.
      sampling: temperature, number of samples and the like; None: one sample of each prompt.
      plan: the layout of the rollout; one with `steps_per_check` stops when all completions have ended.

    Raises:
      ConfigError: the policy reads no prompts, its cache holds fewer tokens, a number is not a positive integer, or
        a prompt has no token or one that the policy lacks.
    """
    if policy.max_steps is None:
        raise ConfigError("generate needs a policy that reads prompts: a transformer, Config(network='transformer')")
    sampling = Sampling() if sampling is None else sampling
    num_samples = as_count("num_samples", sampling.num_samples)
    num_steps = as_count("num_steps", policy.max_steps if sampling.num_steps is None else sampling.num_steps)
    if num_steps > policy.max_steps:
        raise ConfigError(
            f"num_steps={num_steps}, but the policy's cache holds max_steps={policy.max_steps}; use fewer, or make a "
            "policy with more by make_token_policy"
        )
    limits = {"top_k": np.inf, "top_p": 1.0, "min_p": 0.0}
    if given := {name: value for name, value in sampling._asdict().items() if name in limits and value is not None}:
        given = limits | given
    is_greedy = isinstance(sampling.temperature, int | float) and sampling.temperature == 0
    fixed = policy._replace(has_critic=False), num_samples, num_steps, resolve_plan(plan), is_greedy
    ends = _ends(sampling.end_token, policy.distribution.num_parameters), sampling.stops, sampling.answers
    return _complete(fixed, params, as_prompt_tokens(prompts, params), ends, key, sampling.temperature, given)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _complete(fixed, params, prompts, ends, key, temperature, truncation):
    policy, num_samples, num_steps, plan, is_greedy = fixed
    policy = with_temperature(policy, temperature)
    if truncation:
        policy = with_truncation(policy, **truncation)
    environment = _continuation(policy.distribution.num_parameters, num_steps, *ends[:2], ends[2] is not None)
    texts = {"text": jnp.repeat(jax.vmap(_end_at_the_right)(prompts), num_samples, axis=0)}
    if ends[2] is not None:
        texts["answers"] = jnp.reshape(ends[2], (-1, num_steps))
    simulator = Simulator(environment, policy, params, plan=plan)
    count = len(prompts) * num_samples
    end, trajectory = simulator.play(texts, key, count, group_size=num_samples, greedy=is_greedy)

    def by_prompt(leaf):
        return leaf.T.reshape(-1, num_samples, *leaf.shape[:-1])

    return Completions(
        tokens=by_prompt(jnp.where(trajectory.valid, trajectory.action, -1)),
        log_probs=by_prompt(jnp.where(trajectory.valid, trajectory.log_prob, 0.0)),
        lengths=by_prompt(end.episode_length),
    )


def as_prompt_tokens(prompts: Any, params: PyTree) -> jax.Array:
    """The tokens of prompts, int32 `[N, P]`; ConfigError for anything else, and tokens beyond the embeddings."""
    is_traced = isinstance(prompts, jax.core.Tracer)
    try:
        tokens = prompts if is_traced else np.asarray(prompts)
    except ValueError:  # rows of several lengths
        tokens = np.zeros(0)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ConfigError(f"prompts are whole numbers [N, P], -1 where there is no token, but not {prompts!r:.200}")
    if not is_traced and not (tokens >= 0).any(axis=1).all():
        raise ConfigError("a prompt has no tokens; give each at least one, such as the one that begins a text")
    sizes = [leaf.shape[-2] for path, leaf in by_path(params).items() if path.endswith("embedding")]
    if not is_traced and sizes and (largest := int(tokens.max(initial=0))) >= min(sizes):
        raise ConfigError(f"prompts have the token {largest}, but the policy {min(sizes)}; use its own tokenizer")
    return jnp.asarray(tokens, jnp.int32)


def _ends(end_token: Any, vocab_size: int) -> jax.Array:
    """The tokens that end a completion, int `[E]`; ConfigError for others than the policy's."""
    is_traced = isinstance(end_token, jax.core.Tracer)
    ends = (end_token if is_traced else np.asarray(() if end_token is None else end_token)).reshape(-1)
    known = ends.size == 0 or jnp.issubdtype(ends.dtype, jnp.integer)
    if not known or not (is_traced or ((0 <= ends) & (ends < vocab_size)).all()):
        raise ConfigError(f"end_token={end_token!r} must be one of the {vocab_size} tokens, or several of them")
    return jnp.asarray(ends, jnp.int32)


def _end_at_the_right(text: jax.Array) -> jax.Array:
    """The tokens `[P]` moved so that the last one is at the end."""
    last = jnp.max(jnp.where(text >= 0, jnp.arange(len(text)), 0))
    return jnp.roll(text, -1 - last)


def follow(
    ends: jax.Array, stops: Any, answers: jax.Array | None, found: Any, time: jax.Array, token: jax.Array
) -> tuple[Any, jax.Array]:
    """The states of the searches for `S` texts after one more token of a completion, and whether this one ends it.

    One of `ends` does, or the last of a text: `stops` are int `[S, Q, V]`, the next state of each search for each state
    and token, and int `[S]`, the states at the end, as of `grpo_jax.language.tokenizer.stop_moves`. At first the states
    are 0. No token of `answers`, int `[L]`, negative elsewhere, ends it, nor what comes before one.
    """
    is_end = jnp.any(token == ends)
    if stops is not None:
        moves, states = map(jnp.asarray, stops)
        found = moves[jnp.arange(len(states)), found, token]
        is_end |= jnp.any(found == states)
    if answers is None:
        return found, is_end
    here, after = (answers.at[time + i].get(mode="fill", fill_value=-1) >= 0 for i in (0, 1))
    return jax.tree.map(lambda count: jnp.where(here, 0, count), found), is_end & ~here & ~after


def _continuation(vocab_size: int, max_steps: int, ends: jax.Array, stops: Any, has_answers: bool) -> Environment:
    """An environment that continues a text, its parameter, by one token a step; all rewards are 0."""

    def reset(key, params):
        searches = () if stops is None else jnp.zeros(len(stops[1]), jnp.int32)
        return (jnp.zeros((), jnp.int32), searches), params["text"][-1]

    def step(key, state, action, params):
        (time, searches), action = state, jnp.asarray(action, jnp.int32)
        searches, is_end = follow(ends, stops, params.get("answers"), searches, time, action)
        return transition((time + 1, searches), action, 0.0, is_end, time + 1 >= max_steps)

    return Environment(
        name="continuation",
        reset=reset,
        step=step,
        params={},
        observation=jax.ShapeDtypeStruct((), jnp.int32),
        action_space=Discrete(vocab_size),
        action_mask=None,
        max_steps=max_steps,
        prompt=lambda state, params: params["text"][:-1],  # the last token is the first observation
        forced_action=(lambda state, params: params["answers"][state[0]]) if has_answers else None,
    )


def answer(
    config: Config,
    params: PyTree,
    key: jax.Array,
    *,
    num_prompts: int = 128,
    num_samples: int = 1,
    greedy: bool = False,
    env_params: EnvParams = None,
) -> Answers:
    """Samples answers to prompts of a token task and scores them. Pure: `jit` it, `vmap` it.

    Args:
      config: the config of an environment such as "tokens:sort-5".
      params: parameters of the policy, such as `state.params`. It samples at temperature 1, from all tokens.
      key: of prompts and completions.
      num_prompts, num_samples: number of prompts, and of completions of each.
      greedy: take the most probable tokens instead of samples.
      env_params: instead of the config's, such as `{"held_out": 1}` for prompts that training never draws.

    Raises:
      ConfigError: the environment is not a token task.
    """
    env, task = config.env, config.env.task
    if task is None:
        raise ConfigError(f"{env.name!r} is not a token task, so it has no correct answers; use evaluate")

    def play(params, environment_params, key):
        simulator = Simulator(env, config.policy._replace(has_critic=False), params, plan=config.plan)
        count = num_prompts * num_samples
        end, _ = simulator.play(environment_params, key, count, group_size=num_samples, greedy=greedy)
        problem, tokens = end.environment.problem, end.environment.tokens
        scores = (jax.vmap(functools.partial(score, task))(problem, tokens) for score in (accuracy, well_formed))
        completions, prompts = tokens.reshape(num_prompts, num_samples, -1), jax.vmap(task.prompt)(problem)
        return Answers(
            prompts[::num_samples], completions, *(each.reshape(completions.shape[:2]) > 0 for each in scores)
        )

    program = kept_with(config, ("answer", num_prompts, num_samples, greedy), lambda: jax.jit(play, inline=True))
    return program(params, group_parameters(env, env_params, num_prompts, num_samples), key)

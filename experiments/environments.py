"""Every environment of the other suites, built and stepped: `python -m experiments.environments`."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.limits import Count
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.environments import Box, Environment, MultiDiscrete, group_parameters, make_environment
from grpo_jax.environments.suites import NAMES
from grpo_jax.errors import ConfigError, nearest
from grpo_jax.importing import pip_install

from .harness.summaries import SUMMARY, TABLE, read_results, write_results

LIMIT = 20
"""The lowered time limit, so that truncation is seen."""


@dataclasses.dataclass
class Arguments:
    """Builds environments, steps each with random legal actions, and checks truncation, rewards and observations.

    The results of an environment are written as soon as it is done, beside those that the folder has already.
    """

    suites: tuple[str, ...] = ()
    """Suites to walk, such as navix; by default all that are installed."""
    environments: tuple[str, ...] = ()
    """Names such as navix:Navix-Empty-5x5-v0, which are run even if the folder has their results."""
    num_envs: Count = 8
    """Parallel environments of each."""
    num_steps: Count = 100
    """Steps of each environment."""
    out: Path = Path("runs/environments")
    """Folder for the results."""


def main(arguments: Arguments) -> None:
    results = read_results(arguments.out)
    names = arguments.environments or tuple(name for name in all_names(arguments.suites) if name not in results)
    for i, name in enumerate(names, start=1):
        started = time.perf_counter()
        results[name] = examine(name, arguments.num_envs, arguments.num_steps)
        write_results(dict(sorted(results.items())), arguments.out, HEADER, row)
        seconds = time.perf_counter() - started
        print(f"[{i}/{len(names)}] {name}: {results[name]['problem'] or 'ok'} ({seconds:.0f} s)", flush=True)
    num_ok = sum(not result.get("problem") for result in results.values())
    print(f"{num_ok} of {len(results)} environments have no problem. Results in {arguments.out}: {TABLE}, {SUMMARY}")


def all_names(suites: tuple[str, ...]) -> list[str]:
    """The names of all environments of suites, by default of those that are installed."""
    names = []
    for suite in suites or NAMES:
        if suite not in NAMES:
            raise ConfigError(f"unknown suite {suite!r}: {nearest(suite, NAMES)}")
        try:
            names += [f"{suite}:{name}" for name in NAMES[suite]() if not name.startswith("XLand")]
        except ImportError as error:
            if suites:
                raise ConfigError(f"{suite} is not installed: {pip_install(suite)} ({error})") from error
            print(f"{suite} is not installed, so it is left out")
    return names


def examine(name: str, num_envs: int, num_steps: int) -> dict[str, Any]:
    """The result of an environment: its spaces, limit and speed, and its problem, "" if there is none."""
    result: dict[str, Any] = {"problem": ""}
    try:
        env = make_environment(name)
        shapes = [f"{list(leaf.shape)} {leaf.dtype}" for leaf in jax.tree.leaves(env.observation)]
        is_box = isinstance(env.action_space, Box)
        actions = f"Box of {len(env.action_space.low)}" if is_box else str(env.action_space)
        actions += ", masked" if env.action_mask else ""
        result |= {"observation": ", ".join(shapes), "actions": actions, "limit": env.max_steps}
        limit = min(LIMIT, env.max_steps)
        result |= step_randomly(make_environment(name, {"max_steps_in_episode": limit}), num_envs, num_steps)
    except Exception as error:  # each package has its own errors
        first_line, *_ = str(error).strip().splitlines() or [""]
        result["problem"] = f"{type(error).__name__}: {first_line}"
    return result


def step_randomly(env: Environment, num_envs: int, num_steps: int) -> dict[str, Any]:
    """The speed of random play, and what is wrong with it."""
    keys, params = jax.random.split(jax.random.key(0), 2), group_parameters(env, None, num_envs, 1)
    times = [time.perf_counter()]
    play = jax.jit(lambda key: random_play(env, params, key, num_envs, num_steps)).lower(keys[0]).compile()
    times.append(time.perf_counter())
    jax.block_until_ready(play(keys[0]))
    times.append(time.perf_counter())
    checks, num_ended = jax.block_until_ready(play(keys[1]))
    rate = num_envs * num_steps / (time.perf_counter() - times[2])
    problems = [problem for problem, is_fine in checks.items() if not is_fine]
    problems += [] if num_ended else ["no episode ends"]
    speed = {"compile_seconds": round(times[1] - times[0], 1), "steps_per_second": float(f"{rate:.3g}")}
    return speed | {"problem": "; ".join(problems)}


def random_play(env: Environment, params: Any, key: jax.Array, num_envs: int, num_steps: int) -> tuple[dict, jax.Array]:
    """Plays random legal actions; an episode that has ended begins again in its first state.

    Returns:
      For each problem, whether there is none of it, and the number of episodes that ended.
    """
    key_reset, key_play = jax.random.split(key)
    start, first = jax.vmap(env.reset)(jax.random.split(key_reset, num_envs), params)

    def step(progress, key):
        state, length = progress
        keys = jax.random.split(key, (2, num_envs))
        actions = jax.vmap(lambda key, state, params: random_action(env, key, state, params))(keys[0], state, params)
        moved, length = jax.vmap(env.step)(keys[1], state, actions, params), length + 1
        ended = moved.terminated | moved.truncated
        fine = (
            (moved.truncated == (length >= env.max_steps) & ~moved.terminated).all(),
            jnp.isfinite(moved.reward).all(),
            is_finite(moved.observation),
        )
        state = jax.tree.map(lambda a, b: jax.vmap(jnp.where)(ended, a, b), start, moved.state)
        return (state, jnp.where(ended, 0, length)), (fine, ended.sum())

    keys = jax.random.split(key_play, num_steps)
    _, (fine, ended) = jax.lax.scan(step, (start, jnp.zeros(num_envs, jnp.int32)), keys)
    at_limit, rewards, observations = map(jnp.all, fine)
    return {
        "truncation is not at the time limit": at_limit,
        "a reward is not finite": rewards,
        "an observation is not finite": observations & is_finite(first),
    }, ended.sum()


def random_action(env: Environment, key: jax.Array, state: Any, params: Any) -> jax.Array:
    match env.action_space:
        case Box(low, high):
            low, high = (jnp.clip(jnp.array(bound), -1e3, 1e3) for bound in (low, high))
            return jax.random.uniform(key, low.shape, minval=low, maxval=high)
        case MultiDiscrete(num_actions):
            return jax.random.randint(key, (len(num_actions),), 0, jnp.array(num_actions))
    legal = env.action_mask(state, params) if env.action_mask else jnp.ones(env.action_space.num_actions, bool)
    return jax.random.categorical(key, jnp.where(legal, 0.0, -jnp.inf))


def is_finite(observation: Any) -> jax.Array:
    leaves = (jnp.asarray(leaf, jnp.float32) for leaf in jax.tree.leaves(observation))
    return jnp.array([jnp.isfinite(leaf).all() for leaf in leaves]).all()


HEADER = ["name", "observation", "actions", "limit", "compile, s", "steps/s", "problem"]


def row(name: str, result: dict[str, Any]) -> list[str]:
    fields = "observation", "actions", "limit", "compile_seconds", "steps_per_second", "problem"
    values = [result.get(field, "") for field in fields]
    numbers = (int, float, np.number)
    return [f"`{name}`"] + [f"{x:,.10g}" if isinstance(x, numbers) else str(x).replace("|", "\\|") for x in values]


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

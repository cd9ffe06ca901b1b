"""What the benchmarks measure: train steps of every implementation, parts of ours, and matrix products."""

import collections
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import GRPO, PPO, Config, Hyperparams, make_init, make_train_step
from grpo_jax.devices.mesh import make_row_mesh, over_rows
from grpo_jax.groups import CONTINUE
from grpo_jax.policies import MLP
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.updates.batch import make_batch
from grpo_jax.updates.epochs import update_epochs
from grpo_jax.updates.optimizers import make_optimizer
from grpo_jax.updates.schedules import scheduled_rate

from . import reference_implementations as reference
from .reference_implementations import Implementation, Size

WINDOWED_GRPO = GRPO._replace(start=CONTINUE)
GROUP_SIZE = 8
MATMUL_SIZE = {"cpu": 512}  # 4096 elsewhere
IMPLEMENTATIONS = ("rejax PPO", "plain PPO", "PPO", "GRPO")


class Case(NamedTuple):
    """A compiled program and the size of one of its steps."""

    name: str
    program: Callable  # (state, fixed, n) -> makes n + 1 steps
    state: Any
    fixed: Any
    num_samples: int  # environment steps in one step
    flops: float  # of the matrix products in one step, analytically; NaN if there are none
    compile_seconds: float
    memory: int  # bytes, arguments and results included


def ours(config: Config, learning_rate: float = Size._field_defaults["learning_rate"]) -> Implementation:
    """Our train step with the coefficients of the reference implementations."""
    hyperparams = Hyperparams(
        learning_rate=learning_rate,
        final_learning_rate=learning_rate,
        discount=reference.DISCOUNT,
        gae_lambda=reference.GAE_LAMBDA,
        clip_low=reference.CLIP,
        clip_high=reference.CLIP,
        value_clip=reference.CLIP,
        value_coef=reference.VALUE_COEF,
        entropy_coef=reference.ENTROPY_COEF,
        max_grad_norm=reference.MAX_GRAD_NORM,
        adam_eps=reference.ADAM_EPS,
    )
    init = make_init(config)
    return Implementation(lambda key: init(key, hyperparams), make_train_step(config))


def make_config(environment: str, size: Size, critic: bool) -> Config:
    """PPO, or GRPO on windows; everything else the same."""
    return Config(
        environment=environment,
        algorithm=PPO if critic else WINDOWED_GRPO,
        num_envs=size.num_envs,
        group_size=None if critic else min(GROUP_SIZE, size.num_envs),
        num_steps=size.num_steps,
        num_epochs=size.num_epochs,
        num_minibatches=size.num_minibatches,
        network=MLP(size.hidden_sizes),
    )


def make_implementation(name: str, environment: str, size: Size, **fields: Any) -> Implementation:
    """The implementation of this name (of `IMPLEMENTATIONS`); the fields of `Config` are those of ours."""
    if other := {"rejax PPO": reference.rejax_ppo, "plain PPO": reference.plain_ppo}.get(name):
        return other(environment, size)
    return ours(dataclasses.replace(make_config(environment, size, critic=name == "PPO"), **fields))


def make_cases(
    names: Sequence[str], environment: str, size: Size, num_seeds: int, *, parts: bool = False, **fields: Any
) -> list[Case]:
    """The implementations of these names on one environment at one size, compiled; see `make_implementation`."""
    ppo, grpo = (make_config(environment, size, critic) for critic in (True, False))
    num_samples = num_seeds * size.num_samples
    cases = []
    for name in names:
        config = grpo if name == "GRPO" else ppo
        init, step = make_implementation(name, environment, size, **fields)
        if num_seeds > 1:
            # Ours in the layout of `run`; the others with all seeds in one vmap, as their authors do.
            in_rows = over_rows(step, make_row_mesh(num_seeds)) if name in ("PPO", "GRPO") else jax.vmap(step)
            init, step = jax.vmap(init), in_rows
        key = jax.random.key(0) if num_seeds == 1 else jax.random.split(jax.random.key(0), num_seeds)
        flops = num_samples * (forward_flops(config) + size.num_epochs * gradient_flops(config))
        cases.append(make_case(name, Implementation(init, step), key, num_samples, flops))
    if parts:
        for name, config in {"PPO": ppo, "GRPO": grpo}.items():
            cases += make_parts(name, config, num_samples)
    return cases


def make_case(
    name: str, implementation: Implementation, key: jax.Array, num_samples: int, flops: float = np.nan
) -> Case:
    """The train steps of an implementation from the state of `key`, or of keys, compiled."""
    state = jax.tree.map(strong, jax.jit(implementation.init)(key))
    return compiled(name, lambda state, _: implementation.step(state), state, None, num_samples, flops)


def make_parts(name: str, config: Config, num_samples: int) -> list[Case]:
    """The rollout and the update, each by itself, and the rollout with random actions."""
    state = jax.jit(ours(config).init)(jax.random.key(0))
    num_parameters = config.policy.distribution.num_parameters
    random = config.policy._replace(
        step=lambda params, observation, carry: (jnp.zeros((config.num_envs, num_parameters)), None, carry),
        has_critic=False,
    )

    def rollout(policy, carry, params):
        state, key = carry
        key, key_rollout = jax.random.split(key)
        simulator = Simulator(config.env, policy, params, plan=config.plan)
        state, trajectory = simulator.unroll(state, key_rollout, num_steps=config.num_steps, auto_reset=True)
        return (state, key), trajectory

    def random_actions(carry, params):
        carry, trajectory = rollout(random, carry, params)
        return carry, jnp.sum(trajectory.reward)

    @jax.jit
    def first_batch(state):
        _, trajectory = rollout(config.policy, (state.rollout, state.key), state.params)
        return make_batch(config, config.policy, state, trajectory, state.hyperparams)

    def policy_rollout(carry, params):
        return rollout(config.policy, carry, params)

    acting, learning = (state.rollout, state.key), (state, state.key)
    forward = num_samples * forward_flops(config)
    gradient = num_samples * config.num_epochs * gradient_flops(config)
    fixed = first_batch(state), state.hyperparams
    return [
        compiled(f"{name}, random actions", random_actions, acting, state.params, num_samples, np.nan),
        compiled(f"{name}, rollout alone", policy_rollout, acting, state.params, num_samples, forward),
        compiled(f"{name}, update alone", make_update(config), learning, fixed, num_samples, gradient),
    ]


def make_update(config: Config) -> Callable:
    """`((state, key), (batch, hyperparams)) -> ((state, key), metrics)`: the updates of one iteration."""

    def update(carry, fixed):
        state, key = carry
        batch, hyperparams = fixed
        key, key_update = jax.random.split(key)
        rate = scheduled_rate(config.schedule, hyperparams, jnp.float32(0))
        optimizer = make_optimizer(config.optimizer, hyperparams, rate)
        learner, metrics = update_epochs(config, config.policy, optimizer, state, batch, hyperparams, key_update)
        return (state.replace(params=learner.params, opt_state=learner.opt_state), key), metrics

    return update


def compiled(name: str, step: Callable, state: Any, fixed: Any, num_samples: int, flops: float) -> Case:
    """Compiles a program that makes a given number of steps; it returns the state and the output of the last one."""

    def program(state, fixed, n):
        return jax.lax.fori_loop(0, n, lambda _, carry: step(carry[0], fixed), step(state, fixed))

    started = time.perf_counter()
    executable = jax.jit(program).lower(state, fixed, jnp.int32(0)).compile()
    compile_seconds = time.perf_counter() - started
    memory = executable.memory_analysis()
    memory = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return Case(name, executable, state, fixed, num_samples, flops, compile_seconds, memory)


def matmul() -> Case:
    """Square float32 products, one after the other; the rate of every other case is given as a fraction of theirs."""
    size = MATMUL_SIZE.get(jax.default_backend(), 4096)
    ones = jnp.ones((size, size))
    return compiled("matmul", lambda x, y: (x @ y / size, jnp.zeros(())), ones, ones, 0, 2.0 * size**3)


def final_returns(implementation: Implementation, num_seeds: int, num_iterations: int) -> np.ndarray:
    """`[num_seeds]` mean return of the episodes that ended in the last tenth of training."""
    states = jax.vmap(implementation.init)(jax.random.split(jax.random.key(0), num_seeds))
    states = jax.tree.map(strong, states)

    def train(state):
        _, metrics = jax.lax.scan(lambda state, _: implementation.step(state), state, length=num_iterations)
        return metrics["episode/return_mean"][-(num_iterations // 10) :]

    return np.nanmean(jax.jit(over_rows(train, make_row_mesh(num_seeds)))(states), axis=1)


def forward_flops(config: Config) -> float:
    return 2.0 * sum(inputs * outputs for sizes in layer_sizes(config) for inputs, outputs in itertools.pairwise(sizes))


def layer_sizes(config: Config) -> list[tuple[int, ...]]:
    """The widths of the layers of the policy, and of the critic if there is one, from the observation to the head."""
    num_inputs = int(np.prod(config.env.observation.shape))
    heads = [config.policy.distribution.num_parameters] + [1] * config.policy.has_critic
    return [(num_inputs, *config.network.hidden_sizes, head) for head in heads]


def gradient_flops(config: Config) -> float:
    """FLOPs for one sample, forwards and backwards; no gradient flows into the observation."""
    num_inputs = int(np.prod(config.env.observation.shape))
    into_observation = 2 * num_inputs * config.network.hidden_sizes[0] * (1 + config.policy.has_critic)
    return 3 * forward_flops(config) - into_observation


def strong(leaf: jax.Array) -> jax.Array:
    leaf = jnp.asarray(leaf)
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return leaf if is_key else jax.lax.convert_element_type(leaf, leaf.dtype)


def measure(cases: list[Case], repeats: int, seconds: float) -> list[dict]:
    """Times every case, and matrix products, once in each round; returns a row for each case."""
    cases, num_steps = [*cases, matmul()], []
    for case in cases:
        _time(case, 1)
        num_steps.append(max(1, round(seconds / _time(case, 1))))
    rounds = [[_time(case, n) / n for case, n in zip(cases, num_steps, strict=True)] for _ in range(repeats)]
    medians = np.median(rounds, axis=0)
    peak = cases[-1].flops / medians[-1]
    return [
        {
            "implementation": case.name,
            "steps_per_second": case.num_samples / median,
            "steps_per_second_low": case.num_samples / series.max(),
            "steps_per_second_high": case.num_samples / series.min(),
            "ratio": medians[0] / median if case.name in IMPLEMENTATIONS else np.nan,
            "ratio_to": cases[0].name,
            "flops_per_second": case.flops / median,
            "matmul_flops_per_second": peak,
            "roofline_fraction": case.flops / median / peak,
            "memory_bytes": case.memory,
            "compile_seconds": case.compile_seconds,
            "seconds_per_train_step": series,
        }
        for case, series, median in zip(cases[:-1], np.transpose(rounds), medians, strict=False)
    ]


def step_once(case: Case) -> None:
    jax.block_until_ready(case.program(case.state, case.fixed, jnp.int32(0)))


def kernels_by_time(case: Case) -> dict[str, Any]:
    """What a GPU executes in a train step: how many kernels and copies, their milliseconds, the longest by name."""
    calls, total = collections.Counter(), collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step_once(case)
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    lines = (line for plane in planes if "/device:GPU" in plane.name for line in plane.lines if "Stream" in line.name)
    for event in (event for line in lines for event in line.events):
        calls[event.name] += 1
        total[event.name] += event.duration_ns / 1e6
    longest = {name: [calls[name], milliseconds] for name, milliseconds in total.most_common(8)}
    return {"launches": calls.total(), "milliseconds": float(total.total()), "kernels": longest}


def _time(case: Case, num_steps: int) -> float:
    started = time.perf_counter()
    jax.block_until_ready(case.program(case.state, case.fixed, jnp.int32(num_steps - 1)))
    return time.perf_counter() - started

"""What the benchmark measures: whole train steps of every implementation, parts of ours, and matrix products."""

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import peers
from experiments.harness.peers import Implementation
from grpo_jax import GRPO, PPO, Config, Hyperparams, make_init, make_train_step
from grpo_jax.devices.mesh import make_row_mesh, over_rows
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.rollouts.starts import CONTINUE
from grpo_jax.types import TrainState
from grpo_jax.updates.batch import make_batch
from grpo_jax.updates.epochs import Learner, make_optimizer, update_epochs

WINDOWED_GRPO = GRPO._replace(start=CONTINUE)


GROUP_SIZE = 8


MATMUL_SIZE = {"cpu": 512}  # elsewhere 4096


WHOLE = ("rejax PPO", "plain PPO", "PPO", "GRPO")


class Case(NamedTuple):
    """A compiled program and what one step of it amounts to."""

    name: str
    program: Callable  # (state, fixed, n) -> makes n + 1 steps
    state: Any
    fixed: Any
    num_samples: int  # environment steps in one step
    flops: float  # of the matrix products in one step, analytically; NaN if there are none
    compile_seconds: float
    memory: int  # bytes, arguments and results included


def ours(config: Config) -> Implementation:
    """Our train step with the coefficients of the peers."""
    hyperparams = Hyperparams(
        learning_rate=peers.LEARNING_RATE,
        final_learning_rate=peers.LEARNING_RATE,
        discount=peers.DISCOUNT,
        gae_lambda=peers.GAE_LAMBDA,
        clip_low=peers.CLIP,
        clip_high=peers.CLIP,
        value_clip=peers.CLIP,
        value_coef=peers.VALUE_COEF,
        entropy_coef=peers.ENTROPY_COEF,
        max_grad_norm=peers.MAX_GRAD_NORM,
        adam_eps=peers.ADAM_EPS,
    )
    init = make_init(config)
    return Implementation(lambda key: init(key, hyperparams), make_train_step(config))


def make_config(
    environment: str, num_envs: int, critic: bool, hidden_sizes: tuple[int, ...] = peers.HIDDEN_SIZES
) -> Config:
    """PPO, or GRPO on windows; everything else the same."""
    return Config(
        environment=environment,
        algorithm=PPO if critic else WINDOWED_GRPO,
        num_envs=num_envs,
        group_size=None if critic else min(GROUP_SIZE, num_envs),
        num_steps=peers.NUM_STEPS,
        num_epochs=peers.NUM_EPOCHS,
        num_minibatches=peers.NUM_MINIBATCHES,
        network="mlp",
        hidden_sizes=hidden_sizes,
        activation="tanh",
    )


def make_cases(
    names: Sequence[str],
    environment: str,
    num_envs: int,
    num_seeds: int,
    *,
    hidden_sizes: tuple[int, ...] = peers.HIDDEN_SIZES,
    parts: bool = False,
) -> list[Case]:
    """The implementations of these names (of `WHOLE`) on one environment at one size, compiled."""
    ppo, grpo = (make_config(environment, num_envs, critic, hidden_sizes) for critic in (True, False))
    num_samples = num_seeds * num_envs * peers.NUM_STEPS
    cases = []
    for name in names:
        config = grpo if name == "GRPO" else ppo
        peer = {"rejax PPO": peers.rejax_ppo, "plain PPO": peers.plain_ppo}.get(name)
        init, step = ours(config) if peer is None else peer(environment, num_envs, hidden_sizes)
        if num_seeds > 1:
            # Ours as `run` lays out its rows; of the others, all seeds at once, as their authors have it.
            of_rows = over_rows(step, make_row_mesh(num_seeds)) if name in ("PPO", "GRPO") else jax.vmap(step)
            init, step = jax.vmap(init), of_rows
        key = jax.random.key(0) if num_seeds == 1 else jax.random.split(jax.random.key(0), num_seeds)
        state = jax.tree.map(_strong, jax.jit(init)(key))
        flops = num_samples * (forward_flops(config) + peers.NUM_EPOCHS * gradient_flops(config))
        cases.append(compiled(name, lambda state, _, step=step: step(state), state, None, num_samples, flops))
    if parts:
        state = jax.jit(ours(ppo).init)(jax.random.key(0))
        cases += make_parts(ppo, state, num_samples)
    return cases


def make_parts(config: Config, state: TrainState, num_samples: int) -> list[Case]:
    """PPO's rollout and update, each by itself, and the rollout with random actions."""
    num_parameters = config.policy.distribution.num_parameters
    random = config.policy._replace(
        step=lambda params, observation, carry: (jnp.zeros((config.num_envs, num_parameters)), None, carry),
        has_critic=False,
    )

    def rollout(policy, carry, params):
        rollout_state, key = carry
        key, key_rollout = jax.random.split(key)
        rollout_state, trajectory = Simulator(config.env, policy, params).unroll(
            rollout_state, key_rollout, num_steps=config.num_steps, auto_reset=True
        )
        return (rollout_state, key), trajectory

    def random_actions(carry, params):
        carry, trajectory = rollout(random, carry, params)
        return carry, jnp.sum(trajectory.reward)

    def update(carry, fixed):
        learner, key = carry
        batch, hyperparams = fixed
        key, key_update = jax.random.split(key)
        learner, metrics = update_epochs(
            config.algorithm,
            config.policy,
            make_optimizer(hyperparams, jnp.float32(0)),
            learner,
            batch,
            hyperparams,
            key_update,
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
        )
        return (learner, key), metrics

    @jax.jit
    def first_batch(state):
        _, trajectory = rollout(config.policy, (state.rollout, state.key), state.params)
        hyperparams, group_size = state.hyperparams, config.group_size
        return make_batch(config.algorithm, config.policy, state.params, trajectory, None, hyperparams, group_size)

    def policy_rollout(carry, params):
        return rollout(config.policy, carry, params)

    acting, learning = (state.rollout, state.key), (Learner(state.params, state.optimizer), state.key)
    forward = num_samples * forward_flops(config)
    gradient = num_samples * peers.NUM_EPOCHS * gradient_flops(config)
    return [
        compiled("PPO, random actions", random_actions, acting, state.params, num_samples, np.nan),
        compiled("PPO, rollout alone", policy_rollout, acting, state.params, num_samples, forward),
        compiled("PPO, update alone", update, learning, (first_batch(state), state.hyperparams), num_samples, gradient),
    ]


def compiled(name: str, step: Callable, state: Any, fixed: Any, num_samples: int, flops: float) -> Case:
    """A program that makes as many steps as it is told to; what the last one puts out is put out by the program."""

    def program(state, fixed, n):
        return jax.lax.fori_loop(0, n, lambda _, carry: step(carry[0], fixed), step(state, fixed))

    started = time.perf_counter()
    executable = jax.jit(program).lower(state, fixed, jnp.int32(0)).compile()
    compile_seconds = time.perf_counter() - started
    memory = executable.memory_analysis()
    memory = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return Case(name, executable, state, fixed, num_samples, flops, compile_seconds, memory)


def matmul() -> Case:
    """Square float32 products, one after the other: the rate that all others are a fraction of."""
    size = MATMUL_SIZE.get(jax.default_backend(), 4096)
    ones = jnp.ones((size, size))
    return compiled("matmul", lambda x, y: (x @ y / size, jnp.zeros(())), ones, ones, 0, 2.0 * size**3)


def final_returns(implementation: Implementation, num_seeds: int, num_iterations: int) -> np.ndarray:
    """`[num_seeds]` mean return of the episodes that ended in the last tenth of training."""
    states = jax.vmap(implementation.init)(jax.random.split(jax.random.key(0), num_seeds))
    states = jax.tree.map(_strong, states)

    def train(state):
        _, metrics = jax.lax.scan(lambda state, _: implementation.step(state), state, length=num_iterations)
        return metrics["episode/return_mean"][-(num_iterations // 10) :]

    return np.nanmean(jax.jit(over_rows(train, make_row_mesh(num_seeds)))(states), axis=1)


def _layers(config: Config) -> list[tuple[int, int]]:
    """Inputs and outputs of every dense layer."""
    num_inputs = int(np.prod(config.env.observation.shape))
    heads = [config.policy.distribution.num_parameters] + [1] * config.policy.has_critic
    widths = [(num_inputs, *config.hidden_sizes, head) for head in heads]
    return [pair for sizes in widths for pair in zip(sizes[:-1], sizes[1:], strict=True)]


def forward_flops(config: Config) -> float:
    """Of the matrix products for one sample."""
    return float(sum(2 * inputs * outputs for inputs, outputs in _layers(config)))


def gradient_flops(config: Config) -> float:
    """Of the matrix products for one sample, forwards and backwards; no gradient flows into the observation."""
    num_inputs = int(np.prod(config.env.observation.shape))
    into_observation = 2 * num_inputs * config.hidden_sizes[0] * (1 + config.policy.has_critic)
    return 3 * forward_flops(config) - into_observation


def _strong(leaf: jax.Array) -> jax.Array:
    """Without a weak type, which a step would return as a strong one."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return leaf if is_key else jax.lax.convert_element_type(leaf, leaf.dtype)


def measure(cases: list[Case], repeats: int, seconds: float) -> list[dict]:
    """Times every case once in each round, matrix products beside them; one row for each case."""
    cases = [*cases, matmul()]
    num_steps = []
    for case in cases:
        _time(case, 1)
        num_steps.append(max(1, round(seconds / _time(case, 1))))
    rounds = [[_time(case, n) / n for case, n in zip(cases, num_steps, strict=True)] for _ in range(repeats)]
    times = np.array(rounds).T
    medians = np.median(times, axis=1)
    peak = cases[-1].flops / medians[-1]
    rows = []
    for case, series, median in zip(cases[:-1], times, medians, strict=False):
        rows.append(
            {
                "implementation": case.name,
                "steps_per_second": case.num_samples / median,
                "steps_per_second_low": case.num_samples / series.max(),
                "steps_per_second_high": case.num_samples / series.min(),
                "ratio": medians[0] / median if case.name in WHOLE else np.nan,
                "ratio_to": cases[0].name,
                "flops_per_second": case.flops / median,
                "matmul_flops_per_second": peak,
                "roofline_fraction": case.flops / median / peak,
                "memory_bytes": case.memory,
                "compile_seconds": case.compile_seconds,
                "seconds_per_train_step": series,
            }
        )
    return rows


def _time(case: Case, num_steps: int) -> float:
    started = time.perf_counter()
    jax.block_until_ready(case.program(case.state, case.fixed, jnp.int32(num_steps - 1)))
    return time.perf_counter() - started


def commit() -> str | None:
    """Of the working tree, with a mark if it holds changes; None outside of one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        folder = Path(__file__).parent
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None

"""Training steps per second of brax's own PPO and of ours on a brax task: `python -m experiments.brax_speed`.

Both do the same work: rollouts of equal length in as many environments, normalised observations, the same numbers of
epochs and minibatches, swish networks of equal sizes, episodes of 1000 steps. They run in turn, in one process on one
device, so that a slow moment of the machine affects both; compilation and evaluation are not timed. At the end of an
episode brax returns to the environment's first state of all, which costs nothing. Ours draws start states: the line
"drawn" one for every episode, the line "PPO" as many for each rollout as `--starts-per-rollout` says.
"""

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from grpo_jax import Config, Hyperparams, make_init, make_train_step
from grpo_jax.commands.harness.command import command, make_console, new_folder
from grpo_jax.commands.harness.limits import Count, OutFile
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.errors import ConfigError
from grpo_jax.policies import MLP
from grpo_jax.recording.files import write_json

from .harness.provenance import provenance


@dataclasses.dataclass
class Arguments:
    """Measures brax's own PPO and ours on a brax task, in turn."""

    task: str = "reacher"
    """Name of the task, without "brax:"."""
    num_envs: Count = 64
    """Parallel environments."""
    num_steps: Count = 32
    """Steps of each environment in one rollout."""
    num_epochs: Count = 2
    """Passes over a rollout."""
    num_minibatches: Count = 4
    """Gradient steps in each pass."""
    hidden_sizes: tuple[Count, ...] = (64, 64)
    """Of the policy, and of the critic beside it."""
    starts_per_rollout: Count = 1
    """Start states that ours draws for each environment and rollout."""
    iterations: Count = 8
    """Rollouts with their updates in one timing."""
    repeats: Count = 7
    """Rounds; the table shows medians over them."""
    out: OutFile | None = None
    """JSON file for the results; a new one under runs/ if left out."""


def main(arguments: Arguments) -> None:
    if arguments.num_envs % arguments.num_minibatches:
        raise ConfigError("--num-minibatches must divide --num-envs, as brax's minibatches are of whole rollouts")
    ours = {"PPO": make_chunk(arguments, arguments.starts_per_rollout), "PPO, drawn": make_chunk(arguments, None)}
    seconds: dict[str, list[float]] = {name: [] for name in ("brax PPO", *ours)}

    def other_rounds(brax_seconds: float) -> None:
        seconds["brax PPO"].append(brax_seconds)
        for name, chunk in ours.items():
            started = time.perf_counter()
            chunk()
            seconds[name].append(time.perf_counter() - started)

    run_brax(arguments, other_rounds)
    num_samples = arguments.iterations * arguments.num_steps * arguments.num_envs
    rates = {name: num_samples / np.array(times) for name, times in seconds.items()}
    table = Table("implementation", "steps/s", "lowest", "highest", "ratio", title=f"brax:{arguments.task}")
    for name, rate in rates.items():
        speeds = (f"{x:,.0f}" for x in (np.median(rate), rate.min(), rate.max()))
        table.add_row(name, *speeds, f"{np.median(rate / rates['brax PPO']):.2f}")
    rows = [{"implementation": name, "steps_per_second": rate} for name, rate in rates.items()]
    out, console = arguments.out or new_folder("brax_speed").with_suffix(".json"), make_console()
    write_json(out, provenance() | {"arguments": dataclasses.asdict(arguments), "results": rows})
    console.print(table)
    console.print(f"Results in {out}", soft_wrap=True)


def make_chunk(arguments: Arguments, starts_per_rollout: int | None) -> Callable[[], None]:
    """A function that makes `iterations` of our train steps, compiled, and continues where it ended."""
    config = Config(
        environment=f"brax:{arguments.task}",
        algorithm="ppo",
        num_envs=arguments.num_envs,
        num_steps=arguments.num_steps,
        num_epochs=arguments.num_epochs,
        num_minibatches=arguments.num_minibatches,
        network=MLP(arguments.hidden_sizes, activation="swish"),
        normalize_observations=True,
        starts_per_rollout=starts_per_rollout,
    )
    step = make_train_step(config)
    states = [jax.jit(make_init(config))(jax.random.key(0), Hyperparams())]

    def steps(state):
        return jax.lax.scan(lambda state, _: (step(state)[0], None), state, length=arguments.iterations)[0]

    program = jax.jit(steps, donate_argnums=0).lower(states[0]).compile()

    def chunk():
        states[0] = jax.block_until_ready(program(states[0]))

    return chunk


def run_brax(arguments: Arguments, after_round: Callable[[float], None]) -> None:
    """Trains with brax's PPO, and calls `after_round` with the seconds of each round after two that compile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # brax recommends MJX's own suites
        from brax import envs
        from brax.training.agents.ppo import networks, train

    if not hasattr(jax, "device_put_replicated"):  # brax 0.14 calls it, and JAX 0.10 has it no longer
        jax.device_put_replicated = lambda tree, devices: jax.tree.map(lambda x: jnp.stack([x] * len(devices)), tree)
    sizes = {f"{part}_hidden_layer_sizes": arguments.hidden_sizes for part in ("policy", "value")}
    ends = []

    def progress(num_steps, metrics):
        if len(ends) > 1:
            after_round(time.perf_counter() - ends[-1])
        ends.append(time.perf_counter())

    num_samples = arguments.iterations * arguments.num_steps * arguments.num_envs
    train.train(
        environment=envs.get_environment(arguments.task),
        num_timesteps=num_samples * (arguments.repeats + 2),
        num_evals=arguments.repeats + 3,
        run_evals=False,
        progress_fn=progress,
        max_devices_per_host=1,
        episode_length=1000,
        num_envs=arguments.num_envs,
        unroll_length=arguments.num_steps,
        batch_size=arguments.num_envs // arguments.num_minibatches,
        num_minibatches=arguments.num_minibatches,
        num_updates_per_batch=arguments.num_epochs,
        normalize_observations=True,
        network_factory=functools.partial(networks.make_ppo_networks, **sizes),
    )


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

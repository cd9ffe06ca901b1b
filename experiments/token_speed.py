"""Tokens per second of a transformer, and memory: `python -m experiments.token_speed`.

Compares generation by the rollout with a loop that only generates, updates that read a prompt once for its group with
updates that read it for each completion, and all of them with the rate of matrix products. Shows the memory of a train
step as XLA plans it: of GRPO, and of PPO whose critic is a transformer of the policy's size. All are measured in turn
in one process, so that a slow moment of the machine affects all of them.

With `--sizes` it shows rollouts, whole train steps and their memory for several models, completions and vocabularies.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from grpo_jax import GRPO, PPO, Algorithm, Config, Hyperparams, make_init, make_train_step
from grpo_jax.algorithms import with_reference
from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.limits import Count, NotNegative, OutFile
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.errors import ConfigError
from grpo_jax.groups import FRESH
from grpo_jax.policies import Transformer
from grpo_jax.recording.files import write_json
from grpo_jax.rollouts.rollout import Simulator
from grpo_jax.updates.batch import make_batch

from .harness.provenance import provenance
from .harness.random_text import random_text
from .harness.reference_implementations import Implementation
from .harness.workloads import Case, compiled, make_case, make_update, measure


@dataclasses.dataclass
class Arguments:
    """Measures generation and updates on random tokens, every completion of full length."""

    prompt_length: Count = 16
    """Tokens of a prompt."""
    num_steps: Count = 16
    """Tokens of a completion."""
    vocab_size: Count = 20
    """Different tokens."""
    num_envs: Count = 128
    """Completions at a time."""
    group_size: Count = 16
    """Completions of a prompt."""
    num_minibatches: Count = 4
    """Gradient steps over a rollout, in one epoch."""
    width: Count = 64
    """Of the transformer."""
    num_layers: Count = 2
    """Of the transformer."""
    num_heads: Count = 4
    """Of the transformer."""
    compute_dtype: str = "float32"
    """Of the activations: float32 or bfloat16."""
    memory_width: Count = 256
    """Of the transformers whose memory is compared."""
    sizes: tuple[str, ...] = ()
    """LAYERSxWIDTH:TOKENS:VOCABULARY each, such as 2x128:64:1000: the table of these sizes instead."""
    repeats: Count = 7
    """Rounds; the table shows medians over them."""
    seconds: NotNegative = 0.3
    """How long one timing takes, at least."""
    out: OutFile | None = None
    """JSON file for the results."""


def make_config(arguments: Arguments, algorithm: Algorithm, width: int, **fields) -> Config:
    return Config(
        environment=random_text(arguments.prompt_length, arguments.num_steps, arguments.vocab_size),
        algorithm=algorithm,
        num_envs=arguments.num_envs,
        group_size=arguments.group_size,
        num_epochs=1,
        num_minibatches=arguments.num_minibatches,
        network=Transformer(
            width=width,
            num_layers=arguments.num_layers,
            num_heads=arguments.num_heads,
            compute_dtype=arguments.compute_dtype,
        ),
        **fields,
    )


def forward_flops(config: Config, params) -> float:
    """FLOPs of the matrix products for one token: two for each weight, and attention to half of the text on average."""
    kernels = sum(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim == 2)
    if not config.network.tie_embeddings:  # tied, they are multiplied with as well
        kernels -= params["actor"]["embedding"].size
    attention = 4 * config.network.num_layers * config.network.width * (config.env.max_steps // 2)
    return 2.0 * kernels + attention


def rollouts(config: Config, state, names: tuple[str, ...] = ("generate loop", "rollout")) -> list[Case]:
    """Generation by the rollout, and by a loop of the policy and the sampling alone."""
    policy, num_samples = config.policy, config.num_envs * config.num_steps

    def rollout(key, params):
        key, key_play = jax.random.split(key)
        trajectory = play(config, params, key_play)
        return key, (trajectory.action, trajectory.log_prob, jnp.sum(trajectory.reward))

    def loop(key, params):
        key, key_start, key_steps = jax.random.split(key, 3)
        begun = Simulator(config.env, policy, params).reset(
            {}, key_start, config.num_envs, group_size=config.group_size
        )

        def step(carry, key):
            token, memory = carry
            logits, _, memory = policy.step(params, token, memory)
            token = policy.distribution.sample(logits, key)
            return (token, memory), (token, policy.distribution.log_prob(logits, token))

        keys = jax.random.split(key_steps, config.num_steps)
        return key, jax.lax.scan(step, (begun.observation, begun.policy_carry), keys)[1]

    programs, flops = {"generate loop": loop, "rollout": rollout}, num_samples * forward_flops(config, state.params)
    return [compiled(name, programs[name], jax.random.key(0), state.params, num_samples, flops) for name in names]


def play(config: Config, params, key: jax.Array):
    key_start, key_steps = jax.random.split(key)
    simulator = Simulator(config.env, config.policy, params)
    start = simulator.reset({}, key_start, config.num_envs, group_size=config.group_size)
    return simulator.unroll(start, key_steps, num_steps=config.num_steps, auto_reset=False, from_reset=True)[1]


def update(config: Config, state, name: str) -> Case:
    @jax.jit
    def make(params, key):
        return make_batch(config, config.policy, state, play(config, params, key), state.hyperparams)

    key, num_samples = jax.random.key(0), config.num_envs * config.num_steps
    fixed = make(state.params, key), state.hyperparams
    flops = 3 * num_samples * forward_flops(config, state.params)
    return compiled(name, make_update(config), (state, key), fixed, num_samples, flops)


def measure_memory(arguments: Arguments) -> list[dict]:
    """The memory of the state, and of a train step at its peak."""
    ppo, rows = PPO._replace(start=FRESH), []
    algorithms = {"GRPO": GRPO, "GRPO with a reference": with_reference(GRPO)}
    for name, algorithm in (algorithms | {"PPO": ppo, "PPO with a reference": with_reference(ppo)}).items():
        config = make_config(arguments, algorithm, arguments.memory_width)
        state = jax.eval_shape(make_init(config), jax.random.key(0), Hyperparams())
        needed = jax.jit(make_train_step(config), donate_argnums=0).lower(state).compile().memory_analysis()
        weights, before = (
            sum(leaf.size for leaf in jax.tree.leaves(state.params["actor"])),
            needed.argument_size_in_bytes,
        )
        peak = before + needed.temp_size_in_bytes
        rows.append({"name": name, "policy_weights": weights, "state_bytes": before, "peak_bytes": peak})
    return rows


def measure_sizes(arguments: Arguments, console: Console) -> list[dict]:
    """Speed and memory of GRPO's rollouts and train steps, with logits in chunks, for each of the sizes."""
    table, rows = Table("layers x width", "tokens", "vocabulary", "", "tokens/s", "of matmul rate", "MiB"), []
    for size in arguments.sizes:
        if not (match := re.fullmatch(r"(\d+)x(\d+):(\d+):(\d+)", size)):
            raise ConfigError(f"{size!r} is not a size; write LAYERSxWIDTH:TOKENS:VOCABULARY, such as 2x128:64:1000")
        num_layers, width, num_steps, vocab_size = map(int, match.groups())
        chosen = {"num_layers": num_layers, "num_steps": num_steps, "vocab_size": vocab_size}
        config = make_config(dataclasses.replace(arguments, **chosen), GRPO, width, logits_chunk=128)
        init = functools.partial(make_init(config), hyperparams=Hyperparams())
        state = jax.jit(init)(jax.random.key(0))
        num_samples = config.num_envs * num_steps
        flops = 4 * num_samples * forward_flops(config, state.params)  # a rollout, and an update of thrice its FLOPs
        cases = rollouts(config, state, ("rollout",))
        program = Implementation(init, make_train_step(config))
        cases.append(make_case("train step", program, jax.random.key(0), num_samples, flops))
        for row in measure(cases, arguments.repeats, arguments.seconds):
            rows.append(chosen | {"width": width} | row)
            speed, mebibytes = f"{row['steps_per_second']:,.0f}", f"{row['memory_bytes'] / 2**20:,.0f}"
            cells = row["implementation"], speed, f"{row['roofline_fraction']:.0%}", mebibytes
            table.add_row(f"{num_layers}x{width}", str(num_steps), f"{vocab_size:,}", *cells)
    console.print(table)
    return rows


def main(arguments: Arguments) -> None:
    console = make_console()
    if arguments.sizes:
        results = {"sizes": measure_sizes(arguments, console)}
    else:
        results = {"speed": measure_speed(arguments, console), "memory": measure_memory(arguments)}
        show_memory(results["memory"], console)
    if arguments.out:
        write_json(arguments.out, provenance() | {"arguments": dataclasses.asdict(arguments)} | results)
        console.print(f"Results in {arguments.out}", soft_wrap=True)


def measure_speed(arguments: Arguments, console: Console) -> list[dict]:
    shared, alone = (make_config(arguments, GRPO, arguments.width, share_prompts=share) for share in (True, False))
    state = jax.jit(make_init(shared))(jax.random.key(0), Hyperparams())
    cases = rollouts(shared, state)
    cases += [update(shared, state, "update, prompts shared"), update(alone, state, "update, prompts not shared")]
    rows = measure(cases, arguments.repeats, arguments.seconds)
    table = Table("", "tokens/s", "slowest … fastest", "× first of its kind", "of matmul rate")
    for i, row in enumerate(rows):
        # In each round, as a slow moment of the machine affects both.
        ratios = rows[i - i % 2]["seconds_per_train_step"] / row["seconds_per_train_step"]
        row["ratio"] = float(np.median(ratios))
        speed, low, high = (f"{row[f'steps_per_second{which}']:,.0f}" for which in ("", "_low", "_high"))
        cells = f"{low} … {high}", f"{row['ratio']:.2f}", f"{row['roofline_fraction']:.0%}"
        table.add_row(row["implementation"], speed, *cells)
    console.print(table, f"matmul {rows[0]['matmul_flops_per_second'] / 1e9:.0f} GFLOP/s")
    return rows


def show_memory(rows: list[dict], console: Console) -> None:
    table = Table("", "state", "peak", "× GRPO", title=f"a policy of {rows[0]['policy_weights']:,} weights")
    for row in rows:
        mebibytes = (f"{row[field] / 2**20:.1f} MiB" for field in ("state_bytes", "peak_bytes"))
        table.add_row(row["name"], *mebibytes, f"{row['peak_bytes'] / rows[0]['peak_bytes']:.2f}")
    console.print(table)


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

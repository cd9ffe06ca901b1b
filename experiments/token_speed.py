"""Tokens per second of a transformer, and memory: `python -m experiments.token_speed --sizes 2x128:64:1000`.

Rollouts and whole train steps of GRPO on random tokens, every completion of full length, for several models,
completions and vocabularies. All of a size, and matrix products, are measured in turn in one process, so that a slow
moment of the machine affects all of them.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
from rich.table import Table

from grpo_jax import GRPO, Config, Hyperparams, make_init, make_train_step
from grpo_jax.commands.harness.command import command, make_console
from grpo_jax.commands.harness.limits import Count, NotNegative, OutFile
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.errors import ConfigError
from grpo_jax.policies import Transformer
from grpo_jax.recording.files import write_json
from grpo_jax.rollouts.rollout import Simulator

from .harness.provenance import provenance
from .harness.random_text import random_text
from .harness.reference_implementations import Implementation
from .harness.workloads import Case, compiled, make_case, measure


@dataclasses.dataclass
class Arguments:
    """Measures rollouts and train steps on random tokens."""

    sizes: tuple[str, ...] = ("2x64:16:20",)
    """LAYERSxWIDTH:TOKENS:VOCABULARY each, such as 2x128:64:1000."""
    prompt_length: Count = 16
    """Tokens of a prompt."""
    num_envs: Count = 128
    """Completions at a time."""
    group_size: Count = 16
    """Completions of a prompt."""
    num_minibatches: Count = 4
    """Gradient steps over a rollout, in one epoch."""
    num_heads: Count = 4
    """Of the transformer."""
    compute_dtype: str = "float32"
    """Of the activations: float32 or bfloat16."""
    repeats: Count = 7
    """Rounds; the table shows medians over them."""
    seconds: NotNegative = 0.3
    """How long one timing takes, at least."""
    out: OutFile | None = None
    """JSON file for the results."""


def main(arguments: Arguments) -> None:
    table, rows = Table("layers x width", "tokens", "vocabulary", "", "tokens/s", "of matmul rate", "MiB"), []
    for size in arguments.sizes:
        if not (match := re.fullmatch(r"(\d+)x(\d+):(\d+):(\d+)", size)):
            raise ConfigError(f"{size!r} is not a size; write LAYERSxWIDTH:TOKENS:VOCABULARY, such as 2x128:64:1000")
        num_layers, width, num_steps, vocab_size = map(int, match.groups())
        config = make_config(arguments, num_layers, width, num_steps, vocab_size)
        for row in measure(make_cases(config), arguments.repeats, arguments.seconds):
            rows.append(
                {"num_layers": num_layers, "width": width, "num_steps": num_steps, "vocab_size": vocab_size} | row
            )
            speed, mebibytes = f"{row['steps_per_second']:,.0f}", f"{row['memory_bytes'] / 2**20:,.0f}"
            cells = row["implementation"], speed, f"{row['roofline_fraction']:.0%}", mebibytes
            table.add_row(f"{num_layers}x{width}", str(num_steps), f"{vocab_size:,}", *cells)
    console = make_console()
    console.print(table)
    if arguments.out:
        write_json(arguments.out, provenance() | {"arguments": dataclasses.asdict(arguments), "results": rows})
        console.print(f"Results in {arguments.out}", soft_wrap=True)


def make_config(arguments: Arguments, num_layers: int, width: int, num_steps: int, vocab_size: int) -> Config:
    return Config(
        environment=random_text(arguments.prompt_length, num_steps, vocab_size),
        algorithm=GRPO,
        num_envs=arguments.num_envs,
        group_size=arguments.group_size,
        num_epochs=1,
        num_minibatches=arguments.num_minibatches,
        network=Transformer(
            width=width,
            num_layers=num_layers,
            num_heads=arguments.num_heads,
            compute_dtype=arguments.compute_dtype,
        ),
        logits_chunk=128,
    )


def make_cases(config: Config) -> list[Case]:
    """A rollout, and a train step: a rollout and an update of thrice its FLOPs."""
    init = functools.partial(make_init(config), hyperparams=Hyperparams())
    state, num_samples = jax.jit(init)(jax.random.key(0)), config.num_envs * config.num_steps

    def rollout(key, params):
        key, key_start, key_steps = jax.random.split(key, 3)
        simulator = Simulator(config.env, config.policy, params)
        start = simulator.reset({}, key_start, config.num_envs, group_size=config.group_size)
        options = {"num_steps": config.num_steps, "auto_reset": False, "from_reset": True}
        trajectory = simulator.unroll(start, key_steps, **options)[1]
        return key, (trajectory.action, trajectory.log_prob, jnp.sum(trajectory.reward))

    flops = num_samples * forward_flops(config, state.params)
    program = Implementation(init, make_train_step(config))
    return [
        compiled("rollout", rollout, jax.random.key(0), state.params, num_samples, flops),
        make_case("train step", program, jax.random.key(0), num_samples, 4 * flops),
    ]


def forward_flops(config: Config, params) -> float:
    """FLOPs of the matrix products for one token: two for each weight, and attention to half of the text on average."""
    kernels = sum(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim == 2)
    if not config.network.tie_embeddings:  # tied, they are multiplied with as well
        kernels -= params["actor"]["embedding"].size
    attention = 4 * config.network.num_layers * config.network.width * (config.env.max_steps // 2)
    return 2.0 * kernels + attention


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

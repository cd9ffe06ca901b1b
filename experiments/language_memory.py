"""The memory that training a language model takes, without a device: `python -m experiments.language_memory`.

XLA compiles a whole train step of GRPO with a frozen reference, for an H100 or another `--target`, and reports
what the program would allocate there. Each row adds one way to need less.
"""

import dataclasses
import itertools
import time
from typing import Any, Literal

import jax
from rich.table import Table

from grpo_jax import GRPO, Config, Hyperparams, make_init, make_train_step, with_reference
from grpo_jax.commands.harness.command import command, make_console, provenance
from grpo_jax.commands.harness.limits import Count, OutFile
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.devices.mesh import make_mesh, replicated
from grpo_jax.policies import Transformer
from grpo_jax.recording.files import write_json

from .compiled_programs.ahead_of_time import TRITON, choose_backend
from .compiled_programs.targets import TARGETS
from .harness.random_text import random_text

QWEN = {"num_kv_heads": 2, "tie_embeddings": True, "attention_bias": True, "compute_dtype": "bfloat16"}
MODELS = {
    "tiny": Transformer(num_layers=2, width=64),
    "0.5B": Transformer(num_layers=24, width=896, num_heads=14, feedforward_size=4864, **QWEN),
    "1.5B": Transformer(num_layers=28, width=1536, num_heads=12, feedforward_size=8960, **QWEN),
}
"""Transformers by the names of the models."""

CHECKPOINTED = {"checkpoint_layers": True}
VARIANTS = {
    "whole logits": ({}, {}),
    "chunks": ({"logits_chunk": 128}, {}),
    "checkpoint": ({"logits_chunk": 128}, CHECKPOINTED),
    "lora": ({"logits_chunk": 128}, CHECKPOINTED | {"lora_rank": 16}),
    "lora bfloat16": ({"logits_chunk": 128}, CHECKPOINTED | {"lora_rank": 16, "frozen_dtype": "bfloat16"}),
}
"""Fields of `Config` and of `Transformer`, by the name of the row."""


@dataclasses.dataclass
class Arguments:
    """Compiles train steps of language models, and shows the memory that each needs."""

    models: tuple[Literal[tuple(MODELS)], ...] = ("0.5B", "1.5B")
    """Models, by name; the larger ones have the sizes of Qwen2.5."""
    variants: tuple[Literal[tuple(VARIANTS)], ...] = tuple(VARIANTS)
    """Rows of each model."""
    target: Literal[*TARGETS, "cpu"] = "h100"
    """Device to compile for."""
    vocab_size: Count = 151_936
    """Number of different tokens."""
    prompt_length: Count = 256
    """Tokens of a prompt."""
    completion_lengths: tuple[Count, ...] = (256,)
    """Tokens of a completion; two lengths also give the memory of each further token."""
    num_envs: Count = 64
    """Completions of an iteration."""
    group_size: Count = 8
    """Completions of a prompt."""
    num_minibatches: Count = 8
    """Gradient steps of an iteration."""
    out: OutFile | None = None
    """JSON file for the results."""


def make_config(arguments: Arguments, model: str, variant: str, num_steps: int) -> Config:
    fields, changes = VARIANTS[variant]
    return Config(
        environment=random_text(arguments.prompt_length, num_steps, arguments.vocab_size),
        algorithm=with_reference(GRPO),
        num_envs=arguments.num_envs,
        group_size=arguments.group_size,
        num_epochs=1,
        num_minibatches=arguments.num_minibatches,
        network=dataclasses.replace(MODELS[model], **changes),
        **fields,
    )


def measure(config: Config, target: str) -> dict[str, Any]:
    """The memory of a train step in bytes: of the state before and after it, and of everything else."""
    state = jax.eval_shape(make_init(config), jax.random.key(0), Hyperparams())
    is_cpu = target == "cpu"
    platform = "cpu" if is_cpu else TARGETS[target].platform
    devices = jax.devices("cpu")[:1] if is_cpu else TARGETS[target].devices(1)
    layout = replicated(make_mesh(seeds=1, devices=devices))
    step = jax.jit(make_train_step(config), donate_argnums=0, in_shardings=(layout,), out_shardings=layout)
    started = time.perf_counter()
    lowered = step.trace(state).lower(lowering_platforms=(platform,))
    needed = lowered.compile({TRITON: False} if platform == "cuda" else None).memory_analysis()
    return {
        "weights": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "state_bytes": needed.argument_size_in_bytes,
        "temporary_bytes": needed.temp_size_in_bytes,
        "compile_seconds": time.perf_counter() - started,
    }


def main(arguments: Arguments) -> None:
    choose_backend()
    console, rows = make_console(), []
    lengths = arguments.completion_lengths
    table = Table("model", "", *(f"peak, {length} tokens" for length in lengths), "state", "a token")
    for model, variant in itertools.product(arguments.models, arguments.variants):
        measured = []
        for length in lengths:
            console.print(f"compiling {model}, {variant}, {length} tokens", soft_wrap=True)
            found = measure(make_config(arguments, model, variant, length), arguments.target)
            measured.append({"model": model, "variant": variant, "num_steps": length} | found)
        peaks = [f"{(row['state_bytes'] + row['temporary_bytes']) / 2**30:.1f} GiB" for row in measured]
        more = (lengths[-1] - lengths[0]) * arguments.num_envs
        grown = measured[-1]["temporary_bytes"] - measured[0]["temporary_bytes"]
        a_token = f"{grown / more / 1024:.1f} KiB" if more else ""
        table.add_row(model, variant, *peaks, f"{measured[0]['state_bytes'] / 2**30:.1f} GiB", a_token)
        rows += measured
    console.print(table)
    if arguments.out is not None:
        write_json(arguments.out, provenance() | {"arguments": dataclasses.asdict(arguments), "rows": rows})
        console.print(f"Results in {arguments.out}", soft_wrap=True)


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

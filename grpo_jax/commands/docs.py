"""Pages of the documentation, also without a clone: `grpo-jax docs groups`."""

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Annotated

import tyro

from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.errors import ConfigError, nearest


@dataclasses.dataclass
class Arguments:
    """Prints a page of the documentation, or lists the pages."""

    topic: Annotated[str, tyro.conf.Positional] = ""
    """Name of a page, such as groups; without it, the names of all pages."""


def main(arguments: Arguments) -> None:
    texts = {topic: path.read_text(encoding="utf-8") for topic, path in sorted(pages().items())}
    topic = arguments.topic.lower().replace("-", "_").removesuffix(".md")
    if topic and topic not in texts:
        raise ConfigError(f"no page {arguments.topic!r}: {nearest(topic, texts)}")
    titles = (f"{name:20}{text.splitlines()[0].lstrip('# ')}" for name, text in texts.items())
    print(texts[topic] if topic else "\n".join(titles))


def pages() -> dict[str, Path]:
    """The pages by their topics: those of an installed wheel, or of the clone that is worked in."""
    installed = importlib.metadata.files("grpo-jax") or ()
    paths = [Path(file.locate()) for file in installed if file.match("grpo-jax/docs/*.md")]
    return {path.stem: path for path in paths or (Path(__file__).parents[2] / "docs").glob("*.md")}


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

"""Pages of the documentation, also without a clone: `grpo-jax docs groups`."""

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from grpo_jax.commands.harness.command import command
from grpo_jax.commands.harness.parsing import parse_flags
from grpo_jax.errors import ConfigError, nearest


@dataclasses.dataclass
class Arguments:
    """Prints a page of the documentation, or lists the pages."""

    topic: Annotated[str, tyro.conf.Positional] = ""
    """Name of a page, such as groups; without it, the names of all pages."""


def main(arguments: Arguments) -> None:
    console, found = Console(highlight=False), pages()
    if not arguments.topic:
        table = Table("topic", "page", box=None)
        for topic, path in sorted(found.items()):
            table.add_row(topic, path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# "))
        console.print(table)
        return
    topic = arguments.topic.lower().replace("-", "_").removesuffix(".md")
    if topic not in found:
        raise ConfigError(f"no page {arguments.topic!r}: {nearest(topic, found)}")
    text = found[topic].read_text(encoding="utf-8")
    console.print(Markdown(text, hyperlinks=False) if console.is_terminal else text, markup=False, soft_wrap=True)


def pages() -> dict[str, Path]:
    """The pages by their topics: those of an installed wheel, or of the clone that is worked in."""
    installed = importlib.metadata.files("grpo-jax") or ()
    paths = [Path(file.locate()) for file in installed if file.match("grpo-jax/docs/*.md")]
    return {path.stem: path for path in paths or (Path(__file__).parents[2] / "docs").glob("*.md")}


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

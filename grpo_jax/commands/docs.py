"""Pages of the documentation, also without a clone: `grpo-jax docs groups`."""

import dataclasses
import importlib.metadata
import re
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
    """Name of a page, such as groups, or a word to look for in all; without it, the names of all pages."""


def main(arguments: Arguments) -> None:
    texts = {topic: path.read_text(encoding="utf-8") for topic, path in sorted(pages().items())}
    topic = arguments.topic.lower().replace("-", "_").removesuffix(".md")
    if topic in texts:
        print(texts[topic])
        return
    lines, word = [], re.compile(rf"\b{re.escape(arguments.topic)}\b", re.IGNORECASE)
    for name, text in texts.items():
        beginning, *sections = re.split(r"^##+ ", text.removeprefix("# "), flags=re.MULTILINE)
        found = filter(word.search, [beginning, *sections]) if topic else [beginning]
        lines += [f"{name:20}{each.splitlines()[0]}" for each in found]
    if not lines:
        raise ConfigError(f"no page {arguments.topic!r}: {nearest(topic, texts)}")
    if topic:
        print(f"No page is called {arguments.topic!r}; pages and headings below which it stands:")
    print("\n".join(lines))


def pages() -> dict[str, Path]:
    """The pages by their topics: those of an installed wheel, or of the clone that is worked in."""
    installed = importlib.metadata.files("grpo-jax") or ()
    paths = [Path(file.locate()) for file in installed if file.match("grpo-jax/docs/*.md")]
    return {path.stem: path for path in paths or (Path(__file__).parents[2] / "docs").glob("*.md")}


if __name__ == "__main__":
    command(lambda: main(parse_flags(Arguments)))

"""README.md and a picture of the results of `experiments.gpu_hour`, from the files that its measurements leave."""

import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpo_jax.commands.harness.figures import markdown_table
from grpo_jax.errors import ConfigError
from grpo_jax.recording.figures import panels
from grpo_jax.recording.files import read_object, write_text

from .published_speeds import SHAPES

DONE = "measured.json"
"""The file that a finished measurement leaves beside its results: the command, and its seconds."""
PICTURE = "seconds.png"


def write_page(out: Path, device: str, smoke: bool) -> None:
    """Writes what the folder has; without any result, nothing."""
    sections = [f"## {title}\n\n{text.strip()}" for title, section in SECTIONS.items() if (text := section(out))]
    if not sections:
        return
    measured = [read_object(path) for path in sorted(out.glob(f"*/*/{DONE}")) if is_measured(path.parent)]
    commands = "\n".join(f"{each['seconds']:5.0f} s  {each['command']}" for each in measured)
    minutes = sum(each["seconds"] for each in measured) / 60
    title = "A smoke test: nothing is a measurement, as all sizes are tiny" if smoke else f"Measured on {device}"
    head = f"# {title}\n\n`python -m experiments.gpu_hour --out DIR`, {minutes:.0f} minutes in all."
    write_text(out / "README.md", "\n\n".join([head, *sections, f"## Commands\n\n```\n{commands}\n```"]) + "\n")


def is_measured(folder: Path) -> bool:
    """Whether a folder has the results of a finished measurement, and all can be read."""
    try:
        for path in folder.rglob("*.json"):
            read_object(path)
        return (folder / DONE).exists()
    except ConfigError:
        return False


def results(out: Path, pattern: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The names of finished measurements, and their files of results."""
    for path in sorted(out.glob(pattern)):
        folder = next(parent for parent in path.parents if parent.parent.parent == out)
        if is_measured(folder):
            yield folder.name, read_object(path)


def agreement(out: Path) -> str:
    """Passed tests, and how far train steps are from the CPU's."""
    lines = []
    for path in out.glob("tests/*/tests.xml"):
        counts = ET.parse(path).getroot().find("testsuite").attrib
        lines.append(
            "Tests on the device: {tests}, of which {failures} failed and {skipped} were skipped.\n".format(**counts)
        )
    rows = [
        [row["case"], *(f"{row[field]:.1e}" for field in ("metrics", "parameters", "step"))]
        for _, result in results(out, "agreement/*/agreement.json")
        for row in result["results"]
    ]
    if rows:
        lines.append(markdown_table(["train step", "metrics differ by", "parameters differ by", "of a step of"], rows))
    return "\n".join(lines)


def settings(out: Path) -> str:
    """Speeds with settings of XLA and JAX."""
    rows = [
        [name, row["implementation"], f"{row['steps_per_second']:,.0f}", f"{row['compile_seconds']:.0f}"]
        for name, result in results(out, "settings/*/speed.json")
        for row in result["results"]
    ]
    return markdown_table(["settings", "implementation", "steps/s", "seconds to compile"], rows) if rows else ""


def shapes(out: Path) -> str:
    """Seconds of whole trainings, by the speed of their steps, beside published ones; and the picture of them."""
    rows, drawn = [], {}
    for name, result in results(out, "shapes/*/speed.json"):
        shape = SHAPES[name]
        for row in result["results"]:
            seeds, published = row["num_seeds"], shape.published.get(row["num_seeds"])
            seconds = shape.total_steps * seeds / row["steps_per_second"]
            label = shape.title + (f", {seeds:,} seeds" if seeds > 1 else "")
            drawn.setdefault(label, {"published": published.seconds} if published else {})[row["implementation"]] = (
                seconds
            )
            rows.append(
                [
                    label,
                    row["implementation"],
                    f"{seconds:,.1f} + {row['compile_seconds']:.0f}",
                    f"{row['steps_per_second']:,.0f}",
                    f"{published.seconds:g} ({', '.join(filter(None, published[1:]))})" if published else "",
                ]
            )
    if not rows:
        return ""
    draw(drawn, out / PICTURE)
    header = ["training", "implementation", "seconds + compiling", "steps/s", "published: seconds"]
    note = "Seconds of a whole training: its environment steps by the measured steps per second; nothing is evaluated."
    return f"{note}\n\n![Seconds of trainings, measured and published]({PICTURE})\n\n{markdown_table(header, rows)}"


def draw(seconds: dict[str, dict[str, float]], path: Path) -> None:
    """A line for each training: the seconds of each implementation, and the published ones."""
    with panels(path, 1, size=(7.0, 1.2 + 0.3 * len(seconds))) as (_, [axis]):
        for i, name in enumerate(dict.fromkeys(name for each in seconds.values() for name in each)):
            x = [each.get(name) for each in seconds.values()]
            marker = {"marker": "x", "color": "black"} if name == "published" else {"marker": "o", "color": f"C{i}"}
            axis.plot(x, range(len(x)), linestyle="", label=name, **marker)
        axis.set_yticks(range(len(seconds)), seconds)
        axis.invert_yaxis()
        axis.set(xscale="log", xlabel="seconds of the whole training, without compiling where it was measured here")
        axis.grid(axis="x", alpha=0.3)
        axis.legend(frameon=False, fontsize="small")


def brax(out: Path) -> str:
    """brax's own PPO and ours, in turns."""
    rows = [
        [name, row["implementation"], f"{sorted(row['steps_per_second'])[len(row['steps_per_second']) // 2]:,.0f}"]
        for name, result in results(out, "brax/*/brax.json")
        for row in result["results"]
    ]
    note = "brax's notebook shows 33 s of compiling and 156 s for 50 million steps of ant (Colab, a GPU not named)."
    return f"{note}\n\n{markdown_table(['task', 'implementation', 'steps/s'], rows)}" if rows else ""


def language(out: Path) -> str:
    """Tokens per second of generation and of whole train steps."""
    rows = [
        [name, row["implementation"], f"{row['steps_per_second']:,.0f}", f"{row['roofline_fraction']:.0%}"]
        for name, result in results(out, "language/*/tokens.json")
        for row in result["sizes"]
    ]
    return (
        markdown_table(["numbers, precision of products", "part", "tokens/s", "of the rate of products"], rows)
        if rows
        else ""
    )


SECTIONS: dict[str, Callable[[Path], str]] = {
    "Published trainings": shapes,
    "Settings": settings,
    "brax": brax,
    "Language models": language,
    "Does it train as a CPU does?": agreement,
}

"""README.md of a folder of `experiments.gpu_hour`, from the lines of its results."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from grpo_jax.commands.harness.figures import markdown_table
from grpo_jax.recording.files import json_lines, write_text

RESULTS = "results.jsonl"
Lines = list[dict[str, Any]]


def write_page(out: Path, title: str) -> None:
    """Writes what the folder has, of one device after another; without any result, nothing."""
    kept, pages = list(json_lines(out / RESULTS)), []
    for device in dict.fromkeys(line["device"] for line in kept):
        lines = [line for line in kept if line["device"] == device and "failed" not in line]
        ran = dict.fromkeys(f"jax {line['jax']}, commit {line['commit']}" for line in lines)
        texts = {name: section(lines) for name, section in SECTIONS.items()}
        failed = {line["name"]: line["failed"] for line in kept if line["device"] == device and "failed" in line}
        found = {line["name"] for line in lines}
        texts["Failed"] = "".join(f"- {name}: {error}\n" for name, error in failed.items() if name not in found)
        sections = [f"## {name}\n\n{text}" for name, text in texts.items() if text]
        pages.append("\n".join([f"# {title}{device}\n\n{'; '.join(ran)}\n", *sections]))
    if pages:
        write_text(out / "README.md", "\n".join(pages))


def speeds(lines: Lines) -> str:
    """Million steps a second by shape and implementation, and PPO's ratio to the better peer; compiling; memory."""
    lines = [line for line in lines if line["piece"] != "choices"]
    rate = by_shape(lines, lambda line: line["steps_per_second"] / 1e6)
    for row in rate.values():
        peers = [value for name, value in row.items() if name in ("rejax PPO", "plain PPO")]
        ours = [value for name, value in row.items() if name.startswith("PPO, ")]
        if ours and peers:
            row["PPO / better peer"] = ours[0] / max(peers)
    compiling = by_shape(lines, lambda line: line["compile_seconds"])
    memory = by_shape(lines, lambda line: line["memory_bytes"] / 2**20)
    tables = {"Million steps a second": rate, "Seconds to compile, beside the others": compiling, "MiB": memory}
    return "\n".join(f"{name}:\n\n{table(rows)}" for name, rows in tables.items() if rows)


def choices(lines: Lines) -> str:
    """Million steps a second by choice and shape."""
    rate = by_shape([line for line in lines if line["piece"] == "choices"], lambda line: line["steps_per_second"] / 1e6)
    names = dict.fromkeys(name for row in rate.values() for name in row)
    return table({name: {shape: row.get(name) for shape, row in rate.items()} for name in names}) if rate else ""


def by_shape(lines: Lines, value: Callable[[dict], float]) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    for line in lines:
        if "steps_per_second_low" in line and ": " in line["name"]:
            shape, implementation = line["name"].split(": ")
            rows.setdefault(shape, {})[implementation] = value(line)
    return rows


def table(rows: dict[str, dict[str, Any]]) -> str:
    header = dict.fromkeys(name for row in rows.values() for name in row)
    cells = [[name, *(cell(row.get(column)) for column in header)] for name, row in rows.items()]
    return markdown_table(["", *header], cells)


def cell(value: Any) -> str:
    if isinstance(value, list):
        value = sorted(value)[len(value) // 2]
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def kernels(lines: Lines) -> str:
    """What a train step executes, the longest first."""
    texts = []
    for line in (line for line in lines if "kernels" in line):
        rows = [[name, str(calls), f"{ms:.3f}"] for name, (calls, ms) in line["kernels"].items()]
        head = f"{line['name']}: {line['launches']} kernels and copies, {line['milliseconds']:.3f} ms"
        texts.append(f"{head}\n\n{markdown_table(['kernel', 'times', 'milliseconds'], rows)}")
    return "\n".join(texts)


def numbers(piece: str, lines: Lines) -> str:
    """All numbers of a piece."""
    rows = {}
    for line in (line for line in lines if line["piece"] == piece):
        name = " ".join(str(line[key]) for key in ("name", "implementation", "cache") if key in line)
        rows[name] = {key: value for key, value in line.items() if key not in ABOUT}
    return table(rows) if rows else ""


ABOUT = ("piece", "name", "device", "jax", "commit", "implementation", "cache")
SECTIONS: dict[str, Callable[[Lines], str]] = {
    "Errors of networks against float64": partial(numbers, "networks"),
    "Training": speeds,
    "Kernels of a train step": kernels,
    "Choices, million steps a second": choices,
    "Train steps that differ from a CPU's": partial(numbers, "agreement"),
    "From a new process to a solved CartPole, in seconds": partial(numbers, "cold"),
    "brax": partial(numbers, "brax"),
    "A language model": partial(numbers, "language"),
}

"""Results by the name of the environment: summary.json in a folder, and a table of them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.commands.harness.figures import markdown_table
from grpo_jax.errors import ConfigError, nearest
from grpo_jax.recording.files import read_json, write_json
from grpo_jax.recording.statistics import describe_estimate, estimate

SUMMARY, TABLE, FLAGS = "summary.json", "table.md", "flags.json"


def chosen(known: Mapping[str, Any], names: Sequence[str], kind: str) -> dict[str, Any]:
    """Those with one of the names, in this order, or all without names; raises ConfigError for an unknown name."""
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown {kind} {name!r}: {nearest(name, known)}")
    return {name: known[name] for name in names or known}


def read_results(out: Path, arguments: Any = None) -> dict[str, dict]:
    """The results in a folder, by environment; ConfigError if they are of something else, or not of these numbers."""
    summary = out / SUMMARY
    try:
        results = json.loads(summary.read_text()) if summary.exists() else {}
    except ValueError as error:
        raise ConfigError(f"{summary} cannot be read: {error}; remove it, or give another --out") from error
    if not (isinstance(results, dict) and all(isinstance(entry, dict) for entry in results.values())):
        raise ConfigError(f"{summary} has no results by environment; give another --out")
    if results and arguments is not None and (before := read_json(out / FLAGS)) != numbers_of(arguments):
        raise ConfigError(f"{out} has results with {before}, not {numbers_of(arguments)}; use these, or another --out")
    return results


def numbers_of(arguments: Any) -> dict[str, float]:
    """The flags that results depend on, such as steps and seeds."""
    return {name: value for name, value in vars(arguments).items() if isinstance(value, int | float)}


def write_results(
    results: Mapping[str, dict],
    out: Path,
    header: Sequence[str],
    row: Callable[[str, dict], Sequence[str]],
    arguments: Any = None,
) -> None:
    """Writes summary.json, and table.md with the header and the cells `row(name, result)` of each environment."""
    if arguments is not None:
        write_json(out / FLAGS, numbers_of(arguments))
    write_json(out / SUMMARY, results)
    write_markdown(out / TABLE, header, [row(name, result) for name, result in results.items()])


def method_cells(name: str, entries: Mapping[str, dict], methods: Iterable[str]) -> list[str]:
    """The name, and for each method the interquartile mean of its seeds with an interval; empty if it is not there."""
    scores = [entries[method]["per_seed"] if method in entries else None for method in methods]
    return [name, *("" if each is None else describe_estimate(estimate(np.array(each)), ".0f") for each in scores)]


def write_markdown(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Writes a table as Markdown."""
    path.write_text(markdown_table(header, rows))

"""Results by the name of the environment: summary.json in a folder, and a table of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from grpo_jax.errors import ConfigError
from grpo_jax.recording.files import write_json

SUMMARY, TABLE = "summary.json", "table.md"


def read_results(out: Path) -> dict[str, dict]:
    """The results in a folder, by the names of the environments.

    Raises:
      ConfigError: its summary.json is of something else.
    """
    summary = out / SUMMARY
    try:
        results = json.loads(summary.read_text()) if summary.exists() else {}
    except ValueError as error:
        raise ConfigError(f"{summary} cannot be read: {error}; remove it, or give another --out") from error
    if not (isinstance(results, dict) and all(isinstance(entry, dict) for entry in results.values())):
        raise ConfigError(f"{summary} has no results by environment; give another --out")
    return results


def write_results(
    results: Mapping[str, dict], out: Path, header: Sequence[str], row: Callable[[str, dict], Sequence[str]]
) -> None:
    """Writes summary.json and table.md.

    Args:
      results: by the names of the environments, in the order of the table.
      out: the folder.
      header: titles of the table's columns.
      row: the cells of an environment, from its name and its result.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / SUMMARY, results)
    write_markdown(out / TABLE, header, [row(name, result) for name, result in results.items()])


def write_markdown(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Writes a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    path.write_text("\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n")

"""Tables and a picture of programs that are compiled ahead of time."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from grpo_jax.recording.figures import panels

from .ahead_of_time import TRITON
from .targets import Target

Row = dict[str, Any]
Cell = Callable[[Row], str]


def per_step(row: Row, field: str, phase: str) -> float:
    """The count of a phase for each of its steps."""
    return row[field][phase] / row[{"rollout": "num_steps", "gradient": "num_gradient_steps"}[phase]]


def _per_step(field: str, phase: str) -> Cell:
    """`per_step`; "?" if the loop of the phase was not found."""
    return lambda row: f"{per_step(row, field, phase):,.1f}" if row[f"has_{phase}_loop"] else "?"


def _number(field: str, scale: float = 1.0, spec: str = ",.0f") -> Cell:
    return lambda row: "" if row.get(field) is None else f"{row[field] / scale:{spec}}"


def _layout(mesh: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items()) or "1"


_ALWAYS = ("implementation", "envs")
_SIZE = {
    "implementation": lambda row: row["name"],
    "mesh": lambda row: _layout(row["mesh"]),
    "envs": _number("num_envs"),
    "seeds": _number("num_seeds"),
}
GPU = {
    "launches": _number("launches"),
    "/step": _per_step("launches_by_phase", "rollout"),
    "/gradient": _per_step("launches_by_phase", "gradient"),
    "copies": _number("copies"),
    "graphs": _number("graphs"),
    "waits": _number("waits"),
    "GB": _number("bytes_accessed", 1e9, ",.1f"),
    "model ms": _number("model_seconds", 1e-3, ",.1f"),
    "× plain": _number("model_ratio", spec=".2f"),
}
_COLLECTIVES = {
    "collectives, each environment step": _per_step("collectives", "rollout"),
    "each gradient step": _per_step("collectives", "gradient"),
    "others": lambda row: f"{row['collectives']['rest']:,}",
    "MB sent": _number("communicated_bytes", 1e6, ",.1f"),
}
_TPU = {"GB": _number("bytes_accessed", 1e9, ",.1f")}
_MEMORY = {
    "temp MiB": _number("temporary_bytes", 2**20),
    "args MiB": _number("argument_bytes", 2**20, ",.1f"),
    "compile s": _number("compile_seconds"),
}
_MEASURED = {"measured ms": _number("measured_seconds", 1e-3, ",.1f")}


def tables(target: Target, environment: str, rows: Sequence[Row]) -> list[Table]:
    """The programs for one target and one environment side by side; on meshes, also what these communicate."""
    columns = (GPU if target.is_gpu else _TPU) | _MEMORY
    columns |= _MEASURED if any("measured_seconds" in row for row in rows) else {}
    rendered = [_table(f"{target.name}, {environment}: one train step", rows, columns)]
    if meshed := [row for row in rows if row["mesh"]]:
        rendered.append(_table(f"{target.name}, {environment}: communication of each device", meshed, _COLLECTIVES))
    return rendered


def _table(title: str, rows: Sequence[Row], columns: Mapping[str, Cell]) -> Table:
    """A line for each program; the columns for mesh and seeds are left out where all are 1."""
    size = {name: cell for name, cell in _SIZE.items() if name in _ALWAYS or {cell(row) for row in rows} != {"1"}}
    without_triton = dict.fromkeys(row["name"] for row in rows if row.get("options", {}).get(TRITON) is False)
    caption = f"matrix products by cuBLAS, not Triton: {', '.join(without_triton)}" if without_triton else None
    rendered = Table(*size, *(Column(name, justify="right") for name in columns), title=title, caption=caption)
    for row in rows:
        cells = [cell(row) for cell in size.values()]
        rendered.add_row(*cells, *(["error"] if "error" in row else [cell(row) for cell in columns.values()]))
    return rendered


def fits_table(fits: Sequence[Row]) -> Table:
    """The largest number of environments × seeds of each implementation."""
    rendered = Table("implementation", "mesh", "environments × seeds that fit", "KiB each")
    for row in fits:
        most, kibibytes = row["environments_times_seeds"], row["bytes_each"] / 2**10
        rendered.add_row(row["name"], _layout(row["mesh"]), f"{most:,}", f"{kibibytes:,.1f}")
    return rendered


def draw(rows: Sequence[Row], path: Path) -> None:
    """Launches and model time over the number of environments: two panels for each target and environment."""
    from matplotlib.ticker import LogLocator

    rows = [row for row in rows if row["num_seeds"] == rows[0]["num_seeds"]]
    names = list(dict.fromkeys(row["name"] for row in rows))
    pairs = list(dict.fromkeys((row["target"], row["environment"]) for row in rows))
    fields = {"launches": (1.0, "launches in a train step"), "model_seconds": (1e3, "model: ms for a train step")}
    with panels(path, 2 * len(pairs), size=(5.2, 3.8), columns=2) as (_, axes):
        for i, (target, environment) in enumerate(pairs):
            here = [row for row in rows if (row["target"], row["environment"]) == (target, environment)]
            for axis, (field, (scale, label)) in zip(axes[2 * i : 2 * i + 2], fields.items(), strict=True):
                for name in names:
                    series = sorted((row["num_envs"], row[field] * scale) for row in here if row["name"] == name)
                    if series:
                        color = f"C{names.index(name)}"
                        axis.plot(*zip(*series, strict=True), color=color, marker="o", markersize=4, label=name)
                axis.set(title=f"{target}, {environment}", xlabel="parallel environments", ylabel=label, xscale="log")
                ticks = sorted({row["num_envs"] for row in here})
                axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
                axis.minorticks_off()
            launches, model = axes[2 * i : 2 * i + 2]
            launches.set_ylim(0, None)
            launches.yaxis.set_major_formatter("{x:,.0f}")
            launches.legend(frameon=False)
            model.set_yscale("log")
            model.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            model.yaxis.set_major_formatter("{x:g}")
            model.minorticks_off()

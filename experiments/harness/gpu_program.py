"""Reads what XLA's runtime executes on a GPU: kernels, copies, CUDA graphs and waits of the host, and a model of time.

The runtime executes a list of *thunks* one by one. A thunk is a kernel, a copy, a loop of thunks, or a command buffer:
thunks that are recorded once as a CUDA graph and launched together.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import NamedTuple

from experiments.harness import hlo

SORT_KERNELS = 6
"""Kernels of a sort. CUB's are not available without a device, and the sort that replaces them has many more."""

_THUNK = re.compile(r"(\s*)(\d+): (k\w+)")
_NOT_LAUNCHED = re.compile(
    r"k(Sequential|While|Conditional|CommandBuffer|DynamicSliceFusion|Wait\w*|Async\w*|Group\w*|\w+Done|Host\w*)$"
)
_METADATA = re.compile(r'profile_annotation: "([^"]+)"\s+thunk_id: (\d+)')


class Event(NamedTuple):
    """One entry of what the runtime does in a train step."""

    kind: str  # "kernel", "copy", "graph" or "wait"
    times: int  # in one train step
    in_graph: bool
    bytes: int  # read and written, each time
    path: hlo.Path  # the loops around it


class Costs(NamedTuple):
    """The model of time: seconds of a launch, and bytes per second."""

    bandwidth: float
    launch: float = 2e-6  # a kernel, a copy or a graph
    launch_in_graph: float = 1e-6  # a kernel or a copy in a graph
    wait: float = 1e-5  # the host waits for the device

    def seconds(self, events: Iterable[Event]) -> float:
        """The sum over launches of the launch or the traffic, whichever takes longer, and of all waits."""
        return sum(event.times * self._seconds(event) for event in events)

    def _seconds(self, event: Event) -> float:
        if event.kind == "wait":
            return self.wait
        return max(self.launch_in_graph if event.in_graph else self.launch, event.bytes / self.bandwidth)


@dataclasses.dataclass
class _Scope:
    """A thunk that contains others, or the whole list."""

    indent: int
    times: int
    in_graph: bool = False
    path: hlo.Path = ()
    is_known_loop: bool = False
    in_condition: bool = False
    is_skipped: bool = False


def read_events(program: hlo.Program, thunks: str, metadata: str) -> list[Event]:
    """What the runtime does in one execution of a program.

    Args:
      program: the compiled program.
      thunks: the listing of its thunks that XLA dumps after all passes over them.
      metadata: the names of the instructions that the thunks execute, as XLA dumps them.

    Returns:
      The events. The host waits before each iteration of a loop whose length is unknown, and at a branch, unless these
      are in a graph. A loop of unknown length counts one iteration, and of a branch all sides are counted.
    """
    names = {int(number): name for name, number in _METADATA.findall(metadata)}
    events, sorts, scopes, loops = [], set(), [_Scope(-1, 1)], []
    for line in thunks.splitlines():
        if line.strip() in ("condition:", "body:"):
            loops[-1].in_condition = line.strip() == "condition:"
        if not (match := _THUNK.match(line)):
            continue
        indent, number, kind = len(match[1]), int(match[2]), match[3]
        while scopes[-1].indent >= indent:
            scopes.pop()
        outer = scopes[-1]
        # XLA counts the iterations of a loop of known length on the host, without its condition.
        is_skipped = outer.is_skipped or (outer.is_known_loop and outer.in_condition)
        scope = _Scope(indent, outer.times, outer.in_graph, outer.path, is_skipped=is_skipped)
        scopes.append(scope)
        instruction = program.instructions.get(names.get(number, "") if number else "")
        waits = 0
        if kind == "kWhile":
            loop = hlo.Loop(instruction.name, program.trips(instruction))
            scope.path, scope.times = (*outer.path, loop), outer.times * loop.counted_trips
            scope.is_known_loop = hlo.known_trips(instruction) is not None
            loops.append(scope)
            waits = 0 if scope.is_known_loop else outer.times * (loop.counted_trips + 1)
        elif kind == "kConditional":
            waits = outer.times
        elif kind == "kCommandBuffer" and not (scope.in_graph or is_skipped):
            events.append(Event("graph", scope.times, False, 0, scope.path))
            scope.in_graph = True
        elif not (_NOT_LAUNCHED.match(kind) or is_skipped):
            fused = _fused(program, instruction)
            is_sort = any(inner.operation == "sort" for inner in (instruction, *fused) if inner)
            repeats = SORT_KERNELS if is_sort and instruction.name not in sorts else 0 if is_sort else 1
            sorts |= {instruction.name} if is_sort else set()
            moved = _traffic(program, instruction, fused) if instruction else 0
            kind = "copy" if kind == "kCopy" else "kernel"
            events.append(Event(kind, scope.times * repeats, scope.in_graph, moved, scope.path))
        if waits and not (outer.in_graph or is_skipped):
            events.append(Event("wait", waits, False, 0, outer.path))
    return events


def _fused(program: hlo.Program, instruction: hlo.Instruction | None) -> tuple[hlo.Instruction, ...]:
    """The instructions of a fusion."""
    if instruction is None or instruction.operation != "fusion":
        return ()
    return tuple(inner for name in program.called(instruction) for inner in program.computations[name])


def _traffic(program: hlo.Program, instruction: hlo.Instruction, fused: tuple[hlo.Instruction, ...]) -> int:
    """The bytes that an instruction reads and writes, without caches: of a slice or a gather, what it takes."""
    total = hlo.num_bytes(instruction.type)
    if not fused:
        operands = (program.instructions.get(name) for name in instruction.operands)
        return total + sum(hlo.num_bytes(operand.type) for operand in operands if operand)
    types = {inner.name: inner.type for inner in fused}
    for inner in fused:
        if inner.operation == "parameter":
            uses = [use for use in fused if inner.name in use.operands]
            # An index, unlike the array that is sliced, is read whole.
            roles = {use.operation if use.operands[0] == inner.name else "" for use in uses}
            if roles and roles <= {"dynamic-slice", "gather"}:
                total += sum(hlo.num_bytes(use.type) for use in uses)
            elif roles != {"dynamic-update-slice"}:
                total += hlo.num_bytes(inner.type)
        elif inner.operation == "dynamic-update-slice":  # in place: only the update is written
            total -= hlo.num_bytes(inner.type) - hlo.num_bytes(types.get(inner.operands[1], ""))
    return max(total, 0)

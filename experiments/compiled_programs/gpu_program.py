"""Reads what XLA's runtime executes on a GPU: kernels, copies, CUDA graphs and waits of the host, and a model of time.

The runtime executes a list of *thunks* one by one. A thunk is a kernel, a copy, a loop of thunks, or a command buffer:
thunks that are recorded once as a CUDA graph and launched together.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from . import hlo

SORT_KERNELS = 6
"""Kernels of a sort. CUB's are not available without a device, and the sort that replaces them has many more."""

_THUNK = re.compile(r"(\s*)(\d+): (k\w+)")
_NOT_LAUNCHED = re.compile(
    r"k(Sequential|While|Conditional|CommandBuffer|DynamicSliceFusion|Wait\w*|Async\w*|Group\w*|\w+Done|Host\w*)$"
)
_VIEWS = {"bitcast", "reshape"}  # the same elements in the same order
_UPDATE = "dynamic-update-slice"
_PARTIAL = {"dynamic-slice", "gather", _UPDATE}
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
    if instruction is None or instruction.operation != "fusion":
        return ()
    return tuple(inner for name in program.called(instruction) for inner in program.computations[name])


def _traffic(program: hlo.Program, instruction: hlo.Instruction, fused: tuple[hlo.Instruction, ...]) -> int:
    """The bytes that an instruction reads and writes, without caches: of a slice or a gather, what it takes."""
    if not fused:
        operands = (program.instructions.get(name) for name in instruction.operands)
        return hlo.num_bytes(instruction.type) + sum(hlo.num_bytes(operand.type) for operand in operands if operand)
    root = next(inner for inner in fused if inner.text.lstrip().startswith("ROOT"))
    results = root.operands if root.operation == "tuple" else (root.name,)
    parameters = (inner for inner in fused if inner.operation == "parameter")
    return sum(_read(inner, fused) for inner in parameters) + sum(_written(program, name) for name in results)


def _read(parameter: hlo.Instruction, fused: tuple[hlo.Instruction, ...]) -> int:
    uses = list(_uses(parameter.name, fused))
    # An index, unlike the array that is sliced or updated, is read whole.
    if not uses or any(use.operation not in _PARTIAL or use.operands[0] != name for name, use in uses):
        return hlo.num_bytes(parameter.type)
    return sum(hlo.num_bytes(use.type) for _, use in uses if use.operation != _UPDATE)


def _uses(name: str, fused: tuple[hlo.Instruction, ...]) -> Iterator[tuple[str, hlo.Instruction]]:
    """The instructions that use an array, each with the array's name there: views of it have names of their own."""
    for use in fused:
        if name in use.operands:
            of_view = list(_uses(use.name, fused)) if use.operation in _VIEWS else []
            yield from of_view or [(name, use)]  # a view without uses is the result


def _written(program: hlo.Program, name: str) -> int:
    """The bytes that a fusion writes for a result: of an array that it updates in place, the update."""
    result = _origin(program, name)
    if result.operation != _UPDATE:
        return hlo.num_bytes(result.type)
    updated, update = result.operands[:2]
    in_place = _origin(program, updated).operation == "parameter"
    return hlo.num_bytes(program.instructions[update].type) + (0 if in_place else _written(program, updated))


def _origin(program: hlo.Program, name: str) -> hlo.Instruction:
    """The instruction that computes an array, instead of a view of it."""
    instruction = program.instructions[name]
    return _origin(program, instruction.operands[0]) if instruction.operation in _VIEWS else instruction

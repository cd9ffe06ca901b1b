"""Reads the text of a compiled XLA program (HLO): instructions, loops, sizes of arrays, and communication."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s64": 8, "u64": 8, "f64": 8}
"""Bytes of an element; 4 for other types."""

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) ")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z\-\d]*)\((.*)")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|(?:true|false)_computation|branch_computations)=\{?([^,}]+(?:, ?%[^,}]+)*)"
)
_COLLECTIVE = re.compile(r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?$")
_PRODUCT_CALL = re.compile(r'custom_call_target="[^"]*(cublas|cudnn|gemm)', re.IGNORECASE)


class Instruction(NamedTuple):
    name: str
    type: str
    operation: str
    operands: tuple[str, ...]
    text: str


class Loop(NamedTuple):
    name: str
    trips: int | None  # None: known at run time only

    @property
    def counted_trips(self) -> int:
        """Iterations that are counted: one if their number is unknown."""
        return 1 if self.trips is None else self.trips


Path = tuple[Loop, ...]
"""The loops around an instruction, the outermost first."""


def executions(path: Path) -> int:
    """The number of times that the body of the innermost loop runs."""
    return math.prod(loop.counted_trips for loop in path)


@dataclasses.dataclass(frozen=True)
class Program:
    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    @functools.cached_property
    def instructions(self) -> dict[str, Instruction]:
        return {here.name: here for computation in self.computations.values() for here in computation}

    def called(self, instruction: Instruction) -> list[str]:
        """The computations that an instruction runs: the fused ones, both branches, the body of a loop."""
        names = [name for group in _CALLED.findall(instruction.text) for name in re.split(r",\s*", group)]
        return [name for name in (name.removeprefix("%") for name in names) if name in self.computations]

    def walk(self, name: str | None = None, path: Path = ()) -> Iterator[tuple[Instruction, Path]]:
        """Every instruction in the order of execution, with the loops around it; a loop comes before its body."""
        for instruction in self.computations[self.entry if name is None else name]:
            yield instruction, path
            inside = path
            if instruction.operation == "while":
                inside = (*path, Loop(instruction.name, self.trips(instruction)))
            if instruction.operation not in ("async-update", "async-done"):  # they repeat the name of async-start's
                for inner in self.called(instruction):
                    yield from self.walk(inner, inside)

    def trips(self, loop: Instruction) -> int | None:
        """The iterations of a loop: as XLA notes them, or the constant that its condition compares a counter with."""
        if known := known_trips(loop):
            return known
        condition = self.computations.get((re.search(r"condition=%?([\w.\-]+)", loop.text) or ["", ""])[1], ())
        root = next((here for here in condition if here.text.lstrip().startswith("ROOT")), None)
        if root is None or root.operation != "compare" or "direction=LT" not in root.text:
            return None
        limits = [re.search(r"constant\((\d+)\)", here.text) for here in condition if here.name in root.operands]
        return next((int(limit[1]) for limit in limits if limit), None)


def known_trips(loop: Instruction) -> int | None:
    """The iterations of a loop that XLA notes in the program."""
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.text)
    return int(known[1]) if known else None


def parse(text: str) -> Program:
    """The program of this text, as `jax.stages.Compiled.as_text` prints it."""
    computations: dict[str, list[Instruction]] = {}
    entry, here = "", None
    for line in text.splitlines():
        if line and line[0] not in " }" and line.endswith("{"):
            is_entry, name = _COMPUTATION.match(line).groups()
            here = computations.setdefault(name, [])
            entry = name if is_entry else entry
        elif here is not None and (match := _INSTRUCTION.match(line)):
            name, kind, operation, rest = match.groups()
            operands = tuple(re.findall(r"%([\w.\-]+)", rest.split("), ")[0]))
            here.append(Instruction(name, kind, operation, operands, line))
    return Program({name: tuple(instructions) for name, instructions in computations.items()}, entry)


def num_bytes(kind: str) -> int:
    """The bytes of an array or a tuple of this type, without the padding of its layout."""
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", kind)
    return sum(BYTES.get(dtype, 4) * math.prod(map(int, filter(None, dims.split(",")))) for dtype, dims in shapes)


class Phases(NamedTuple):
    """The loop over environment steps and the loop over gradient steps; None where the program has no such loop."""

    rollout: Loop | None
    gradient: Loop | None

    def of(self, path: Path) -> str:
        """Where an instruction with these loops around it runs: "rollout", "gradient" or "rest"."""
        names = {loop.name for loop in path}
        for phase, loop in self._asdict().items():
            if loop is not None and loop.name in names:
                return phase
        return "rest"


def find_phases(program: Program, num_steps: int, num_gradient_steps: int) -> Phases:
    """The loops of a train step.

    Both contain matrix products. Gradient steps come last: among the loops whose executions divide their number (a
    loop may make several, by unrolling), the innermost in the last outermost loop. The rollout comes first, likewise.
    A loop over parts of a minibatch is inside that of the gradient steps, and a loop over minibatches inside that over
    epochs.
    """
    paths, computing = [], set()
    for instruction, path in program.walk():
        if instruction.operation == "while":
            paths.append((*path, Loop(instruction.name, program.trips(instruction))))
        if instruction.operation in ("dot", "convolution") or _PRODUCT_CALL.search(instruction.text):
            computing |= {loop.name for loop in path}

    def find(candidates: list[Path], count: int) -> Path:
        fitting = [
            path
            for path in candidates
            if path[-1].name in computing and all(loop.trips for loop in path) and count % executions(path) == 0
        ]
        inside_first = [path for path in fitting if path[0] == fitting[0][0]]
        return max(inside_first, key=executions, default=())

    gradient = find(paths[::-1], num_gradient_steps)
    rollout = find([path for path in paths if path[:1] != gradient[:1]], num_steps)
    return Phases(*(path[-1] if path else None for path in (rollout, gradient)))


class Collective(NamedTuple):
    """An operation that devices execute together."""

    operation: str
    times: int  # in one train step
    bytes: int  # of its operand or its result on one device, the larger of the two, each time
    path: Path  # the loops around it


def read_collectives(program: Program) -> list[Collective]:
    """The collectives of one execution of a program; a loop of unknown length counts one iteration."""
    found = []
    for instruction, path in program.walk():
        if not (match := _COLLECTIVE.match(instruction.operation)):
            continue
        operands = (program.instructions.get(name) for name in instruction.operands)
        sent = sum(num_bytes(operand.type) for operand in operands if operand)
        received = num_bytes(instruction.type)
        # The type of an asynchronous all-gather is a tuple of its operand and its result.
        received -= sent if match[2] and received > sent else 0
        found.append(Collective(match[1], executions(path), max(sent, received), path))
    return found

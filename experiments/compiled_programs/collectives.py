"""Reads the communication between the devices of a mesh from a compiled program."""

import re
from typing import NamedTuple

from . import hlo

_COLLECTIVE = re.compile(r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?$")


class Collective(NamedTuple):
    """An operation that devices execute together."""

    operation: str
    times: int  # in one train step
    bytes: int  # of its operand or its result on one device, the larger of the two, each time
    path: hlo.Path  # the loops around it


def read_collectives(program: hlo.Program) -> list[Collective]:
    """The collectives of one execution of a program; a loop of unknown length counts one iteration."""
    found = []
    for instruction, path in program.walk():
        if not (match := _COLLECTIVE.match(instruction.operation)):
            continue
        operands = (program.instructions.get(name) for name in instruction.operands)
        sent = sum(hlo.num_bytes(operand.type) for operand in operands if operand)
        received = hlo.num_bytes(instruction.type)
        # The type of an asynchronous all-gather is a tuple of its operand and its result.
        received -= sent if match[2] and received > sent else 0
        found.append(Collective(match[1], hlo.executions(path), max(sent, received), path))
    return found

"""What runs while messages travel, and which buffers are copied: read from a scheduled program."""

from __future__ import annotations

from typing import NamedTuple

from dualpipe_jax.plan.hlo import Computation, Instruction, Program

COLLECTIVES = (
    "all-to-all", "ragged-all-to-all", "collective-permute", "all-reduce", "all-gather", "reduce-scatter",
)  # fmt: skip
_WORK = ("fusion", "dot", "convolution", "custom-call", "while", "conditional", "call", "sort", "copy", "scatter")


class Transfer(NamedTuple):
    """One collective in a scheduled computation.

    Attributes:
        kind: opcode without "-start". computation: where it is. op_name: which JAX operation it comes from.
        bytes: of its result on one device.
        matmuls, others: how many pieces of work begin between its start and its done, with and without a matrix
            product; None: it is not asynchronous.
    """

    kind: str
    computation: str
    op_name: str
    bytes: int
    matmuls: int | None
    others: int | None


def transfers(program: Program, computation: Computation) -> list[Transfer]:
    """All collectives of a computation, in the order in which they end.

    Args:
        program: scheduled (`compiled.as_text()` of a GPU program is).
    """
    found: list[Transfer] = []
    running: dict[str, tuple[Instruction, list[int]]] = {}
    for instruction in computation.instructions:
        kind = _kind(program, instruction)
        if kind and instruction.opcode.endswith("-start"):
            running[instruction.name] = instruction, [0, 0]
        elif instruction.opcode.endswith("-done") and instruction.operands[0] in running:
            start, (matmuls, others) = running.pop(instruction.operands[0])
            kind = _kind(program, start) or ""
            found.append(Transfer(kind, computation.name, start.op_name, instruction.bytes, matmuls, others))
        elif kind:
            found.append(Transfer(kind, computation.name, instruction.op_name, instruction.bytes, None, None))
        elif instruction.opcode in _WORK:
            index = 0 if program.multiplies(instruction) else 1
            for _, counts in running.values():
                counts[index] += 1
    return found


def exposed(found: list[Transfer]) -> list[Transfer]:
    """Those behind which no matrix product runs."""
    return [t for t in found if not t.matmuls]


def _kind(program: Program, instruction: Instruction) -> str | None:
    """Of a collective, by itself or wrapped as `async-start`."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in COLLECTIVES:
        return opcode
    if instruction.opcode == "async-start":
        for callee in instruction.callees:
            for inner in program.computations[callee].instructions:
                if inner.opcode in COLLECTIVES:
                    return inner.opcode
    return None


def steady_bodies(program: Program) -> list[Computation]:
    """Bodies of ticks that all ranks run alike: they send to neighbours, and multiply with no choice before."""
    bodies = []
    for computation in program.executed():
        sends = any(_kind(program, i) == "collective-permute" for i in computation.instructions)
        direct = (i for i in computation.instructions if i.opcode not in ("while", "conditional"))
        if sends and any(map(program.multiplies, direct)):
            bodies.append(computation)
    return bodies


def copied_bytes(program: Program, at_least: int = 0) -> int:
    """Bytes that `copy` instructions move each time that a computation other than the entry runs.

    Args:
        at_least: smaller copies do not count.
    """
    copies = (
        instruction
        for computation in program.executed()
        if computation.name != program.entry
        for instruction in computation.instructions
        if instruction.opcode in ("copy", "copy-start")
    )
    return sum(c.bytes for c in copies if c.bytes >= at_least)

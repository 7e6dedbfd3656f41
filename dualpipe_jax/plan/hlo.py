"""A compiled program's text, taken apart as far as this project asks: computations, instructions, who calls whom."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "token": 0, "opaque": 0}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = ")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLEES = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# Library calls and generated kernels that are matrix products or attention.
_MATMUL_CALL = re.compile(r"cublas|cudnn|matmul|__triton_gemm|mosaic_gpu|convolution", re.IGNORECASE)


@dataclass(frozen=True)
class Instruction:
    """One line. shape, operands and attributes are text as the compiler prints it."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def callees(self) -> tuple[str, ...]:
        """Computations that it runs."""
        branches = _BRANCHES.search(self.attributes)
        listed = re.findall(r"[\w.-]+", branches[1]) if branches else []
        return (*_CALLEES.findall(self.attributes), *listed)

    @property
    def bytes(self) -> int:
        """Size of its result; of a tuple, of all its arrays."""
        return sum(array_bytes(kind, dims) for kind, dims in _ARRAY.findall(self.shape))

    @property
    def op_name(self) -> str:
        """The path of JAX functions and named scopes that it comes from; "" if it is not told."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


def array_bytes(kind: str, dims: str) -> int:
    """Of an array as HLO writes it.

    >>> array_bytes("bf16", "2,3"), array_bytes("f8e4m3fn", "4"), array_bytes("s32", "")
    (12, 4, 4)
    """
    if kind in _BYTES:
        size = _BYTES[kind]
    else:
        bits = re.match(r"[a-z]+(\d+)", kind)
        size = max(1, int(bits[1]) // 8) if bits else 0
    for dim in filter(None, dims.split(",")):
        size *= int(dim)
    return size


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they run (where the program is scheduled)."""

    name: str
    instructions: tuple[Instruction, ...]

    def find(self, opcode: str) -> list[Instruction]:
        return [i for i in self.instructions if i.opcode == opcode]


@dataclass(frozen=True)
class Program:
    """All computations of a program by name, and which one is its entry."""

    computations: dict[str, Computation]
    entry: str

    @classmethod
    def parse(cls, text: str) -> Program:
        """From `compiled.as_text()`."""
        computations, entry = {}, ""
        name, lines = "", list[Instruction]()
        for line in text.splitlines():
            if name:
                if line.startswith("}"):
                    computations[name] = Computation(name, tuple(lines))
                    name, lines = "", []
                elif found := _INSTRUCTION.match(line):
                    lines.append(_instruction(found[2], bool(found[1]), line[found.end() :]))
            elif found := _COMPUTATION.match(line):
                name = found[2]
                entry = name if found[1] else entry
        return cls(computations, entry)

    @cached_property
    def multiplying(self) -> frozenset[str]:
        """Computations in which some matrix product runs, their own or one of a computation that they call."""
        own = {n for n, c in self.computations.items() if any(map(_is_matmul, c.instructions))}
        callers: dict[str, set[str]] = {}
        for name, computation in self.computations.items():
            for instruction in computation.instructions:
                for callee in instruction.callees:
                    callers.setdefault(callee, set()).add(name)
        todo = list(own)
        while todo:
            for caller in callers.get(todo.pop(), set()) - own:
                own.add(caller)
                todo.append(caller)
        return frozenset(own)

    def multiplies(self, instruction: Instruction) -> bool:
        """Does it, or what it calls, multiply matrices?"""
        return _is_matmul(instruction) or any(callee in self.multiplying for callee in instruction.callees)

    def executed(self) -> Iterator[Computation]:
        """Computations whose instructions are kernels or calls of their own: not the insides of fusions or reducers."""
        todo, seen = [self.entry], {self.entry}
        while todo:
            computation = self.computations[todo.pop()]
            yield computation
            for instruction in computation.instructions:
                if instruction.opcode in ("while", "conditional", "call") or instruction.opcode.startswith("async"):
                    new = [c for c in instruction.callees if c in self.computations and c not in seen]
                    seen.update(new)
                    todo.extend(new)


def _is_matmul(instruction: Instruction) -> bool:
    if instruction.opcode in ("dot", "convolution"):
        return True
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    return instruction.opcode == "custom-call" and bool(target and _MATMUL_CALL.search(target[1]))


def _instruction(name: str, is_root: bool, rest: str) -> Instruction:
    """From what stands to the right of "=": a shape, an opcode, operands in brackets, attributes."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    stop = _closing(rest, start)
    operands = re.findall(r"%([\w.-]+)", rest[start:stop])
    return Instruction(name, shape, rest[:start], tuple(operands), rest[stop + 1 :], is_root)


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError(f"unbalanced brackets in {text[:80]!r}")

"""Reads the text of an optimized XLA module: computations, instructions, and the shapes of their results.

Only what the planner counts is kept; the text has the same form for CPU and TPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Array", "Computation", "Instruction", "Module", "parse"]

_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)"
    r"=(\{[^}]*\}|%?[\w.\-]+)"
)
_BITS = {"pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "c64": 64, "c128": 128, "token": 0, "opaque": 0}


@dataclass(frozen=True)
class Array:
    """An array of an instruction's result.

    Attributes:
        dtype: XLA's name, as in bf16.
        on_chip: it lives in a TPU core's own memory (a memory space other than 0, 5 being the host's), not in HBM.
    """

    dtype: str
    shape: tuple[int, ...]
    on_chip: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return -(-self.size * _bits(self.dtype) // 8)


@dataclass(frozen=True)
class Instruction:
    """One line: `%name = type opcode(operands), attributes`."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    text: str
    attributes: str
    root: bool

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs, in order."""
        found = _CALLED.findall(self.attributes)
        return tuple(name.strip().lstrip("%") for group in found for name in group.strip("{}").split(","))

    def attribute(self, name: str) -> str:
        """The value of an attribute without braces inside, "" if there is none."""
        match = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^,\s]+)", self.attributes)
        return match.group(1) if match else ""


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text."""

    name: str
    instructions: Mapping[str, Instruction]

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        found: dict[str, list[Instruction]] = {}
        for instruction in self:
            for operand in instruction.operands:
                found.setdefault(operand, []).append(instruction)
        return {name: tuple(users) for name, users in found.items()}

    @property
    def root(self) -> Instruction:
        return next(instruction for instruction in self if instruction.root)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        return tuple(self.instructions[name] for name in instruction.operands if name in self.instructions)


@dataclass(frozen=True)
class Module:
    """A module's computations by name."""

    computations: Mapping[str, Computation]
    entry: str

    def trip_count(self, loop: Instruction) -> int:
        """How often a `while` runs: what XLA notes, or the bound that its condition compares with; else 1."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known.group(1))
        condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
        bounds = [
            int(value.group(1))
            for computation in self._below(condition.group(1) if condition else "")
            for instruction in computation
            if instruction.opcode == "constant" and (value := re.search(r"constant\((\d+)\)", instruction.text))
        ]
        return max(bounds, default=1)

    def _below(self, name: str) -> Iterator[Computation]:
        if name in self.computations:
            yield self.computations[name]
            for instruction in self.computations[name]:
                for called in instruction.called:
                    yield from self._below(called)


def parse(text: str) -> Module:
    """Reads `compiled.as_text()`.

    Raises:
        ValueError: there is no entry computation in it.
    """
    computations: dict[str, Computation] = {}
    entry, name = "", ""
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, instructions = header.group(2), {}
            computations[name] = Computation(name, instructions)
            entry = name if header.group(1) else entry
        elif match := _INSTRUCTION.match(line):
            instruction = _instruction(bool(match.group(1)), match.group(2), _COMMENT.sub("", match.group(3)))
            instructions[instruction.name] = instruction
    if not entry:
        raise ValueError("the text has no ENTRY computation; give what `compiled.as_text()` returns")
    return Module(computations, entry)


def _instruction(root: bool, name: str, text: str) -> Instruction:
    split = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    kind, rest = text[:split], text[split:].lstrip()
    start = rest.index("(")
    end = _closing(rest, start)
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[start:end]))
    arrays = tuple(
        Array(dtype, tuple(int(side) for side in sides.replace("<=", "").split(",") if side), _on_chip(layout))
        for dtype, sides, layout in _ARRAY.findall(kind)
    )
    return Instruction(name, rest[:start], arrays, operands, rest, rest[end + 1 :], root)


def _closing(text: str, start: int) -> int:
    """The place of the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if not depth:
            return place
    raise ValueError(f"no closing parenthesis in {text[:60]!r}")


def _on_chip(layout: str) -> bool:
    space = re.search(r"S\((\d+)\)", layout)
    return space is not None and space.group(1) not in ("0", "5")


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.search(r"\d+", dtype)
    return int(digits.group()) if digits else 0

"""What a compiled program does: FLOPs, HBM traffic and collectives of its parts, from the text of its module.

A scan's body runs once a tick, and one branch of its switch; what a rank runs is known from the tick table. So the
module is counted in parts: what runs once, what runs in every tick, and each branch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from meshsys.planner.hlo import Array, Computation, Instruction, Module

__all__ = ["Collective", "Part", "Parts", "count", "device_groups"]

_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# What moves no bytes of its own: names for values, and calls whose bodies are counted.
_FREE = frozenset(
    """
    parameter tuple get-tuple-element bitcast constant while conditional call after-all partition-id replica-id
    opt-barrier optimization-barrier domain get-dimension-size
    """.split()
)
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_SLICES = ("dynamic-slice", "slice")


@dataclass(frozen=True)
class Collective:
    """One collective as the program has it.

    Attributes:
        kind: all-gather, all-reduce, reduce-scatter, all-to-all or permute.
        group: the devices of its first group, or the first pair of a permute, by their place in the mesh.
        bytes: of the full array over the group, that is the larger of what goes in and out; what a device sends,
            for a permute.
        asynchronous: it is started and awaited apart, so other work can run meanwhile.
        times: how often it runs in each run of its part.
    """

    kind: str
    group: tuple[int, ...]
    bytes: int
    asynchronous: bool
    times: float


@dataclass
class Part:
    """One device's share of a part of the program.

    Attributes:
        flops: of matrix products and convolutions, two for each multiplication and addition.
        traffic: bytes that instructions read from and write to the device's memory.
    """

    flops: float = 0.0
    traffic: float = 0.0
    collectives: list[Collective] = field(default_factory=list)


@dataclass(frozen=True)
class Parts:
    """`once` runs once a step, `tick` in every tick, `branches[b]` where the table says so."""

    once: Part
    tick: Part
    branches: tuple[Part, ...]


def count(module: Module, branches: int, ticks: int) -> Parts:
    """Counts a step's program.

    Args:
        branches: of the switch over actions, the idle one included.
        ticks: the trip count of the scan.
    """
    counter = _Counter(module)
    once, tick = Part(), Part()
    found: list[Part] = [Part() for _ in range(branches)]
    scan = next(
        (
            loop
            for computation in module.computations.values()
            for loop in computation
            if loop.opcode == "while"
            and any(len(switch.called) == branches for switch in counter.switches(_body(loop)))
        ),
        None,
    )
    counter.add(module.entry, once, 1.0, skip=scan)
    if scan is None:
        # One tick or one branch: XLA has unrolled the loop, and the program is as long as the step.
        return Parts(once, tick, tuple(found))
    switch = next(s for s in counter.switches(_body(scan)) if len(s.called) == branches)
    unrolled = ticks / max(1, module.trip_count(scan))
    counter.add(_body(scan), tick, 1.0 / max(1.0, round(unrolled)), skip=switch)
    for part, name in zip(found, switch.called, strict=True):
        counter.add(name, part, 1.0)
    return Parts(once, tick, tuple(found))


def device_groups(text: str) -> list[tuple[int, ...]]:
    """Groups of places in the mesh, in any of the forms in which XLA writes them.

    `{{0,1},{2,3}}`; `[2,4]<=[4,2]T(1,0)`, a transposed range; `mesh['x'=4,'y'=2] {'y'}`, along named axes (or a part
    of one, `'x':(2)2`: the second of its two factors).
    """
    if text.startswith("mesh"):
        return _named_groups(text)
    short = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not short:
        return [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", text)]
    shape, dims = (tuple(map(int, part.split(","))) for part in short.groups()[:2])
    ids = np.arange(int(np.prod(dims))).reshape(dims)
    if short.group(3):
        ids = ids.transpose(tuple(map(int, short.group(3).split(","))))
    return [tuple(map(int, row)) for row in ids.reshape(shape[0], -1)]


def _named_groups(text: str) -> list[tuple[int, ...]]:
    mesh, _, names = text.partition("]")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    factors: list[tuple[str, int]] = []  # the axes, those that are taken in part as their factors
    wanted = {name: (int(before or 1), int(size or 0)) for name, before, size in _AXIS.findall(names)}
    for name, size in sizes.items():
        before, taken = wanted.get(name, (1, 0))
        taken = taken or (size if name in wanted else 1)
        factors += [("", before), (name, taken), ("", size // (before * taken))]
    ids = np.arange(int(np.prod([size for _, size in factors]))).reshape([size for _, size in factors])
    inside = [place for place, (name, _) in enumerate(factors) if name in wanted]
    outside = [place for place in range(len(factors)) if place not in inside]
    count = int(np.prod([factors[place][1] for place in inside]))
    return [tuple(map(int, row)) for row in ids.transpose(outside + inside).reshape(-1, count)]


def _body(loop: Instruction) -> str:
    match = re.search(r"body=%?([\w.\-]+)", loop.attributes)
    return match.group(1) if match else ""


class _Counter:
    def __init__(self, module: Module):
        self._module = module
        self._moved = cache(self._moved_by_fusion)

    def switches(self, name: str) -> Iterator[Instruction]:
        """The conditionals of a computation and of those that it calls."""
        for instruction in self._module.computations[name]:
            if instruction.opcode == "conditional":
                yield instruction
            elif instruction.opcode in ("call", "fusion"):
                for called in instruction.called:
                    yield from self.switches(called)

    def add(self, name: str, part: Part, times: float, skip: Instruction | None = None) -> None:
        """Adds a computation and all that it calls, `times` over."""
        computation = self._module.computations[name]
        for instruction in computation:
            if instruction is skip:
                continue
            kind = instruction.opcode.removesuffix("-start")
            if kind in _COLLECTIVES:
                self._collective(instruction, computation, part, times)
            elif instruction.opcode in ("dot", "convolution"):
                part.flops += times * _flops(instruction, computation)
            if instruction.opcode == "fusion":
                part.flops += times * sum(self._fused_flops(called) for called in instruction.called)
                part.traffic += times * self._moved(instruction.name, computation.name)
                self._fused_collectives(instruction, part, times)
            elif instruction.opcode == "while":
                self.add(_body(instruction), part, times * self._module.trip_count(instruction), skip)
            elif instruction.opcode == "conditional":
                for called in instruction.called:
                    self.add(called, part, times, skip)
            elif instruction.opcode == "call" or instruction.opcode.endswith("-start") and instruction.called:
                for called in instruction.called:
                    self.add(called, part, times, skip)
            elif instruction.opcode not in _FREE and not instruction.opcode.endswith(("-done", "-update")):
                part.traffic += times * _moved(instruction, computation)

    def _collective(self, instruction: Instruction, computation: Computation, part: Part, times: float) -> None:
        kind = instruction.opcode.removesuffix("-start")
        begun = instruction.opcode.endswith("-start")
        operands = sum(operand.bytes for operand in computation.operands(instruction))
        # The result of a `-start` holds the operands too.
        result = instruction.bytes - operands if begun and kind != "all-reduce" else instruction.bytes
        if kind == "collective-permute":
            pairs = device_groups(_braces(instruction, "source_target_pairs"))
            moving = [pair for pair in pairs if pair[0] != pair[1]]
            if moving:
                part.collectives.append(Collective("permute", moving[0], operands, begun, times))
            return
        groups = device_groups(_groups(instruction))
        if groups and len(groups[0]) > 1:
            part.collectives.append(Collective(kind, groups[0], max(operands, result), begun, times))

    def _fused_collectives(self, fusion: Instruction, part: Part, times: float) -> None:
        for called in fusion.called:
            for instruction in self._module.computations.get(called, ()):
                if instruction.opcode.removesuffix("-start") in _COLLECTIVES:
                    self._collective(instruction, self._module.computations[called], part, times)

    def _fused_flops(self, name: str) -> float:
        computation = self._module.computations[name]
        own = sum(_flops(i, computation) for i in computation if i.opcode in ("dot", "convolution"))
        return own + sum(self._fused_flops(c) for i in computation if i.opcode == "fusion" for c in i.called)

    def _moved_by_fusion(self, name: str, caller: str) -> float:
        computation = self._module.computations[caller]
        fusion = computation.instructions[name]
        body = self._module.computations[fusion.called[0]]
        parameters = sorted(
            (i for i in body if i.opcode == "parameter"), key=lambda i: int(re.findall(r"\((\d+)\)", i.text)[0])
        )
        total = 0.0
        for operand, parameter in zip(computation.operands(fusion), parameters, strict=False):
            if not _on_chip(operand):
                total += min(operand.bytes, _read(parameter, body))
        written = _written(body.root, body)
        return total + min(_in_memory(fusion), written)


def _read(parameter: Instruction, body: Computation) -> float:
    """The bytes of a parameter that a fusion reads: of what it only slices the slices, of what it updates nothing."""
    total = 0.0
    for user in body.users.get(parameter.name, ()):
        if user.opcode in _SLICES:
            total += user.bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name:
            continue
        elif user.opcode in ("bitcast", "get-tuple-element"):
            total += _read(user, body)
        else:
            return parameter.bytes
    return total


def _written(root: Instruction, body: Computation) -> float:
    operands = body.operands(root)
    if root.opcode == "dynamic-update-slice":
        return operands[1].bytes
    if root.opcode in ("tuple", "bitcast") and operands:
        return sum(_written(operand, body) for operand in operands)
    return root.bytes


def _moved(instruction: Instruction, computation: Computation) -> float:
    operands = computation.operands(instruction)
    if instruction.opcode in _SLICES:
        return 2 * _in_memory(instruction)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * operands[1].bytes
    if instruction.opcode == "copy-start":
        return sum(_in_memory(operand) for operand in operands) or _bytes_in_memory(instruction.arrays[:1])
    return sum(_in_memory(operand) for operand in operands) + _in_memory(instruction)


def _in_memory(instruction: Instruction) -> int:
    return _bytes_in_memory(instruction.arrays)


def _bytes_in_memory(arrays: Iterable[Array]) -> int:
    return sum(array.bytes for array in arrays if not array.on_chip)


def _on_chip(instruction: Instruction) -> bool:
    return all(array.on_chip for array in instruction.arrays)


def _groups(instruction: Instruction) -> str:
    short = re.search(
        r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[[^\]]*\] \{[^}]*\})", instruction.attributes
    )
    return short.group(1) if short else _braces(instruction, "replica_groups")


def _braces(instruction: Instruction, name: str) -> str:
    """The value of an attribute in two levels of braces."""
    match = re.search(rf"{name}=(\{{(?:\{{[\d,]*\}},?)*\}})", instruction.attributes)
    return match.group(1) if match else ""


# --- FLOPs ----------------------------------------------------------------------------------------------------


def _flops(instruction: Instruction, computation: Computation) -> float:
    left, right = computation.operands(instruction)[:2]
    if instruction.opcode == "dot":
        contracted = [int(i) for i in instruction.attribute("lhs_contracting_dims").strip("{}").split(",") if i]
        return 2.0 * instruction.arrays[0].size * float(np.prod([left.arrays[0].shape[i] for i in contracted]))
    return _convolution_flops(instruction, left.arrays[0].shape, right.arrays[0].shape)


def _convolution_flops(instruction: Instruction, left: Sequence[int], right: Sequence[int]) -> float:
    """Counts products that a convolution really makes: TPU programs write batched matmuls as padded, dilated ones."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels is not None
    of_left, of_right, of_out = labels.groups()
    out = instruction.arrays[0].shape
    window = _window(instruction, len(of_left) - 2)
    products = 1.0
    for place, options in enumerate(window):
        sides = left[of_left.index(str(place))], right[of_right.index(str(place))], out[of_out.index(str(place))]
        products *= _overlaps(*sides, **options)
    return 2.0 * products * right[of_right.index("i")] * out[of_out.index("b")] * out[of_out.index("f")]


def _window(instruction: Instruction, count: int) -> list[dict[str, int]]:
    match = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    values = dict(item.split("=") for item in match.group(1).split()) if match else {}
    each: list[dict[str, int]] = []
    for place in range(count):

        def of(name: str, otherwise: int, place: int = place) -> int:
            return int(values[name].split("x")[place]) if name in values else otherwise

        low = int(values["pad"].split("x")[place].split("_")[0]) if "pad" in values else 0
        each.append(
            {"stride": of("stride", 1), "low": low, "spread": of("lhs_dilate", 1), "dilate": of("rhs_dilate", 1)}
        )
    return each


@cache
def _overlaps(left: int, right: int, out: int, *, stride: int, low: int, spread: int, dilate: int) -> int:
    """Pairs of an output place and a window place that meet an element and no padding, along one dimension."""
    at = np.arange(out)[:, None] * stride + np.arange(right)[None] * dilate - low
    return int(((at >= 0) & (at % spread == 0) & (at // spread < left)).sum())

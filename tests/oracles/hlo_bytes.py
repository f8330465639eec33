"""Bytes that cross between devices, read off the text of a compiled program."""

from __future__ import annotations

import math
import re

_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(.*)$", re.MULTILINE)
_ARRAY = re.compile(r"([a-z]+)(\d*)\[([\d,]*)\]")


def crossing_bytes(text: str, devices: int) -> int:
    """Over all devices, of the collectives of one program; those of a loop count once."""
    lines = [match.groups() for match in _LINE.finditer(text)]
    sizes = {name: _bytes(shape) for name, shape, *_ in lines}
    total = 0
    for name, shape, kind, operands, rest in lines:
        if kind == "all-to-all":
            parts = len(_ARRAY.findall(shape))
            assert parts > 1, "an all-to-all that is not cut into its parts"
            total += devices * sizes[name] * (parts - 1) // parts
        elif kind == "all-gather":
            total += devices * (sizes[name] - sizes[operands.lstrip("%")])
        elif kind == "collective-permute":
            pairs = re.findall(r"(\d+),(\d+)", rest.split("source_target_pairs=")[1].split("}}")[0])
            total += sizes[name] * sum(a != b for a, b in pairs)
        else:
            assert not kind.startswith(("all-reduce", "reduce-scatter", "ragged")), kind
    return total


def _bytes(shape: str) -> int:
    return sum(
        math.prod(map(int, filter(None, dims.split(",")))) * (int(bits) if bits else 8) // 8
        for _, bits, dims in _ARRAY.findall(shape)
    )

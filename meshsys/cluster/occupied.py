"""Files that say which chips are taken."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshsys.cluster.pod import Pod
from meshsys.cluster.wiring import grant
from meshsys.errors import ConfigError
from meshsys.torus.topology import Topology

__all__ = ["occupy"]

Box = tuple[str, tuple[int, ...], tuple[int, ...]]  # where it is in the file, its corner, its sides
_FORMS = 'a chip is 1,0,3 in CSV or [1, 0, 3] in JSON, a box 0,0,0,4,4,8 or {"at": [0, 0, 0], "box": [4, 4, 8]}'


def occupy(pod: Pod, name: str, option: str) -> None:
    """Gives each chip or box that a file lists to a job of its own, 1, 2, ...

    A CSV row is a chip, or a box: its corner and then its sides; the first row may be names. JSON is a list of chips
    `[x, y, z]` and boxes `{"at": [x, y, z], "box": [a, b, c]}`.

    Raises:
        ConfigError: the file cannot be read, or has chips that are not there or there twice.
    """
    try:
        text = Path(os.path.expanduser(name)).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{option}={name} cannot be read: {error.strerror}; give a CSV or JSON file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{option}={name} is not text; give a CSV or JSON file") from None
    boxes = _json(text, pod, f"{option}={name}") if text.lstrip()[:1] in ("[", "{") else _csv(text, pod, option, name)
    at_of: dict[int, str] = {}
    topology = Topology(pod.dims)
    for job, (where, corner, sides) in enumerate(boxes, 1):
        for place, side, size in zip(corner, sides, pod.dims, strict=True):
            if side < 1 or place < 0 or place + side > size:
                what = _text(corner) + (f" of {_text(sides, 'x')}" if max(sides) > 1 else "")
                raise ConfigError(f"{option}={name}, {where}: {what} is not within {topology}; chips count from 0")
        chips = [topology.index(chip) for chip in itertools.product(*map(_span, corner, sides))]
        for chip in chips:
            if chip in at_of:
                there = _text(topology.coord(chip))
                raise ConfigError(
                    f"{option}={name}, {where}: chip {there} is taken already by {at_of[chip]}; list each chip once"
                )
        at_of.update(dict.fromkeys(chips, where))
        pod.take(job, grant(pod, np.array(chips, np.int64).reshape(sides), None, _text(sides, "x")))


def _csv(text: str, pod: Pod, option: str, name: str) -> Iterator[Box]:
    for number, row in enumerate(csv.reader(io.StringIO(text)), 1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or (number == 1 and not any(cell.lstrip("-").isdigit() for cell in cells)):
            continue
        yield _box(cells, pod, f"{option}={name}", f"line {number}")


def _json(text: str, pod: Pod, option: str) -> Iterator[Box]:
    try:
        listed = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option} is not JSON: {error}; {_FORMS}") from None
    if not isinstance(listed, list):
        raise ConfigError(f"{option} is not a list; {_FORMS}")
    for number, item in enumerate(listed, 1):
        where = f"entry {number}"
        if isinstance(item, dict) and sorted(item) in (["at"], ["at", "box"]):
            item = [*_list(item["at"]), *_list(item.get("box", []))]
        yield _box(item if isinstance(item, list) else [item], pod, option, where)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _box(cells: list[Any], pod: Pod, option: str, where: str) -> Box:
    try:
        numbers = tuple(int(cell) for cell in cells if not isinstance(cell, (bool, float)))
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) != len(cells) or len(numbers) not in (pod.ndim, 2 * pod.ndim):
        shown = ",".join(map(str, cells))[:60]
        raise ConfigError(f"{option}, {where}: {shown} is neither a chip nor a box in {pod.ndim} dimensions; {_FORMS}")
    sides = numbers[pod.ndim :] or (1,) * pod.ndim
    return where, numbers[: pod.ndim], sides


def _span(start: int, side: int) -> range:
    return range(start, start + side)


def _text(numbers: tuple[int, ...], by: str = ",") -> str:
    return by.join(map(str, numbers))

"""The schedule as a picture: cell by cell, or where that would be a very large page, as bands of colour."""

from __future__ import annotations

from collections import defaultdict

from schedules import render
from schedules.actions import Kind, Schedule
from schedules.ticks import timeline

__all__ = ["timeline_picture"]

_MOST_CELLS = 6000
_COLOURS = {Kind.F: "#2563eb", Kind.B: "#be185d", Kind.I: "#c2410c", Kind.W: "#15803d", Kind.R: "#52525b"}
_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient", Kind.R: "recompute"}


def timeline_picture(schedule: Schedule) -> str:
    """An SVG element; as wide as the schedule has ticks."""
    grid = timeline(schedule)
    if len(grid) * len(grid[0]) <= _MOST_CELLS:
        return render.svg(schedule)
    paths: dict[Kind, list[str]] = defaultdict(list)
    for rank, row in enumerate(grid):
        for tick, action in enumerate(row):
            if action is not None:
                paths[action.kind].append(f"M{tick * 3} {rank * 9}h3v8h-3z")
    width, height = 3 * len(grid[0]), 9 * len(grid)
    words = ", ".join(f"{_NAMES[kind]} {_COLOURS[kind]}" for kind in paths)
    bands = "".join(f'<path fill="{_COLOURS[kind]}" d="{"".join(parts)}"/>' for kind, parts in paths.items())
    legend, x = [], 0
    for kind in paths:
        legend.append(f'<rect x="{x}" y="{height + 12}" width="14" height="14" rx="3" fill="{_COLOURS[kind]}"/>')
        legend.append(f'<text x="{x + 20}" y="{height + 24}">{_NAMES[kind]}</text>')
        x += 40 + 7 * len(_NAMES[kind])
    return ""

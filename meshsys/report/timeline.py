"""The schedule as a picture: cell by cell, or where that would make a huge page, as bands of colour."""

from __future__ import annotations

from collections import defaultdict
from html import escape

from schedules import render
from schedules.actions import Action, Kind, Schedule
from schedules.ticks import timeline

__all__ = ["timeline_picture"]

_MOST_CELLS = 6000
_TICK, _ROW = 3, 9  # pixels of the bands
_GREY = "#757b85"  # legible on white and on black
_KINDS = {
    Kind.F: ("forward", "#2563eb"),
    Kind.B: ("backward", "#be185d"),
    Kind.I: ("input gradient", "#c2410c"),
    Kind.W: ("weight gradient", "#15803d"),
}


def timeline_picture(schedule: Schedule) -> str:
    """An SVG element, as wide as the schedule has ticks."""
    grid = timeline(schedule)
    return render.svg(schedule) if len(grid) * len(grid[0]) <= _MOST_CELLS else _bands(schedule, grid)


def _bands(schedule: Schedule, grid: tuple[tuple[Action | None, ...], ...]) -> str:
    paths: dict[Kind, list[str]] = defaultdict(list)
    for rank, row in enumerate(grid):
        for tick, action in enumerate(row):
            if action is not None:
                paths[action.kind].append(f"M{tick * _TICK} {rank * _ROW}h{_TICK}v{_ROW - 1}h-{_TICK}z")
    below = _ROW * len(grid) + 10
    parts, x = [], 0
    for kind, (name, colour) in _KINDS.items():
        if kind in paths:
            cells = "".join(paths[kind])
            parts.append(f'<path fill="{colour}" d="{cells}"/>')
            parts.append(f'<rect x="{x}" y="{below}" width="14" height="14" rx="3" fill="{colour}"/>')
            parts.append(f'<text x="{x + 20}" y="{below + 12}" fill="{_GREY}">{name}</text>')
            x += 40 + 7 * len(name)
    return (
        f'<svg width="{max(_TICK * len(grid[0]), x)}" height="{below + 20}" role="img" font-size="12">'
        f"<title>{escape(render.summary(schedule))}</title>{''.join(parts)}</svg>"
    )

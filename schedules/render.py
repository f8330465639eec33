"""A schedule as a picture: text for the terminal, SVG for pages, by ticks or in time.

The CSV with bubbles is `to_csv(schedule, timeline(schedule))`.
"""

from __future__ import annotations

import html
import math
import re
import statistics

from schedules.actions import Action, Kind, Schedule
from schedules.simulate import Timeline
from schedules.ticks import timeline
from schedules.validate import live

__all__ = ["MEANING", "summary", "svg", "svg_in_time", "text"]

MEANING = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.R: "recompute",
}
"""What an action of each kind is, in words."""


def text(schedule: Schedule, width: int = 80) -> str:
    """A grid with a row a rank and a column a tick; a dot is a bubble.

    Cells are kind and microbatch, `F0`, with the stage in front where a rank holds several, `4F0`.

    Args:
        width: columns of the terminal; more ticks than fit continue in a further grid below.
    """
    grid = timeline(schedule)
    cells = [["." if action is None else _label(action, schedule.chunks) for action in row] for row in grid]
    ticks = len(grid[0])
    cell = max(len(word) for row in cells for word in row) + 1
    names = [f"rank {rank}" for rank in range(schedule.ranks)]
    margin = max(map(len, names)) + 2
    per_grid = max((width - margin) // cell, 1)
    every = 5 if cell * 5 > len(str(ticks)) else 10
    lines = [summary(schedule)]
    for first in range(0, ticks, per_grid):
        shown = range(first, min(first + per_grid, ticks))
        head = "".join((str(tick) if tick % every == 0 else "").ljust(cell) for tick in shown)
        lines += ["", "tick".ljust(margin) + head.rstrip()]
        for name, row in zip(names, cells, strict=True):
            lines.append(name.ljust(margin) + "".join(row[tick].ljust(cell) for tick in shown).rstrip())
    return "\n".join(lines) + "\n"


def summary(schedule: Schedule) -> str:
    """One line: the name, the sizes and what the order costs in ticks and activations."""
    grid = timeline(schedule)
    bubbles = sum(action is None for row in grid for action in row) / (len(grid) * len(grid[0]))
    counts = [_count(schedule.ranks, "rank"), _count(schedule.microbatches, "microbatch", "microbatches")]
    if schedule.chunks > 1:
        counts.append(_count(schedule.stages, "stage"))
    counts += [_count(len(grid[0]), "tick"), f"{bubbles:.1%} bubbles"]
    counts.append(f"a peak of {_count(max(live(schedule)), 'activation')}")
    return f"{schedule.name}: {', '.join(counts)}"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _label(action: Action, chunks: int) -> str:
    return str(action) if chunks > 1 else f"{action.kind}{action.microbatch}"


# White on the full colour, ink on a tint of it, has a contrast of 4.5 or more. Grey is legible on white and on black.
_COLOUR = {Kind.F: 0x2563EB, Kind.B: 0xBE185D, Kind.I: 0xC2410C, Kind.W: 0x15803D, Kind.R: 0x52525B}
_INK, _GREY = "#0b1020", "#757b85"
_STEP, _CELL, _LEFT = 26, 24, 64  # pixels: from cell to cell, a cell, the rank names
_FONT = "ui-sans-serif,system-ui,sans-serif"


def svg(schedule: Schedule, title: str | None = None, *, hover: bool = True) -> str:
    """The same grid as an SVG element: hue by kind, tint by chunk, the microbatch in the cell.

    It needs no other file, style sheet or id, so one page can hold many; colours suit light and dark pages.
    It is as wide as its ticks (26 pixels each): put a long one into a box that scrolls.

    Args:
        title: the heading; by default the schedule's name and sizes.
        hover: say of each cell under the pointer what it is; without, the text is half as long.
    """
    grid = timeline(schedule)
    ticks, ranks = len(grid[0]), schedule.ranks
    heading = _escape(summary(schedule) if title is None else title)
    chunk_of = {stage: c for rank in range(ranks) for c, stage in enumerate(schedule.stages_of(rank))}
    legend, legend_width = _legend(schedule, x=_LEFT, y=62 + ranks * _STEP)
    width = max(_LEFT + ticks * _STEP + 12, legend_width, 8 * len(heading) + 24)
    height = 94 + ranks * _STEP
    out = _head(width, height, heading)
    for rank, row in enumerate(grid):
        y = 36 + rank * _STEP
        out.append(f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end" fill="{_GREY}">rank {rank}</text>')
        for tick, action in enumerate(row):
            x = _LEFT + tick * _STEP
            if action is None:
                out.append(f'<rect x="{x + 9}" y="{y + 9}" width="6" height="6" rx="3" fill="{_GREY}" opacity=".3"/>')
                continue
            fill, ink = _shade(action.kind, chunk_of[action.stage], schedule.chunks)
            cell = (
                f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" rx="4" fill="{fill}"/>'
                f'<text x="{x + 12}" y="{y + 16}" fill="{ink}">{action.microbatch}</text>'
            )
            said = (
                f"{action}: {MEANING[action.kind]} of microbatch {action.microbatch}, stage {action.stage}, "
                f"rank {rank}, tick {tick}"
            )
            out.append(f"<g><title>{said}</title>{cell}</g>" if hover else cell)
    axis = 50 + ranks * _STEP
    for tick in range(0, ticks, 5):
        out.append(f'<text x="{_LEFT + tick * _STEP + 12}" y="{axis}" fill="{_GREY}">{tick}</text>')
    out.append(f'<text x="{_LEFT - 8}" y="{axis}" text-anchor="end" fill="{_GREY}">tick</text>')
    return "\n".join([*out, *legend, "</svg>"]) + "\n"


def svg_in_time(schedule: Schedule, found: Timeline, title: str | None = None) -> str:
    """The schedule with its real durations, as an SVG element of the same style; a thin line is a message.

    An action of the median length is as wide as a tick of `svg`, in a picture of at most 20,000 pixels.

    Args:
        found: of this schedule (`schedules.simulate.simulate`).
        title: the heading; by default the schedule's name, its makespan and its bubbles.
    """
    said = f"{schedule.name}: makespan {found.makespan:.6g}, {found.bubble_fraction:.1%} bubbles"
    heading = _escape(said if title is None else title)
    lengths = [found.end[action] - found.start[action] for action in schedule]
    unit = statistics.median(length for length in lengths if length > 0) if any(lengths) else 1.0
    scale = min(_STEP / unit, 20_000 / max(found.makespan, unit))
    chunk_of = {stage: c for rank in range(schedule.ranks) for c, stage in enumerate(schedule.stages_of(rank))}
    legend, legend_width = _legend(schedule, x=_LEFT, y=62 + schedule.ranks * _STEP)
    width = max(_LEFT + math.ceil(found.makespan * scale) + 12, legend_width, 8 * len(heading) + 24)
    out = _head(width, 94 + schedule.ranks * _STEP, heading)
    for action, arrival in found.arrival.items():
        sender = schedule.placement[action.stage]
        receiver = schedule.placement[action.stage + (1 if action.kind is Kind.F else -1)]
        x1, x2 = (_LEFT + time * scale for time in (found.end[action], arrival))
        y1, y2 = (36 + rank * _STEP + _CELL / 2 for rank in (sender, receiver))
        out.append(f'<path d="M{x1:.1f} {y1:g}L{x2:.1f} {y2:g}" stroke="{_GREY}" opacity=".5"/>')
    for rank, row in enumerate(schedule.actions):
        y = 36 + rank * _STEP
        out.append(f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end" fill="{_GREY}">rank {rank}</text>')
        for action in row:
            x, long = _LEFT + found.start[action] * scale, (found.end[action] - found.start[action]) * scale
            fill, ink = _shade(action.kind, chunk_of[action.stage], schedule.chunks)
            fits = long >= 7 * len(str(action.microbatch)) + 2
            number = (
                f'<text x="{x + long / 2:.1f}" y="{y + 16}" fill="{ink}">{action.microbatch}</text>' if fits else ""
            )
            out.append(
                f"<g><title>{action}: {MEANING[action.kind]} of microbatch {action.microbatch}, stage {action.stage}, "
                f"rank {rank}, from {found.start[action]:.6g} to {found.end[action]:.6g}</title>"
                f'<rect x="{x:.1f}" y="{y}" width="{max(long - 1, 0.5):.1f}" height="{_CELL}" '
                f'rx="{min(4, long / 4):.1f}" fill="{fill}"/>{number}</g>'
            )
    axis = 50 + schedule.ranks * _STEP
    step = _round_step(100 / scale)
    for mark in range(math.floor(found.makespan / step) + 1):
        out.append(f'<text x="{_LEFT + mark * step * scale:.1f}" y="{axis}" fill="{_GREY}">{mark * step:.6g}</text>')
    out.append(f'<text x="{_LEFT - 18}" y="{axis}" text-anchor="end" fill="{_GREY}">time</text>')
    return "\n".join([*out, *legend, "</svg>"]) + "\n"


def _round_step(least: float) -> float:
    """The first of 1, 2, 5, 10, 20, ... (and 0.5, 0.2, ...) that is not below."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _head(width: int, height: int, heading: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{heading}" font-family="{_FONT}" font-size="11" text-anchor="middle">',
        f'<text x="12" y="22" font-size="14" font-weight="600" text-anchor="start" fill="{_GREY}">{heading}</text>',
    ]


def _legend(schedule: Schedule, x: int, y: int) -> tuple[list[str], int]:
    """The legend's elements and their right end: a box a chunk for each kind that occurs."""
    out = []
    used = {action.kind for action in schedule}
    for kind in (kind for kind in Kind if kind in used):
        for chunk in range(schedule.chunks):
            fill, ink = _shade(kind, chunk, schedule.chunks)
            name = chunk if schedule.chunks > 1 else kind
            out.append(f'<rect x="{x}" y="{y}" width="18" height="18" rx="4" fill="{fill}"/>')
            out.append(f'<text x="{x + 9}" y="{y + 13}" fill="{ink}">{name}</text>')
            x += 20
        words = MEANING[kind] + (" by chunk" if schedule.chunks > 1 else "")
        out.append(f'<text x="{x + 4}" y="{y + 13}" text-anchor="start" fill="{_GREY}">{words}</text>')
        x += 22 + 6 * len(words)
    return out, x


def _shade(kind: Kind, chunk: int, chunks: int) -> tuple[str, str]:
    """Fill and ink: the full colour for the first chunk, up to two thirds of white for the last."""
    white = chunk / max(chunks - 1, 1) * 2 / 3
    channels = [round(c + (255 - c) * white) for c in _COLOUR[kind].to_bytes(3, "big")]
    return "#" + bytes(channels).hex(), "#ffffff" if white < 0.25 else _INK


def _escape(words: str) -> str:
    """For element and attribute text; control characters, which XML cannot hold, become a question mark."""
    return html.escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", words))

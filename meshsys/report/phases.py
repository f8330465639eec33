"""What the steps of `meshsys rl` are spent on: a Gantt chart of the last ones, and shares of the whole run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from meshsys.report.charts import number_text, ticks
from meshsys.report.history import History
from meshsys.report.tables import key, stack, table

__all__ = ["phases"]

_PHASES = ("reshard", "sample", "reward", "train")  # in the order in which a step has them
_REST = "the rest"
_COLOURS = {"reshard": 8, "sample": 0, "reward": 5, "train": 3, _REST: 2}  # of the style sheet: c0, c1, ...
_MOST_STEPS = 8  # of the Gantt chart
_LEFT, _RIGHT, _TOP, _ROW, _BAR = 64, 12, 20, 30, 18  # pixels


def phases(history: History) -> str:
    """The section, as HTML; a step without times is left out."""
    if any(map(math.isfinite, history.of("trainer_wait_seconds"))):
        return _medians(history)
    steps = _timed(history)
    if not steps:
        return '<h2>Phases</h2><p class="none">Nothing yet.</p>'
    shown = list(steps)[-_MOST_STEPS:]
    return (
        "<h2>Phases</h2><p>A step reshards the parameters into the sampling layout, samples, waits for rewards that "
        "were not computed while it sampled, and trains. All devices take part in each phase.</p>"
        f'<div class="wide">{_gantt({step: steps[step] for step in shown})}</div>{_shares(list(steps.values()))}'
    )


def _medians(history: History) -> str:
    """Where phases overlap: how long each is, and what waits."""
    rows = []
    for name in (*_PHASES, "trainer_wait", "sampler_wait", "step"):
        found = [second for second in history.of(f"{name}_seconds") if math.isfinite(second)]
        if found:
            rows.append([name.replace("_wait", " waits"), f"{number_text(statistics.median(found))} s"])
    return (
        "<h2>Phases</h2><p>Some devices sample while others train, so that phases overlap; medians of a step.</p>"
        f"{table(['phase', '#median'], rows, total=True)}"
    )


def _timed(history: History) -> dict[int, dict[str, float]]:
    """Seconds of each phase, by step."""
    columns = {name: history.of(f"{name}_seconds") for name in _PHASES}
    found = {}
    for place, (step, whole) in enumerate(zip(history.steps, history.of("step_seconds"), strict=True)):
        seconds = {name: column[place] for name, column in columns.items()}
        if all(math.isfinite(second) and second >= 0 for second in seconds.values()):
            rest = whole - sum(seconds.values())
            found[step] = seconds | {_REST: rest if rest > 0 else 0.0}
    return found


def _gantt(steps: Mapping[int, Mapping[str, float]]) -> str:
    """One row a phase; the steps one after another, from 0."""
    width, height = 1056, _TOP + _ROW * len(_PHASES) + 26
    end = sum(sum(seconds.values()) for seconds in steps.values()) or 1.0

    def x(second: float) -> float:
        return round(_LEFT + second / end * (width - _LEFT - _RIGHT), 1)

    out = [f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="Phases of the last steps">']
    bottom = height - 24
    for tick in ticks(0, end, 8):
        out.append(f'<path class="grid" d="M{x(tick)} {_TOP}V{bottom}"/>')
        out.append(f'<text x="{x(tick)}" y="{height - 8}" text-anchor="middle">{number_text(tick)} s</text>')
    for row, name in enumerate(_PHASES):
        middle = _TOP + _ROW * row + _ROW / 2 + 4
        out.append(f'<text x="{_LEFT - 10}" y="{middle}" text-anchor="end">{name}</text>')
    begun = 0.0
    for step, seconds in steps.items():
        out.append(f'<path class="cross line" style="visibility:visible" d="M{x(begun)} {_TOP}V{bottom}"/>')
        out.append(f'<text x="{x(begun) + 4}" y="{_TOP - 8}">{step:,}</text>')
        at = begun
        for row, name in enumerate(_PHASES):
            wide = max(x(at + seconds[name]) - x(at), 1.0)
            y = _TOP + _ROW * row + (_ROW - _BAR) / 2
            words = f"<title>step {step:,}: {name} {number_text(seconds[name])} s</title>"
            colour = f"var(--c{_COLOURS[name]})"
            out.append(
                f'<rect class="phase" x="{x(at)}" y="{y}" width="{wide:.1f}" height="{_BAR}" rx="2" '
                f'style="fill:{colour}">{words}</rect>'
            )
            at += seconds[name]
        begun += sum(seconds.values())
    return "".join([*out, "</svg>"])


def _shares(steps: Sequence[Mapping[str, float]]) -> str:
    names = (*_PHASES, _REST)
    sums = {name: sum(seconds[name] for seconds in steps) for name in names}
    total = sum(sums.values()) or 1.0
    bars = stack([(name, sums[name], f"{sums[name] / total:.1%}", _COLOURS[name]) for name in names])
    rows = [
        [
            f"{key(f'var(--c{_COLOURS[name]})')}{name}",
            f"{number_text(sums[name])} s",
            f"{sums[name] / total:.1%}",
            f"{number_text(statistics.median(seconds[name] for seconds in steps))} s",
        ]
        for name in names
    ]
    medians = f"{number_text(statistics.median(sum(seconds.values()) for seconds in steps))} s"
    rows.append(["all", f"{number_text(total)} s", "", medians])
    head = ["phase", "#all steps", "#share", "#median of a step"]
    return f"<h3>All {len(steps):,} steps, the first with its compilations</h3>{bars}{table(head, rows, total=True)}"

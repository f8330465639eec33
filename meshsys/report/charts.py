"""Line charts as inline SVG; the page's script shows the values under the pointer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

__all__ = ["line_chart", "lines_chart", "number_text", "smooth", "ticks"]

_MOST_POINTS = 800

_Scale = Callable[[float], float]  # a number to pixels


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The average of `window` values around each, fewer near the ends; NaN where there is none."""
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    out = []
    for i in range(len(values)):
        reach = min(window // 2, i, len(values) - 1 - i)
        first, last = i - reach, i + reach + 1
        number = counts[last] - counts[first]
        out.append((sums[last] - sums[first]) / number if number else math.nan)
    return out


def ticks(low: float, high: float, about: int, whole: bool = False) -> list[float]:
    """Round numbers inside [low, high], some `about` of them: steps of 1, 2 or 5 times a power of 10."""
    rough = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


def number_text(value: float) -> str:
    """Four digits, thousands as 12.3k; a dash where there is no number."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= 10 * scale or (size >= scale and unit != "k"):
            return f"{value / scale:.3g}{unit}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1e}" if 0 < size < 1e-3 else f"{value:.4g}"


def line_chart(
    label: str,
    steps: Sequence[int],
    values: Sequence[float],
    *,
    width: int,
    height: int,
    average: Sequence[float] | None = None,
    unit: str = "",
) -> str:
    """A chart over the steps.

    Args:
        values: NaN leaves a gap, and a mark at the bottom.
        average: drawn over the values, which are then faint.
    """
    found = [value for value in values if math.isfinite(value)]
    if not found:
        return '<p class="none">Nothing yet.</p>'
    left, right, top, bottom = 48, 10, 10, 24
    low, high = _limits(found)
    first, last = steps[0], max(steps[-1], steps[0] + 1)

    def x(step: float) -> float:
        return round(left + (step - first) / (last - first) * (width - left - right), 1)

    def y(value: float) -> float:
        return round(height - bottom - (value - low) / (high - low) * (height - top - bottom), 1)

    out = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)} by step" '
        f"data-points='{_points(steps, values, average, unit, x, y)}'>"
    ]
    for tick in ticks(low, high, max(2, height // 45)):
        out.append(f'<path class="grid" d="M{left} {y(tick)}H{width - right}"/>')
        out.append(f'<text x="{left - 8}" y="{y(tick) + 3.5}" text-anchor="end">{number_text(tick)}</text>')
    for tick in ticks(first, last, max(3, width // 110), whole=True):
        out.append(f'<text x="{x(tick)}" y="{height - 6}" text-anchor="middle">{number_text(tick)}</text>')
    if average is not None:
        out.append(f'<path class="line faint" d="{_path(steps, values, x, y)}"/>')
    out.append(f'<path class="line" d="{_path(steps, values if average is None else average, x, y)}"/>')
    if len(found) == 1:
        only = next(i for i, value in enumerate(values) if math.isfinite(value))
        out.append(f'<circle class="dot" cx="{x(steps[only])}" cy="{y(values[only])}" r="3"/>')
    lost = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    for step in lost[:: max(1, len(lost) // 200)]:
        mark = f"<title>step {step}: not finite</title>"
        out.append(f'<path class="lost" d="M{x(step)} {height - bottom}v-7">{mark}</path>')
    out.append(f'<path class="cross" d="M0 {top}V{height - bottom}"/><circle class="dot at" r="3.5"/></svg>')
    return "".join(out)


def lines_chart(
    label: str,
    axis: str,
    at: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    *,
    width: int,
    height: int,
    high: float | None = None,
    logarithmic: bool = False,
    unit: str = "",
) -> str:
    """A chart of several quantities over one, with a key above it.

    Args:
        axis: what `at` is, for the words at the pointer.
        at: rising; above 0 where it is `logarithmic`.
        lines: by name, a finite value for each of `at`; drawn in the colours of the style sheet, c0, c1, ...
        high: the top of the chart, whose bottom is then 0; None: as the values are.
        unit: of the values.
    """
    if not at:
        return '<p class="none">Nothing yet.</p>'
    left, right, top, bottom = 48, 10, 10, 24
    least, most = _limits([value for line in lines.values() for value in line]) if high is None else (0.0, high)
    scale: _Scale = math.log10 if logarithmic else float
    first, last = scale(at[0]), max(scale(at[-1]), scale(at[0]) + 1e-9)

    def x(place: float) -> float:
        return round(left + (scale(place) - first) / (last - first) * (width - left - right), 1)

    def y(value: float) -> float:
        return round(height - bottom - (value - least) / (most - least) * (height - top - bottom), 1)

    points = []
    for i in _picked(next(iter(lines.values()))):
        words = "; ".join(f"{name} {number_text(line[i])}{unit}" for name, line in lines.items())
        points.append([x(at[i]), y(next(iter(lines.values()))[i]), f"{axis} {number_text(at[i])}: {words}"])
    marks = escape(json.dumps(points), quote=True)
    key = "".join(
        f'<span><i class="key" style="background:var(--c{_colour(place)})"></i>{escape(name)}</span> '
        for place, name in enumerate(lines)
    )
    out = [
        f'<p class="names">{key}</p><svg class="chart" viewBox="0 0 {width} {height}" role="img" '
        f"aria-label=\"{escape(label)} by {escape(axis)}\" data-points='{marks}'>"
    ]
    for tick in ticks(least, most, max(2, height // 45)):
        out.append(f'<path class="grid" d="M{left} {y(tick)}H{width - right}"/>')
        out.append(f'<text x="{left - 8}" y="{y(tick) + 3.5}" text-anchor="end">{number_text(tick)}{unit}</text>')
    whole = range(math.ceil(first), math.floor(last) + 1)
    under = [10.0**power for power in whole] if logarithmic else ticks(first, last, max(3, width // 110))
    for tick in under:
        out.append(f'<text x="{x(tick)}" y="{height - 6}" text-anchor="middle">{number_text(tick)}</text>')
    for place, line in enumerate(lines.values()):
        path = _path(at, line, x, y)
        out.append(f'<path class="line" style="stroke:var(--c{_colour(place)})" d="{path}"/>')
    out.append(f'<path class="cross" d="M0 {top}V{height - bottom}"/><circle class="dot at" r="3.5"/></svg>')
    return "".join(out)


def _colour(place: int) -> int:
    """One of the ten, neighbours far apart."""
    return (0, 5, 3, 8, 1, 6, 4, 9, 7, 2)[place % 10]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """A little more than the range of the values, from 0 where that is near."""
    low, high = min(values), max(values)
    if high == low:
        half = abs(high) * 0.1 or 1.0
        return low - half, high + half
    margin = 0.05 * (high - low)
    return (0.0 if 0 <= low < 0.35 * high else low - margin), high + margin


def _picked(values: Sequence[float]) -> list[int]:
    """Indices of at most some 800 values: the least and the greatest of each bucket, and gaps where it has none."""
    count = len(values)
    if count <= _MOST_POINTS:
        return list(range(count))
    buckets = _MOST_POINTS // 2
    kept = {0, count - 1}
    for bucket in range(buckets):
        indices = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        kept.update(next(([i] for i in indices if not math.isfinite(values[i])), []))
        finite = [i for i in indices if math.isfinite(values[i])]
        if finite:
            kept.update((min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)))
    return sorted(kept)


def _path(steps: Sequence[float], values: Sequence[float], x: _Scale, y: _Scale) -> str:
    parts, pen = [], "M"
    for i in _picked(values):
        if math.isfinite(values[i]):
            parts.append(f"{pen}{x(steps[i])} {y(values[i])}")
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)


def _points(
    steps: Sequence[int],
    values: Sequence[float],
    average: Sequence[float] | None,
    unit: str,
    x: _Scale,
    y: _Scale,
) -> str:
    """What the pointer finds: step, place, and the words for it."""
    shown = values if average is None else average
    points = []
    for i in _picked(values):
        if math.isfinite(values[i]):
            words = f"step {steps[i]:,}: {number_text(values[i])}{unit}"
            words += f", on average {number_text(average[i])}" if average is not None else ""
            points.append([x(steps[i]), y(shown[i]), words])
    return escape(json.dumps(points), quote=True)

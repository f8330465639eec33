"""A simulation as one self-contained page: the policies' numbers, their charts, and the pod at any moment."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshsys import yaml_core
from meshsys.cluster.config import SimulationConfig
from meshsys.cluster.metrics import COLUMNS, Metrics
from meshsys.cluster.pod_view import POD_SCRIPT, POD_STYLE
from meshsys.cluster.simulator import Outcome
from meshsys.report.charts import lines_chart
from meshsys.report.style import SCRIPT, STYLE
from meshsys.torus.shapes import shape_text

__all__ = ["report_page"]

_POINTS = 200
_MOST_DRAWN = 16384  # chips


def report_page(config: SimulationConfig, outcomes: Sequence[Outcome], found: Sequence[Metrics]) -> str:
    """The whole page as HTML; it asks for nothing from outside."""
    names = _distinct([metrics.name for metrics in found])
    outcome = outcomes[0]
    cluster = config.cluster
    cubes = f"cubes of {cluster.cube}, wiring {cluster.wiring}" if cluster.cube else "no switches"
    load = config.workload.load if config.workload.load is not None else "its own load"
    lead = f"{cluster.topology}, {cubes} · {len(outcome.workload):,} jobs, {config.workload.generator}, {load}"
    sections = [
        f'<h1>Cluster simulation</h1><p class="lead">{escape(lead)}</p>',
        f'<h2>Policies</h2><div class="scroll">{_table(names, found)}</div>',
        "<p>JCT is from arrival to end. Waiting is for chips where there were too few, for a shape where there were "
        "enough but none it fits. Broken: the part of the free chips that lies in cubes which jobs have a part of.</p>",
        f'<h2>Utilisation</h2><div class="wide">{_over_time(names, found, "utilisation")}</div>',
        f"<h2>Job completion time</h2><p>The part of all jobs that ended within so many hours of their arrival.</p>"
        f'<div class="wide">{_completion(names, outcomes)}</div>',
        f'<div class="row"><div><h3>Jobs that wait</h3>{_over_time(names, found, "waiting", 510)}</div>'
        f"<div><h3>Free chips in broken cubes</h3>{_over_time(names, found, 'fragmentation', 510)}</div></div>",
        _pod(config, names, outcomes),
        f"<details><summary>Configuration</summary><pre>{escape(yaml_core.dump(config.model_dump()))}</pre></details>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Cluster simulation · meshsys</title><style>{STYLE}{POD_STYLE}</style></head>\n"
        f'<body><main>\n{chr(10).join(sections)}\n</main><div id="tip"></div>'
        f"<script>{SCRIPT}{POD_SCRIPT}</script></body></html>\n"
    )


def _distinct(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, 1)]


def _table(names: Sequence[str], found: Sequence[Metrics]) -> str:
    head = "".join(f'<th class="n">{heading}</th>' for heading, _ in COLUMNS.values())
    rows = []
    for name, metrics in zip(names, found, strict=True):
        row = metrics.row()
        cells = "".join(
            f'<td class="n">{"–" if row[key] is None else format(row[key], form)}</td>'
            for key, (_, form) in COLUMNS.items()
        )
        rows.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
    return f"<table><thead><tr><th>policy</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _over_time(names: Sequence[str], found: Sequence[Metrics], what: str, width: int = 1056) -> str:
    """All policies over the hours of the one that takes longest; one that has ended is at 0."""
    last = max((metrics.makespan_hours for metrics in found), default=0.0)
    if not last > 0:
        return '<p class="none">Nothing ran.</p>'
    at = (np.arange(_POINTS) + 0.5) * last / _POINTS
    lines = {}
    for name, metrics in zip(names, found, strict=True):
        over = metrics.utilisation.over_time
        values = np.array(getattr(over, what))
        lines[name] = np.interp(at, over.hours, values, right=0.0).tolist() if len(values) else [0.0] * _POINTS
    if what != "waiting":
        lines = {name: [100 * value for value in line] for name, line in lines.items()}
    high, unit = (None, "") if what == "waiting" else (100.0, "%")
    height = 320 if width > 600 else 200
    return lines_chart(what, "hour", at.tolist(), lines, width=width, height=height, high=high, unit=unit)


def _completion(names: Sequence[str], outcomes: Sequence[Outcome]) -> str:
    times = [np.sort((each.end - each.arrival)[np.isfinite(each.end)]) / 3600 for each in outcomes]
    ended = np.concatenate(times)
    if not len(ended):
        return '<p class="none">No job ended.</p>'
    low, high = max(float(ended.min()), 1e-3), max(float(ended.max()), 2e-3)
    at = np.geomspace(low, high, _POINTS)
    at[-1] = high  # not a little less by rounding
    lines = {
        name: (100 * np.searchsorted(each, at, side="right") / len(outcome.workload)).tolist()
        for name, each, outcome in zip(names, times, outcomes, strict=True)
    }
    return lines_chart(
        "completed", "hours", at.tolist(), lines, width=1056, height=300, high=100.0, logarithmic=True, unit="%"
    )


def _pod(config: SimulationConfig, names: Sequence[str], outcomes: Sequence[Outcome]) -> str:
    dims, chips = outcomes[0].dims, outcomes[0].chips
    if chips > _MOST_DRAWN or len(dims) > 3:
        return f'<h2>The pod</h2><p class="none">{chips:,} chips in {len(dims)} dimensions are not drawn.</p>'
    data = {
        "dims": [*dims, *(1,) * (3 - len(dims))],
        "shown": len(dims),
        "cube": config.cluster.cube or 0,
        "policies": [
            {"name": name, "moments": [_moment(*moment, outcome) for moment in outcome.snapshots]}
            for name, outcome in zip(names, outcomes, strict=True)
        ],
    }
    choices = "".join(f'<option value="{place}">{escape(name)}</option>' for place, name in enumerate(names))
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        "<h2>The pod</h2><p>Chips have the colour of their job; free ones are small, failed ones crossed. Drag to "
        "turn, and point at a chip to see its job.</p>"
        f'<div class="pod"><p><select aria-label="policy">{choices}</select> '
        '<input type="range" min="0" value="0" aria-label="time"> <output></output></p><canvas></canvas></div>'
        f'<script type="application/json" id="pods">{text}</script>'
    )


def _moment(when: float, owner: NDArray[np.int64], outcome: Outcome) -> dict[str, Any]:
    """Hours, the jobs that run then, and for each chip its place in that list + 2; 0 failed, 1 free."""
    jobs = np.unique(owner[owner > 0])
    codes = np.where(owner < 0, 0, np.where(owner == 0, 1, np.searchsorted(jobs, owner) + 2))
    shapes = [shape_text(outcome.workload.shapes[outcome.workload.shape[job - 1]]) for job in jobs.tolist()]
    return {
        "hours": round(when / 3600, 2),
        "jobs": [[job, shape] for job, shape in zip(jobs.tolist(), shapes, strict=True)],
        "used": int((owner > 0).sum()),
        "chips": base64.b64encode(codes.astype("<u2").tobytes()).decode(),
    }

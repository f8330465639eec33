"""What a simulation says about a policy, in numbers.

Job completion time (JCT) is from arrival to end, over the jobs that ended. Waiting is split by what a job waited for:
chips (there were too few), a shape (there were enough, but not in a shape that it fits), or its turn (others were
before it, and whether it would have fitted was not asked).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster.config import PolicyConfig
from meshsys.cluster.simulator import Outcome

__all__ = ["COLUMNS", "Metrics", "OverTime", "Waits", "measure"]

_POINTS = 240


@dataclass(frozen=True)
class Waits:
    """Hours; the mean over all jobs that started is split into the parts."""

    mean_hours: float
    p99_hours: float
    longest_hours: float
    resource_blocked_hours: float
    shape_blocked_hours: float
    turn_hours: float


@dataclass(frozen=True)
class OverTime:
    """Averages over equal spans from the first arrival to the last end; `hours` are their middles."""

    hours: tuple[float, ...]
    utilisation: tuple[float, ...]
    fragmentation: tuple[float, ...]
    waiting: tuple[float, ...]


@dataclass(frozen=True)
class Utilisation:
    """The part of the chips that jobs have; `mean` is up to the last arrival, that is without the end of the run."""

    mean: float
    over_time: OverTime


@dataclass(frozen=True)
class Metrics:
    """One policy.

    Attributes:
        name, placement, queue: of the policy.
        jobs, finished, refused: numbers of jobs; those that can be placed at no time are refused.
        completion_rate: the part of the jobs that is not refused.
        jct_mean_hours, jct_p50_hours, jct_p90_hours, jct_p99_hours: NaN, in JSON null, if no job ended.
        waiting: before the first start and between a stop and the next start.
        utilisation: of the chips, failed ones included.
        fragmentation: the part of the free chips that lies in cubes which jobs have a part of.
        wireability_violations: placements that the switches cannot join.
        placements, multi_cube_placements: of all jobs.
        restarts, migrations: starts beyond the first, and moves of running jobs.
        makespan_hours: from the first arrival to the last end.
        decision_ms_p50, decision_ms_p99: of one answer of the placement policy; what depends on the machine.
    """

    name: str
    placement: str
    queue: str
    jobs: int
    finished: int
    refused: int
    completion_rate: float
    jct_mean_hours: float
    jct_p50_hours: float
    jct_p90_hours: float
    jct_p99_hours: float
    waiting: Waits
    utilisation: Utilisation
    fragmentation: float
    wireability_violations: int
    placements: int
    multi_cube_placements: int
    restarts: int
    migrations: int
    makespan_hours: float
    decision_ms_p50: float
    decision_ms_p99: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON, where a number that is not finite is null."""
        found: dict[str, Any] = _finite(asdict(self))
        return found

    def row(self) -> dict[str, Any]:
        """All but what is over time, flat, for a table."""
        flat: dict[str, Any] = {}
        for name, value in self.to_dict().items():
            if name == "waiting":
                flat.update({f"waiting_{part}": number for part, number in value.items()})
            else:
                flat[name] = value["mean"] if name == "utilisation" else value
        return flat


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


COLUMNS: dict[str, tuple[str, str]] = {
    "completion_rate": ("completed", ".1%"),
    "jct_p50_hours": ("JCT p50 h", ",.2f"),
    "jct_p90_hours": ("p90 h", ",.1f"),
    "jct_p99_hours": ("p99 h", ",.1f"),
    "waiting_mean_hours": ("wait h", ",.2f"),
    "waiting_resource_blocked_hours": ("for chips", ",.2f"),
    "waiting_shape_blocked_hours": ("for a shape", ",.2f"),
    "waiting_longest_hours": ("longest h", ",.1f"),
    "utilisation": ("utilised", ".1%"),
    "fragmentation": ("broken", ".1%"),
    "wireability_violations": ("unwireable", ",d"),
    "decision_ms_p50": ("decision ms", ".2f"),
    "decision_ms_p99": ("p99 ms", ".2f"),
}
"""What a table shows of `Metrics.row`: heading and format."""


def measure(outcome: Outcome, options: PolicyConfig) -> Metrics:
    """The numbers of one policy's run."""
    ended = np.isfinite(outcome.end)
    jct = (outcome.end - outcome.arrival)[ended] / 3600
    began = outcome.starts > 0
    waited = (outcome.blocked_resource + outcome.blocked_shape + outcome.blocked_order)[began] / 3600
    refused = int(outcome.refused.sum())
    jobs = len(outcome.workload)
    decisions = outcome.decisions * 1000
    first = float(outcome.arrival[0])
    last = float(outcome.end[ended].max()) if ended.any() else first
    series = outcome.series
    until = max(outcome.until, first)
    free = np.maximum(outcome.chips - series.used - series.failed, 0)
    broken = _mean(series.time, series.broken, first, until)
    unused = _mean(series.time, free, first, until)
    return Metrics(
        name=options.label,
        placement=options.placement,
        queue=options.queue,
        jobs=jobs,
        finished=int(ended.sum()),
        refused=refused,
        completion_rate=1 - refused / jobs,
        jct_mean_hours=float(jct.mean()) if len(jct) else math.nan,
        jct_p50_hours=_percentile(jct, 50),
        jct_p90_hours=_percentile(jct, 90),
        jct_p99_hours=_percentile(jct, 99),
        waiting=Waits(
            mean_hours=float(waited.mean()) if len(waited) else math.nan,
            p99_hours=_percentile(waited, 99),
            longest_hours=float(waited.max()) if len(waited) else math.nan,
            resource_blocked_hours=_mean_hours(outcome.blocked_resource[began]),
            shape_blocked_hours=_mean_hours(outcome.blocked_shape[began]),
            turn_hours=_mean_hours(outcome.blocked_order[began]),
        ),
        utilisation=Utilisation(
            mean=_mean(series.time, series.used, first, until) / outcome.chips,
            over_time=_over_time(outcome, first, last),
        ),
        fragmentation=broken / unused if unused else 0.0,
        wireability_violations=outcome.violations,
        placements=outcome.grants,
        multi_cube_placements=outcome.joined,
        restarts=int(np.maximum(outcome.starts - 1, 0).sum()),
        migrations=int(outcome.moves.sum()),
        makespan_hours=(last - first) / 3600,
        decision_ms_p50=_percentile(decisions, 50),
        decision_ms_p99=_percentile(decisions, 99),
    )


def _percentile(values: NDArray[np.float64], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else math.nan


def _mean_hours(seconds: NDArray[np.float64]) -> float:
    return float(seconds.mean()) / 3600 if len(seconds) else math.nan


def _integral(time: NDArray[np.float64], values: NDArray[Any], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of a quantity that holds from each time to the next, from the first time up to each of `at`."""
    total = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(time))])
    place = np.clip(np.searchsorted(time, at, side="right") - 1, 0, len(time) - 1)
    return np.asarray(total[place] + values[place] * np.maximum(at - time[place], 0.0))


def _mean(time: NDArray[np.float64], values: NDArray[Any], first: float, last: float) -> float:
    if last <= first:
        return 0.0
    start, end = _integral(time, values, np.array([first, last]))
    return float(end - start) / (last - first)


def _over_time(outcome: Outcome, first: float, last: float) -> OverTime:
    series = outcome.series
    if last <= first:
        return OverTime((), (), (), ())
    edges = np.linspace(first, last, _POINTS + 1)
    span = np.diff(edges)

    def average(values: NDArray[Any]) -> NDArray[np.float64]:
        return np.asarray(np.diff(_integral(series.time, values, edges)) / span)

    free = average(np.maximum(outcome.chips - series.used - series.failed, 0))
    broken = np.divide(average(series.broken), free, out=np.zeros_like(free), where=free > 0)

    def rounded(values: NDArray[np.float64], digits: int) -> tuple[float, ...]:
        return tuple(np.round(values, digits).tolist())

    return OverTime(
        hours=rounded((edges[1:] + edges[:-1]) / 7200, 4),
        utilisation=rounded(average(series.used) / outcome.chips, 5),
        fragmentation=rounded(broken, 5),
        waiting=rounded(average(series.waiting), 3),
    )

"""When everything happens for given costs: makespan, bubbles and peak activations of a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from schedules.actions import Action, Schedule, ScheduleError
from schedules.costs import Costs
from schedules.ticks import assign_ticks, fused_backwards, needs
from schedules.validate import live

__all__ = ["Timeline", "simulate"]


@dataclass(frozen=True)
class Timeline:
    """A schedule in time; the unit is that of the costs.

    Attributes:
        start: when each action begins.
        end: when it ends, before its result is sent.
        makespan: when the last rank is done.
        work: per rank, the sum of its actions' times.
        peak_activations: per rank, the most (stage, microbatch) pairs held at once (`schedules.validate.live`).
    """

    start: Mapping[Action, float]
    end: Mapping[Action, float]
    makespan: float
    work: tuple[float, ...]
    peak_activations: tuple[int, ...]

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time that is not work, 0 to 1."""
        return 1 - sum(self.work) / (len(self.work) * self.makespan) if self.makespan else 0.0


def simulate(schedule: Schedule, costs: Costs, timing: Literal["lockstep", "asynchronous"] = "lockstep") -> Timeline:
    """Runs the schedule on paper.

    Args:
        timing: `lockstep` is the compiled program: every tick lasts as long as its slowest rank and one transfer.
            `asynchronous` lets each rank go on as soon as its next action can run; a transfer delays
            what waits for it and nothing else.

    Raises:
        ScheduleError: a deadlock, an unknown timing, or costs that lack a stage.
    """
    if timing not in ("lockstep", "asynchronous"):
        raise ScheduleError(f"timing={timing!r} is unknown; use lockstep or asynchronous")
    ticks = assign_ticks(schedule)
    times = {action: costs.of(action) for action in ticks}
    start = _lockstep(schedule, ticks, times, costs) if timing == "lockstep" else _free(schedule, ticks, times, costs)
    end = {action: begin + times[action] for action, begin in start.items()}
    tail = costs.send if timing == "lockstep" and schedule.ranks > 1 else 0.0
    return Timeline(
        start=start,
        end=end,
        makespan=max(end.values(), default=0.0) + tail,
        work=tuple(sum(times[action] for action in row) for row in schedule.actions),
        peak_activations=live(schedule),
    )


def _lockstep(
    schedule: Schedule, ticks: Mapping[Action, int], times: Mapping[Action, float], costs: Costs
) -> dict[Action, float]:
    send = costs.send if schedule.ranks > 1 else 0.0
    length = [0.0] * (1 + max(ticks.values(), default=-1))
    for action, tick in ticks.items():
        length[tick] = max(length[tick], times[action])
    begins = [0.0]
    for time in length:
        begins.append(begins[-1] + time + send)
    return {action: begins[tick] for action, tick in ticks.items()}


def _free(
    schedule: Schedule, ticks: Mapping[Action, int], times: Mapping[Action, float], costs: Costs
) -> dict[Action, float]:
    fused = fused_backwards(schedule)
    owner = schedule.placement
    idle_from = [0.0] * schedule.ranks
    start: dict[Action, float] = {}
    for action in sorted(ticks, key=ticks.__getitem__):  # an order in which needs come first
        rank = owner[action.stage]
        arrivals = (
            start[need] + times[need] + (0.0 if owner[need.stage] == rank else costs.send)
            for need in needs(action, schedule, fused)
        )
        start[action] = max(idle_from[rank], *arrivals, 0.0)
        idle_from[rank] = start[action] + times[action]
    return start

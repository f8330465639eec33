"""When everything happens for given costs: makespan, bubbles and what a rank holds at most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from schedules.actions import Action, Kind, Schedule, ScheduleError
from schedules.costs import Costs, Link
from schedules.ticks import assign_ticks
from schedules.validate import live

__all__ = ["Timeline", "Timing", "simulate"]

Timing = Literal["lockstep", "asynchronous"]


@dataclass(frozen=True)
class Timeline:
    """A schedule in time; the unit is that of the costs.

    What a rank holds is counted in microbatches' activations of 1/P of the model, so that families with different
    numbers of stages compare: a (stage, microbatch) pair counts P/S if a microbatch goes through S stages on P ranks.

    Attributes:
        start: when each action begins.
        end: when it ends, before its result is sent.
        arrival: when its result is on the rank that needs it, for the actions whose result goes to another rank.
        makespan: when the last rank is done.
        work: per rank, the sum of its actions' times.
        peak_activations: per rank, the most that is held at once, from F to the end of the backward (W or B);
            `schedules.validate.live` counts the pairs.
        peak_weight_stash: per rank, the most that is between I and W at once.
    """

    start: Mapping[Action, float]
    end: Mapping[Action, float]
    arrival: Mapping[Action, float]
    makespan: float
    work: tuple[float, ...]
    peak_activations: tuple[float, ...]
    peak_weight_stash: tuple[float, ...]

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time that is not work, 0 to 1."""
        return 1 - sum(self.work) / (len(self.work) * self.makespan) if self.makespan else 0.0


def simulate(schedule: Schedule, costs: Costs, timing: Timing = "lockstep") -> Timeline:
    """Runs the schedule on paper.

    Args:
        schedule: validated (`schedules.validate.validate`).
        timing: `lockstep` is the compiled program: every tick lasts as long as its slowest rank and the slowest
            link between successive stages, which all wait for in every tick.
            `asynchronous` lets each rank go on as soon as its next action can run. A result leaves when its action
            has ended and the link is free, and delays what waits for it and nothing else.

    Raises:
        ScheduleError: a deadlock, an unknown timing, or costs of other stages or ranks.
    """
    if timing not in ("lockstep", "asynchronous"):
        raise ScheduleError(f"timing={timing!r} is unknown; use lockstep or asynchronous")
    costs.check(schedule.depth, schedule.ranks)
    times = _times(schedule, costs)
    start, arrival, makespan = (_lockstep if timing == "lockstep" else _free)(schedule, times, costs)
    pair = schedule.ranks / schedule.depth
    actions = list(schedule)
    return Timeline(
        start=start,
        end={action: start[action] + times[action.stage, action.kind] for action in actions},
        arrival=arrival,
        makespan=makespan,
        work=tuple(sum(times[action.stage, action.kind] for action in row) for row in schedule.actions),
        peak_activations=tuple(count * pair for count in live(schedule)),
        peak_weight_stash=tuple(count * pair for count in _stash(schedule)),
    )


def _stash(schedule: Schedule) -> list[int]:
    """Per rank, the peak number of (stage, microbatch) pairs between I and W."""
    peaks = []
    for row in schedule.actions:
        held = peak = 0
        for action in row:
            if action.kind is Kind.I:
                held += 1
                peak = max(peak, held)
            elif action.kind is Kind.W:
                held -= 1
        peaks.append(peak)
    return peaks


_Times = dict[tuple[int, Kind], float]
_Found = tuple[dict[Action, float], dict[Action, float], float]  # start, arrival, makespan


def _times(schedule: Schedule, costs: Costs) -> _Times:
    kinds = {action.kind for action in schedule}
    stages = range(schedule.stages)
    return {(stage, kind): costs.time(kind, stage % schedule.depth) for stage in stages for kind in kinds}


_STEP = {Kind.F: 1, Kind.B: -1, Kind.I: -1}  # a result goes this many stages on; those of W and R stay


def _rank_of(schedule: Schedule, stage: int, from_stage: int) -> int | None:
    """The rank of a stage that is reached by a message from another stage; None if there is no message."""
    if not 0 <= stage < schedule.stages or stage // schedule.depth != from_stage // schedule.depth:
        return None
    rank = schedule.placement[stage]
    return None if rank == schedule.placement[from_stage] else rank


def _lockstep(schedule: Schedule, times: _Times, costs: Costs) -> _Found:
    ticks = assign_ticks(schedule)
    peers = {(stage, kind): _rank_of(schedule, stage + _STEP.get(kind, 0), stage) for stage, kind in times}
    links = {(schedule.placement[stage], peer) for (stage, _), peer in peers.items() if peer is not None}
    send = max((costs.link(*pair).delay for pair in links), default=0.0)
    length = [0.0] * (1 + max(ticks.values(), default=-1))
    for action, tick in ticks.items():
        length[tick] = max(length[tick], times[action.stage, action.kind])
    begins = [0.0]
    for time in length:
        begins.append(begins[-1] + time + send)
    start = {action: begins[tick] for action, tick in ticks.items()}
    sent = (action for action in ticks if peers[action.stage, action.kind] is not None)
    return start, {action: begins[ticks[action] + 1] for action in sent}, begins[-1]


def _free(schedule: Schedule, times: _Times, costs: Costs) -> _Found:
    """Runs each rank as far as it gets; a rank that waits goes on when what it waits for has been sent.

    A link has one sender, whose actions end in the order of its list, so messages queue in the order of this loop.
    What a rank needs of itself is earlier in its list: only messages are waited for.
    """
    routes = {}
    for stage, kind in times:
        step = _STEP.get(kind, 0)
        reads = _rank_of(schedule, stage - step, stage) is not None
        peer = _rank_of(schedule, stage + step, stage)
        link = None if peer is None else costs.link(schedule.placement[stage], peer)
        routes[stage, kind] = times[stage, kind], step, reads, link
    start: dict[Action, float] = {}
    arrival: dict[Action, float] = {}
    inbox: dict[tuple[int, int, int], float] = {}  # (stage, step, microbatch) of a message -> its arrival
    waiting: dict[tuple[int, int, int], int] = {}
    link_free: defaultdict[Link, float] = defaultdict(float)
    clock = [0.0] * schedule.ranks
    left = [iter(row) for row in schedule.actions]
    head = [next(row, None) for row in left]
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        now = clock[rank]
        while (action := head[rank]) is not None:
            time, step, reads, link = routes[action.stage, action.kind]
            if reads:
                message = action.stage, step, action.microbatch
                if message not in inbox:
                    waiting[message] = rank
                    break
                now = max(now, inbox[message])
            start[action] = now
            now += time
            if link is not None:
                message = action.stage + step, step, action.microbatch
                link_free[link] = max(now, link_free[link]) + link.transfer
                inbox[message] = arrival[action] = link_free[link] + link.latency
                if message in waiting:
                    ready.append(waiting.pop(message))
            head[rank] = next(left[rank], None)
        clock[rank] = now
    if any(head):
        assign_ticks(schedule)  # says who waits for whom
    return start, arrival, max(clock)

"""When each action runs in the lock-step program.

One tick is one iteration of the compiled scan: every rank runs at most one action, and what it
produced is on its neighbours at the end of the tick. So an action may run in the tick after the last
of the actions that it needs, and a rank's actions run in the order of its list. They run as early as that allows, but
for those that the schedule holds back.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

from schedules.actions import Action, Kind, Schedule, ScheduleError

__all__ = ["assign_ticks", "fused_backwards", "needs", "timeline"]


def needs(action: Action, schedule: Schedule, fused: frozenset[tuple[int, int]] | None = None) -> tuple[Action, ...]:
    """The actions that must have run before this one, in any schedule; without a flush, those of the same step.

    Args:
        fused: the (stage, microbatch) pairs whose backward is one `B`; read off the schedule if None.
    """
    if fused is None:
        fused = fused_backwards(schedule)
    stage, m = action.stage, action.microbatch
    if action.kind is Kind.F:
        before = [Action(stage - 1, Kind.F, m)] if stage % schedule.depth else []
    elif action.kind is Kind.W:
        before = [Action(stage, Kind.I, m)]
    else:
        before = [Action(stage, Kind.F, m)]
        if action.kind is not Kind.R and (stage + 1) % schedule.depth:
            later = Kind.B if (stage + 1, m) in fused else Kind.I
            before.append(Action(stage + 1, later, m))
    return tuple(need for need in before if need in schedule.members) if schedule.period else tuple(before)


def fused_backwards(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """The (stage, microbatch) pairs whose backward is one `B`."""
    return frozenset((action.stage, action.microbatch) for action in schedule if action.kind is Kind.B)


def assign_ticks(schedule: Schedule) -> dict[Action, int]:
    """The earliest tick of every action, given each rank's order and what is held back.

    Raises:
        ScheduleError: no rank can go on (deadlock); names a rank, its action and what that waits for.
    """
    return dict(_assigned(schedule))


@lru_cache(maxsize=1)  # a schedule is checked, simulated and laid out, one after the other
def _assigned(schedule: Schedule) -> dict[Action, int]:
    fused = fused_backwards(schedule)
    holds = dict(schedule.holds)
    ticks: dict[Action, int] = {}
    position = [0] * schedule.ranks
    clock = [0] * schedule.ranks
    waiting: defaultdict[Action, list[int]] = defaultdict(list)
    # Each rank runs as far as it gets; one that waits goes on when what it waits for has run.
    able = list(range(schedule.ranks))
    while able:
        rank = able.pop()
        row = schedule.actions[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            before = needs(action, schedule, fused)
            missing = [need for need in before if need not in ticks]
            if missing:
                waiting[missing[0]].append(rank)
                break
            ticks[action] = max([clock[rank], holds.get(action, 0), *[ticks[need] + 1 for need in before]])
            clock[rank] = ticks[action] + 1
            position[rank] += 1
            able += waiting.pop(action, ())
    if waiting:
        raise ScheduleError(_deadlock(schedule, position, ticks, fused))
    return ticks


def _deadlock(schedule: Schedule, position: list[int], ticks: dict, fused: frozenset[tuple[int, int]]) -> str:
    everywhere = set(schedule)
    stuck = [(rank, row[position[rank]]) for rank, row in enumerate(schedule.actions) if position[rank] < len(row)]
    # A wait for something that no rank ever runs is the root; a cycle has none, so any member serves.
    for rank, action in stuck:
        for need in needs(action, schedule, fused):
            if need not in everywhere:
                return f"rank {rank}, action {action} waits for {need}, which no rank runs; add it"
    rank, action = stuck[0]
    need = next(need for need in needs(action, schedule, fused) if need not in ticks)
    owner = schedule.placement[need.stage]
    return (
        f"deadlock: rank {rank}, action {action} waits for {need}, "
        f"which rank {owner} has after {schedule.actions[owner][position[owner]]}; change the order of one of them"
    )


def timeline(schedule: Schedule) -> tuple[tuple[Action | None, ...], ...]:
    """`timeline[rank][tick]`: the action or None for a bubble; all rows are of equal length."""
    ticks = assign_ticks(schedule)
    rows: list[list[Action | None]] = [[None] * (1 + max(ticks.values(), default=-1)) for _ in schedule.actions]
    for rank, row in enumerate(schedule.actions):
        for action in row:
            rows[rank][ticks[action]] = action
    return tuple(tuple(row) for row in rows)

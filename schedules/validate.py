"""Whether a schedule can run, and what it holds while it does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from schedules.actions import Action, Kind, Schedule, ScheduleError
from schedules.ticks import assign_ticks, fused_backwards, needs

__all__ = ["live", "recomputing_stages", "validate"]


def validate(schedule: Schedule, *, microbatches: int | None = None) -> None:
    """Checks that every stage runs every microbatch of its pipeline once, in an order that can be executed.

    Args:
        microbatches: the number that the schedule must have; by default its own.

    Raises:
        ScheduleError: names the rank, the action, the reason and the way out.
    """
    _check_placement(schedule)
    where = _check_duplicates(schedule)
    (_check_stream if schedule.period else _check_complete)(schedule, microbatches)
    _check_holds(schedule, where)
    try:
        assign_ticks(schedule)
    except ScheduleError:
        _check_order(schedule, where)  # has the better words for a rank whose own order is wrong
        raise
    _check_recomputes(schedule, where)
    recomputing_stages(schedule)


def live(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the peak number of (stage, microbatch) pairs between F and the end of their backward (W or B)."""
    return tuple(_peak(row) for row in schedule.actions)


def recomputing_stages(schedule: Schedule) -> frozenset[int]:
    """The stages that have R.

    Raises:
        ScheduleError: a stage has R for some of its microbatches only.
    """
    having: dict[Kind, dict[int, set[int]]] = {Kind.F: {}, Kind.R: {}}
    for action in schedule:
        if action.kind in having:
            having[action.kind].setdefault(action.stage, set()).add(action.microbatch)
    for stage, again in having[Kind.R].items():
        missing = having[Kind.F].get(stage, set()) - again
        if missing:
            raise ScheduleError(
                f"stage {stage} has {stage}R{min(again)} but no {stage}R{min(missing)}; "
                "write R for all microbatches of a stage or for none"
            )
    return frozenset(having[Kind.R])


def _peak(row: Sequence[Action]) -> int:
    begun = {(action.stage, action.microbatch) for action in row if action.kind is Kind.F}
    ended = {(action.stage, action.microbatch) for action in row if action.kind in (Kind.B, Kind.W)}
    held = peak = len(ended - begun)  # without a flush, what the step before has left
    for action in row:
        if action.kind is Kind.F:
            held += 1
            peak = max(peak, held)
        elif action.kind in (Kind.B, Kind.W):
            held -= 1
    return peak


def _check_placement(schedule: Schedule) -> None:
    if schedule.pipelines < 1 or schedule.stages % schedule.pipelines:
        raise ScheduleError(
            f"pipelines={schedule.pipelines} does not divide the {schedule.stages} stages; give each pipeline as many"
        )
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < schedule.ranks:
            raise ScheduleError(f"stage {stage} is placed on rank {rank}; the ranks are 0 to {schedule.ranks - 1}")
    owners = set(schedule.placement)
    for rank, row in enumerate(schedule.actions):
        if rank not in owners:
            raise ScheduleError(f"rank {rank} runs no stage; give it one or remove the rank")
        for action in row:
            if not 0 <= action.stage < schedule.stages:
                raise ScheduleError(
                    f"rank {rank}, action {action}: the stages are 0 to {schedule.stages - 1}; "
                    "give the stage a rank in the placement"
                )
            if action.microbatch < 0:
                raise ScheduleError(f"rank {rank}, action {action}: microbatches count from 0; renumber them")
            owner = schedule.placement[action.stage]
            if owner != rank:
                raise ScheduleError(
                    f"rank {rank}, action {action}: stage {action.stage} is on rank {owner}; move it there"
                )


def _check_duplicates(schedule: Schedule) -> dict[Action, int]:
    """The position of each action in its rank's list."""
    where: dict[Action, int] = {}
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            if action in where:
                raise ScheduleError(
                    f"rank {rank}, action {action} is there twice, as the rank's actions {where[action] + 1} "
                    f"and {position + 1}; remove one"
                )
            where[action] = position
    return where


def _check_complete(schedule: Schedule, microbatches: int | None) -> None:
    wanted = schedule.microbatches
    if not wanted:
        raise ScheduleError(f"{schedule.name}: no rank runs an action; write 0F0, 0I0, 0W0, ...")
    if microbatches not in (None, wanted):
        raise ScheduleError(
            f"microbatches={microbatches}: the schedule {schedule.name} has {wanted}; "
            f"use microbatches={wanted} or a schedule for {microbatches}"
        )
    kinds: defaultdict[tuple[int, int], set[Kind]] = defaultdict(set)
    for action in schedule:
        kinds[action.stage, action.microbatch].add(action.kind)
    for m in range(wanted):
        pipelines = {stage // schedule.depth for stage in range(schedule.stages) if kinds[stage, m]}
        if len(pipelines) > 1:
            raise ScheduleError(f"microbatch {m} runs in pipelines {sorted(pipelines)}; keep it in one")
        for stage in range(schedule.depth):
            stage += schedule.depth * min(pipelines, default=0)
            _check_pair(schedule.placement[stage], stage, m, kinds[stage, m], wanted)


def _check_stream(schedule: Schedule, microbatches: int | None) -> None:
    """Without a flush every stage has a step's worth of each kind, and nothing needs what comes a step later."""
    if microbatches not in (None, schedule.period):
        raise ScheduleError(f"microbatches={microbatches}: {schedule.name} has {schedule.period}; use as many")
    first: dict[tuple[int, Kind], int] = {}
    for stage in range(schedule.stages):
        kinds = {action.kind for action in schedule if action.stage == stage}
        if kinds not in ({Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}):
            raise ScheduleError(f"stage {stage} has {sorted(kinds)}; without a flush it has F and B, or F, I and W")
        for kind in sorted(kinds):
            has = sorted(action.microbatch for action in schedule if action.stage == stage and action.kind is kind)
            first[stage, kind] = has[0]
            if has != list(range(has[0], has[0] + schedule.period)) or has[-1] >= 2 * schedule.period:
                raise ScheduleError(
                    f"stage {stage} has {kind} of microbatches {has}; without a flush it has {schedule.period} in a row"
                )
    everywhere = replace(schedule, period=0)
    fused = fused_backwards(schedule)
    for action in schedule:
        for need in needs(action, everywhere, fused):
            later = next(kind for kind in (need.kind, Kind.I, Kind.B) if (need.stage, kind) in first)
            if need.microbatch >= first[need.stage, later] + schedule.period:
                missing = Action(need.stage, later, need.microbatch)
                raise ScheduleError(f"action {action} needs {missing}, which runs a step later; run it later too")


def _check_pair(rank: int, stage: int, m: int, has: set[Kind], wanted: int) -> None:
    def refuse(kind: Kind, reason: str) -> None:
        raise ScheduleError(f"rank {rank}, action {Action(stage, kind, m)} {reason}")

    if Kind.F not in has:
        refuse(Kind.F, f"is missing; every stage runs microbatches 0 to {wanted - 1}: add it")
    if Kind.B in has:
        for other in (Kind.I, Kind.W):
            if other in has:
                refuse(
                    other,
                    f"repeats a part of {Action(stage, Kind.B, m)}, the full backward; "
                    "write I and W (older PyTorch wrote B for I), or B alone",
                )
    elif not has & {Kind.I, Kind.W}:
        refuse(Kind.I, f"is missing; after {Action(stage, Kind.F, m)} add I and W, or B for both")
    else:
        for part, other in ((Kind.I, Kind.W), (Kind.W, Kind.I)):
            if part not in has:
                refuse(part, f"is missing; {Action(stage, other, m)} is half a backward: add it, or write B for both")


def _check_order(schedule: Schedule, where: dict[Action, int]) -> None:
    """No action comes before one of the same rank that it needs."""
    fused = fused_backwards(schedule)
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            for need in needs(action, schedule, fused):
                if schedule.placement[need.stage] == rank and where[need] > position:
                    raise ScheduleError(
                        f"rank {rank}, action {action} comes before {need}, whose result it needs; move it after {need}"
                    )


def _check_recomputes(schedule: Schedule, where: dict[Action, int]) -> None:
    fused = fused_backwards(schedule)
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            if action.kind is Kind.R:
                backward = Kind.B if (action.stage, action.microbatch) in fused else Kind.I
                later = Action(action.stage, backward, action.microbatch)
                if where[later] < position:
                    raise ScheduleError(
                        f"rank {rank}, action {action} recomputes what {later} has used already; "
                        f"move it before {later} or remove it"
                    )


def _check_holds(schedule: Schedule, where: dict[Action, int]) -> None:
    for action, tick in schedule.holds:
        if action not in where:
            raise ScheduleError(f"action {action} is held back until tick {tick}, and no rank runs it; add it")
        if not 0 <= tick < len(where):
            raise ScheduleError(
                f"action {action} is held back until tick {tick}; {len(where)} actions take ticks 0 to {len(where) - 1}"
            )

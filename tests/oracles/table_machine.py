"""A machine of labels that executes a tick table: it computes nothing, and checks what every read finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from schedules.actions import Action, Kind, Schedule
from schedules.slots import Lifetime, TickTable
from schedules.ticks import assign_ticks


class WrongValue(Exception):
    """An action read a slot that did not hold what it needs."""


def execute(table: TickTable, stages: int, ranks: int) -> set[tuple[int, Kind, int]]:
    """Runs all ticks; returns the actions that ran as (stage, kind, microbatch).

    Raises:
        WrongValue: a read found another value, or nothing; names tick, rank and what was there.
    """
    inbox = [[None] * (table.inbox_slots + 1) for _ in range(ranks)]
    held: Mapping[Lifetime, list] = {life: [[None] * n for _ in range(ranks)] for life, n in table.counts.items()}
    done = set()
    for tick in range(table.ticks):
        outputs = [None] * ranks
        for rank in range(ranks):
            kind = TickTable.KINDS[table.kind[tick, rank]]
            if kind is None:
                continue
            stage, m = int(table.stage[tick, rank]), int(table.microbatch[tick, rank])
            done.add((stage, kind, m))

            def expect(found, wanted, where=f"tick {tick}, rank {rank}, {stage}{kind}{m}"):
                if found != wanted:
                    raise WrongValue(f"{where}: found {found}, wanted {wanted}")

            if kind is Kind.F:
                if stage > 0:
                    expect(inbox[rank][table.read[tick, rank]], ("activation", stage, m))
                if stage + 1 < stages:
                    outputs[rank] = ("activation", stage + 1, m)
            if kind in (Kind.I, Kind.B):
                if stage + 1 < stages:
                    expect(inbox[rank][table.read[tick, rank]], ("gradient", stage, m))
                if stage > 0:
                    outputs[rank] = ("gradient", stage - 1, m)
            for life, slots in table.slots.items():
                if stage not in life.stages:
                    continue
                place = held[life][rank]
                value, slot = (life.start, life.end, stage, m), slots[tick, rank]
                if kind is life.start:
                    place[slot] = value
                # I may read what W ends; B reads what F left, and hands W its own stash without a slot.
                elif (life.start is Kind.F and kind in (Kind.I, Kind.B)) or kind is life.end:
                    expect(place[slot], value)
        for offset, receive in zip(table.offsets, table.receive, strict=True):
            for rank in range(ranks):
                inbox[rank][receive[tick, rank]] = outputs[(rank - offset) % ranks]
    return done


def most_at_once(schedule: Schedule, life: Lifetime) -> int:
    """The most values of a lifetime that any rank holds in any tick."""
    ticks = assign_ticks(schedule)
    spans = []
    for action, start in ticks.items():
        if action.kind is life.start and action.stage in life.stages:
            ends = [ticks.get(Action(action.stage, kind, action.microbatch)) for kind in (life.end, Kind.B)]
            spans.append((schedule.placement[action.stage], start, min(end for end in ends if end is not None)))
    return _busiest(spans)


def most_in_inbox(schedule: Schedule) -> int:
    """The most activations and gradients that wait on any rank in any tick."""
    ticks = assign_ticks(schedule)
    spans = []
    for action, tick in ticks.items():
        for stage, kinds in ((action.stage - 1, (Kind.F,)), (action.stage + 1, (Kind.I, Kind.B))):
            for kind in kinds:
                sent = ticks.get(Action(stage, kind, action.microbatch))
                if sent is not None and action.kind in kinds:
                    spans.append((schedule.placement[action.stage], sent + 1, tick))
    return _busiest(spans)


def _busiest(spans: Iterable[tuple[int, int, int]]) -> int:
    """Counts the spans (rank, first tick, last tick), tick by tick."""
    count = Counter((rank, tick) for rank, first, last in spans for tick in range(first, last + 1))
    return max(count.values(), default=0)

"""Buffer slots by liveness, and the tick table that the compiled program reads.

Every tensor that waits between two actions of a rank has an interval of ticks; intervals that do not overlap
share a slot. A buffer has as many slots as its busiest rank needs, on every rank, since all ranks run one program.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from schedules.actions import Action, Kind, Schedule, ScheduleError
from schedules.ticks import assign_ticks

__all__ = ["Ends", "Lifetime", "TickTable", "build_table", "waits"]


@dataclass(frozen=True)
class Lifetime:
    """From which action to which a value waits, and on which stages there is such a value.

    A stage's full backward `B` ends a lifetime that I or W would end; it starts none, since what I leaves for W
    stays inside it.
    """

    stages: frozenset[int]
    start: Kind
    end: Kind


@dataclass(frozen=True)
class Ends:
    """Embedding and head where every rank runs its part of them in the same tick; columns [T, P], one a pipeline.

    Attributes:
        embed, head: the microbatch whose embedding or head the tick runs, the same on all ranks; -1 for none. The
            embedding runs before the tick's actions and the head after them.
        embed_to, head_to: the inbox slot for the embedded tokens and for the gradient that the head gives, on the
            rank that has the first stage or the last; one past the last slot elsewhere.
        embed_gradient: the microbatch whose first stage's gradient arrives; -1 for none.
    """

    embed: tuple[np.ndarray, ...]
    embed_to: tuple[np.ndarray, ...]
    embed_gradient: tuple[np.ndarray, ...]
    head: tuple[np.ndarray, ...]
    head_to: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class TickTable:
    """A schedule as integer arrays [T, P] (ticks, ranks), the compiled program's input.

    Attributes:
        kind: index into `KINDS`, 0 where the rank idles.
        stage, microbatch: of the action; 0 where the rank idles.
        read: the inbox slot that the action takes its input from.
        offsets: by how many ranks outputs travel; 0 is a stage's successor on the same rank.
        receive: `receive[c]`: the inbox slot for what arrives through `offsets[c]` at the end of the tick;
            `inbox_slots` (one past the last) where nothing that is needed arrives.
        inbox_slots: number of slots for received activations and gradients.
        slots: `slots[lifetime]`: the slot of the action's (stage, microbatch), 0 where it has none.
        counts: `counts[lifetime]`: number of slots.
        ends: where embedding and head run on every rank.
    """

    kind: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    read: np.ndarray
    offsets: tuple[int, ...]
    receive: tuple[np.ndarray, ...]
    inbox_slots: int
    slots: dict[Lifetime, np.ndarray]
    counts: dict[Lifetime, int]
    ends: Ends | None = None

    KINDS = (None, Kind.F, Kind.I, Kind.W, Kind.B, Kind.R)

    @property
    def ticks(self) -> int:
        return self.kind.shape[0]


def build_table(schedule: Schedule, lifetimes: Iterable[Lifetime] = (), *, ends: bool = False) -> TickTable:
    """Lays a validated schedule out in ticks and slots; with `ends` every rank runs embedding and head.

    Raises:
        ScheduleError: the schedule deadlocks, or has no flush and `ends`.
    """
    ticks = assign_ticks(schedule)
    shape = (1 + max(ticks.values()), schedule.ranks)
    if ends and schedule.period:
        raise ScheduleError(f"{schedule.name} has no flush: embedding and head run on its first and last stage alone")
    kind, stage, microbatch, read = (np.zeros(shape, np.int32) for _ in range(4))
    for action, tick in ticks.items():
        where = tick, schedule.placement[action.stage]
        kind[where] = TickTable.KINDS.index(action.kind)
        stage[where], microbatch[where] = action.stage, action.microbatch

    inbox = _Intervals(schedule.ranks, shape[0])
    travels = []
    for action, tick in ticks.items():
        source = _sender(action, schedule, ticks)
        if source is not None:
            rank, sender = schedule.placement[action.stage], schedule.placement[source.stage]
            offset = (rank - sender) % schedule.ranks
            sent, later = _when(source, schedule, ticks)  # type: ignore[misc]
            travels.append((offset, sent, rank, tick))
            inbox.add(rank, sent + 1, tick + 1 + later * shape[0], (offset, sent, rank, tick))
    if ends:
        for action, tick in ticks.items():
            rank = schedule.placement[action.stage]
            if action.kind is Kind.F and action.stage % schedule.depth == 0:
                inbox.add(rank, tick, tick + 1, (action,))
            if action.kind is Kind.F and (action.stage + 1) % schedule.depth == 0:
                inbox.add(rank, tick + 1, ticks[_backward(action, ticks)] + 1, (_backward(action, ticks),))
    offsets = tuple(sorted({offset for offset, *_ in travels}))
    slot_of, inbox_slots = inbox.allocate()
    receive = {offset: np.full(shape, inbox_slots, np.int32) for offset in offsets}
    for travel in travels:
        offset, sent, rank, tick = travel
        receive[offset][sent, rank] = read[tick, rank] = slot_of[travel]

    slots, counts = {}, {}
    for lifetime in lifetimes:
        slots[lifetime], counts[lifetime] = _allocate(lifetime, schedule, ticks, shape)
    arrivals = tuple(receive[offset] for offset in offsets)
    at_ends = _ends(schedule, ticks, slot_of, inbox_slots, read) if ends else None
    return TickTable(kind, stage, microbatch, read, offsets, arrivals, inbox_slots, slots, counts, at_ends)


def waits(schedule: Schedule, start: Kind, end: Kind) -> Iterator[tuple[int, int, int]]:
    """(stage, first tick, last tick) of what waits from `start` to `end`; a full backward ends what it would start.

    Without a flush a wait may end in the next step; it is then two, from the beginning and until the end of the table.
    """
    ticks = assign_ticks(schedule)
    for action, begins in ticks.items():
        if action.kind is start:
            # Without R, say, nothing ends it.
            for before in (0, schedule.period):
                m = action.microbatch - before
                ends = [ticks[one] for kind in (end, Kind.B) if (one := Action(action.stage, kind, m)) in ticks]
                if ends:
                    spans = ((0, ends[0]), (begins, max(ticks.values()))) if before else ((begins, ends[0]),)
                    yield from ((action.stage, *span) for span in spans)
                    break


def _when(action: Action, schedule: Schedule, ticks: dict[Action, int]) -> tuple[int, int] | None:
    """The tick of an action that another one needs, and how many steps before (0 or 1); None if no rank runs it."""
    if action in ticks:
        return ticks[action], 0
    earlier = Action(action.stage, action.kind, action.microbatch + schedule.period)
    return (ticks[earlier], 1) if earlier in ticks else None


def _backward(forward: Action, ticks: dict[Action, int]) -> Action:
    stage, m = forward.stage, forward.microbatch
    return next(action for kind in (Kind.I, Kind.B) if (action := Action(stage, kind, m)) in ticks)


def _ends(
    schedule: Schedule, ticks: dict[Action, int], slot_of: dict[tuple, int], inbox_slots: int, read: np.ndarray
) -> Ends:
    """Also sets where the first stages' forwards and the last stages' backwards read."""

    def columns(fill: int) -> tuple[np.ndarray, ...]:
        return tuple(np.full(read.shape, fill, np.int32) for _ in range(schedule.pipelines))

    found = Ends(columns(-1), columns(inbox_slots), columns(-1), columns(-1), columns(inbox_slots))
    for action, tick in ticks.items():
        pipeline, place = divmod(action.stage, schedule.depth)
        rank, m = schedule.placement[action.stage], action.microbatch
        if action.kind is Kind.F and place == 0:
            found.embed[pipeline][tick] = m
            found.embed_to[pipeline][tick, rank] = read[tick, rank] = slot_of[action,]
        if action.kind is Kind.F and place == schedule.depth - 1:
            later = _backward(action, ticks)
            found.head[pipeline][tick] = m
            found.head_to[pipeline][tick, rank] = read[ticks[later], rank] = slot_of[later,]
        if action.kind in (Kind.I, Kind.B) and place == 0:
            found.embed_gradient[pipeline][tick] = m
    return found


def _sender(action: Action, schedule: Schedule, ticks: dict[Action, int]) -> Action | None:
    """The action whose output this one takes from its inbox."""
    stage, m = action.stage, action.microbatch
    if action.kind is Kind.F:
        return Action(stage - 1, Kind.F, m) if stage % schedule.depth else None
    if action.kind in (Kind.W, Kind.R) or not (stage + 1) % schedule.depth:
        return None
    fused = Action(stage + 1, Kind.B, m)
    return fused if _when(fused, schedule, ticks) else Action(stage + 1, Kind.I, m)


def _allocate(
    lifetime: Lifetime, schedule: Schedule, ticks: dict[Action, int], shape: tuple[int, int]
) -> tuple[np.ndarray, int]:
    intervals = _Intervals(schedule.ranks, shape[0])
    for action, tick in ticks.items():
        stage, kind, m = action.stage, action.kind, action.microbatch
        ends = kind is lifetime.end or (kind is Kind.B and Action(stage, lifetime.end, m) not in ticks)
        begins = _when(Action(stage, lifetime.start, m), schedule, ticks)
        if ends and begins and stage in lifetime.stages:
            intervals.add(schedule.placement[stage], begins[0], tick + 1 + begins[1] * shape[0], (stage, m))
    slot_of, count = intervals.allocate()
    slots = np.zeros(shape, np.int32)
    for action, tick in ticks.items():
        # A microbatch that is in flight between two steps is another one by number in the first of them.
        labels = ((action.stage, action.microbatch - before) for before in (0, schedule.period))
        slots[tick, schedule.placement[action.stage]] = next((slot_of[one] for one in labels if one in slot_of), 0)
    return slots, count


class _Intervals:
    """Half-open intervals of ticks on each rank; `allocate` colours them with the fewest slots.

    An interval that ends after `ticks` goes on at the beginning, as the next step does; each such has a slot of its
    own, which others may use in between.
    """

    def __init__(self, ranks: int, ticks: int):
        self._of_rank: list[list[tuple[int, int, tuple]]] = [[] for _ in range(ranks)]
        self._ticks = ticks

    def add(self, rank: int, start: int, end: int, label: tuple) -> None:
        self._of_rank[rank].append((start, end, label))

    def allocate(self) -> tuple[dict[tuple, int], int]:
        """The slot of each label, and how many slots the busiest rank needs."""
        slot_of: dict[tuple, int] = {}
        most = 0
        for intervals in self._of_rank:
            busy: list[tuple[int, int]] = []
            free: list[int] = []
            around = sorted(one for one in intervals if one[1] > self._ticks)
            used = len(around)
            open_until = [start for start, *_ in around]
            for slot, (_, end, label) in enumerate(around):
                slot_of[label] = slot
                heapq.heappush(busy, (end - self._ticks, slot))
            for start, end, label in sorted(one for one in intervals if one[1] <= self._ticks):
                while busy and busy[0][0] <= start:
                    free.append(heapq.heappop(busy)[1])
                slot = min((one for one in free if one >= len(around) or end <= open_until[one]), default=used)
                if slot < used:
                    free.remove(slot)
                else:
                    used += 1
                slot_of[label] = slot
                heapq.heappush(busy, (end, slot))
            most = max(most, used)
        return slot_of, most

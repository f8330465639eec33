"""The tick table executed by a machine of labels; slot counts against counting tick by tick."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from schedules.actions import Kind, from_csv, split_backward
from schedules.families import make
from schedules.slots import Lifetime, TickTable, build_table
from tests.oracles import other_software
from tests.oracles.table_machine import WrongValue, execute, most_at_once, most_in_inbox

SIZES = [(1, 1), (1, 5), (2, 1), (2, 3), (2, 5), (3, 2), (4, 1), (4, 3), (4, 9), (8, 4), (8, 17)]
BY_HAND = {
    # Rank 0 has the first and the last stage, rank 1 the two between; one backward is whole, the others are cut.
    "csv:v_by_hand": "0F0,0F1,,3F0,(0F2;3B0)OVERLAP_F_B,3F1,3I1,0I0,3F2,3W1,3I2,0W0,0I1,0W1,3W2,0B2\n"
    ",1F0,2F0,1F1,2F1,,1F2,2I0,(2F2;1I0)OVERLAP_F_B,2W0,2B1,1W0,1B1,2I2,1I2,2W2,1W2\n",
    # Three ranks in an order in which no two messages travel equally far.
    "csv:scattered": "0F0,0F1,3F0,3F1,3I0,3I1,0I0,0I1,3W0,3W1,0W1,0W0\n2F0,2F1,2B0,2I1,2W1\n1F0,1F1,1I0,1I1,1W1,1W0\n",
    # Bubbles on purpose: what is held back waits in the inbox or in its buffers.
    "csv:held": "0F0,0F1,-,-,-,0I0,0I1,0W0,0W1\n,-,-,1F0,1I0,-,-,1F1,1I1,1W0,1W1\n",
}


def schedules():
    for ranks, microbatches in SIZES:
        for name in ("gpipe", "1f1b", "zb_h1"):
            yield make(name, ranks=ranks, microbatches=microbatches)
        for chunks in (2, 3):
            yield make("interleaved_1f1b", ranks=ranks, microbatches=microbatches, chunks=chunks)
        for write in (other_software.zbv, other_software.dualpipev):
            yield from_csv(write(ranks, microbatches), f"csv:{write.__name__}")
    for name, text in BY_HAND.items():
        yield from_csv(text, name)


def lifetimes(stages):
    """On the first stage, the last, all, every other one, and none."""
    everywhere = range(stages)
    return [
        Lifetime(frozenset(some), start, end)
        for some in ({0}, {stages - 1}, everywhere, everywhere[::2], ())
        for start, end in ((Kind.F, Kind.I), (Kind.F, Kind.W), (Kind.I, Kind.W))
    ]


def label(schedule):
    return f"{schedule.name}-{schedule.ranks}x{schedule.microbatches}-{schedule.chunks}"


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("schedule", list(schedules()), ids=label)
def test_every_read_finds_its_value(schedule, split):
    schedule = split_backward(schedule) if split else schedule
    table = build_table(schedule, lifetimes(schedule.stages))
    done = execute(table, schedule.stages, schedule.ranks)
    assert done == {(action.stage, action.kind, action.microbatch) for action in schedule}


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("schedule", list(schedules()), ids=label)
def test_no_slot_too_many(schedule, split):
    schedule = split_backward(schedule) if split else schedule
    table = build_table(schedule, lifetimes(schedule.stages))
    assert table.inbox_slots == most_in_inbox(schedule)
    for life, count in table.counts.items():
        assert count == most_at_once(schedule, life)
        assert table.slots[life].min() >= 0 and table.slots[life].max() < max(count, 1)


def test_table_by_hand():
    table = build_table(from_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1B0,1F1,1I1,1W1"))
    letters = ".FIWB"
    rows = [
        " ".join(
            f"{stage}{letters[kind]}{m}" if kind else "."
            for kind, stage, m in np.stack([table.kind, table.stage, table.microbatch])[..., rank].T
        )
        for rank in range(2)
    ]
    assert rows == ["0F0 0F1 . 0I0 0W0 0I1 0W1", ". 1F0 1B0 1F1 1I1 1W1 ."]
    assert table.offsets == (1,)
    # Rank 1 takes 1F0 and keeps microbatch 1 until 1F1; rank 0's gradients come two ticks apart.
    assert table.inbox_slots == 1
    assert table.receive[0].tolist() == [[1, 0], [1, 0], [0, 1], [1, 1], [0, 1], [1, 1], [1, 1]]


def test_offsets_of_placements():
    def offsets(schedule):
        return build_table(schedule).offsets

    assert offsets(make("1f1b", ranks=1, microbatches=3)) == ()
    assert offsets(make("1f1b", ranks=4, microbatches=3)) == (1, 3)
    assert offsets(make("interleaved_1f1b", ranks=4, microbatches=3, chunks=2)) == (1, 3)
    # The turn of the V stays on its rank.
    assert offsets(from_csv(other_software.zbv(4, 3))) == (0, 1, 3)


def test_slots_do_not_grow_with_microbatches():
    def counts(microbatches):
        schedule = split_backward(make("1f1b", ranks=4, microbatches=microbatches))
        table = build_table(schedule, lifetimes(4))
        return table.inbox_slots, *table.counts.values()

    assert counts(8) == counts(64)


def test_the_machine_sees_a_wrong_table():
    schedule = make("zb_h1", ranks=3, microbatches=5)
    table = build_table(schedule, lifetimes(3))
    rank = 1
    tick = next(t for t in range(table.ticks) if TickTable.KINDS[table.kind[t, rank]] is Kind.F)

    def elsewhere(column, size):
        column = column.copy()
        column[tick, rank] = (column[tick, rank] + 1) % size
        return column

    life = next(life for life in table.counts if life.stages == {0, 1, 2})
    receive = [column.copy() for column in table.receive]
    receive[0][:, rank] = table.inbox_slots
    for wrong in (
        dataclasses.replace(table, read=elsewhere(table.read, table.inbox_slots + 1)),
        dataclasses.replace(table, slots={**table.slots, life: elsewhere(table.slots[life], table.counts[life])}),
        dataclasses.replace(table, receive=(*receive[:1], *table.receive[1:])),
        dataclasses.replace(table, microbatch=elsewhere(table.microbatch, 5)),
    ):
        with pytest.raises(WrongValue, match="found"):
            execute(wrong, 3, 3)

"""Every family runs for every number of microbatches, in the ticks and with the activations that it promises."""

from __future__ import annotations

import pytest

from schedules.actions import Kind, ScheduleError, split_backward
from schedules.families import describe, make, names
from schedules.ticks import assign_ticks
from schedules.validate import live, validate

SIZES = [(ranks, m) for ranks in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 5, 7, 8, 9, 12, 17)]


def count_ticks(schedule):
    return 1 + max(assign_ticks(split_backward(schedule)).values())


@pytest.mark.parametrize("name", names())
def test_any_number_of_microbatches(name):
    for ranks, microbatches in SIZES:
        schedule = make(name, ranks=ranks, microbatches=microbatches)
        validate(schedule, microbatches=microbatches)
        validate(split_backward(schedule), microbatches=microbatches)
        assert (schedule.ranks, schedule.chunks) == (ranks, describe(name).chunks)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved_with_any_number_of_microbatches(chunks):
    for ranks, microbatches in SIZES:
        schedule = make("interleaved_1f1b", ranks=ranks, microbatches=microbatches, chunks=chunks)
        validate(split_backward(schedule), microbatches=microbatches)
        assert schedule.placement == tuple(stage % ranks for stage in range(ranks * chunks))


def test_gpipe_holds_everything():
    schedule = make("gpipe", ranks=3, microbatches=5)
    assert [str(action) for action in schedule.actions[1]] == [f"1{kind}{m}" for kind in "FB" for m in range(5)]
    assert live(schedule) == (5, 5, 5)


def test_1f1b_holds_fewer_further_down():
    for ranks, microbatches in SIZES:
        schedule = make("1f1b", ranks=ranks, microbatches=microbatches)
        assert live(schedule) == tuple(min(ranks - rank, microbatches) for rank in range(ranks))
        assert count_ticks(schedule) == 3 * microbatches + 2 * ranks - 2


def test_zb_h1_is_as_fast_as_1f1b_activations_allow():
    for ranks, microbatches in SIZES:
        schedule = make("zb_h1", ranks=ranks, microbatches=microbatches)
        assert max(live(schedule)) == max(live(make("1f1b", ranks=ranks, microbatches=microbatches)))
        assert count_ticks(schedule) == max(3 * microbatches + ranks - 1, 2 * microbatches + 2 * ranks - 1)


def test_zb_h1_leaves_few_weight_gradients_pending():
    for ranks, microbatches in SIZES:
        for rank, row in enumerate(make("zb_h1", ranks=ranks, microbatches=microbatches).actions):
            pending = [sum((a.kind is Kind.I) - (a.kind is Kind.W) for a in row[:end]) for end in range(len(row))]
            assert max(pending) <= rank + 1


def test_zb_h1_at_size():
    schedule = make("zb_h1", ranks=32, microbatches=512)
    assert count_ticks(schedule) == 3 * 512 + 31


def megatron(ranks, microbatches, chunks):
    """Megatron-LM's formulas for the k-th forward and backward of a rank; microbatches a multiple of ranks."""
    total = microbatches * chunks
    rows = []
    for rank in range(ranks):

        def word(k, forward, rank=rank):
            group, within = divmod(k, ranks * chunks)
            chunk = within // ranks if forward else chunks - 1 - within // ranks
            return f"{chunk * ranks + rank}{'F' if forward else 'B'}{group * ranks + within % ranks}"

        ahead = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, total)
        row = [word(k, True) for k in range(ahead)]
        for k in range(total - ahead):
            row += [word(k + ahead, True), word(k, False)]
        row += [word(k, False) for k in range(total - ahead, total)]
        rows.append(row)
    return rows


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(2, 2, 2), (4, 8, 2), (4, 4, 3), (3, 9, 4)])
def test_interleaved_is_megatrons(ranks, microbatches, chunks):
    schedule = make("interleaved_1f1b", ranks=ranks, microbatches=microbatches, chunks=chunks)
    assert [[str(action) for action in row] for row in schedule.actions] == megatron(ranks, microbatches, chunks)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "padded"), [(4, 5, 2, 39), (4, 9, 2, 63), (8, 17, 2, 127), (8, 33, 2, 223)]
)
def test_interleaved_spreads_a_small_remainder(ranks, microbatches, chunks, padded):
    # `padded`: the ticks of Megatron's order for the next multiple of ranks, without the microbatches too many.
    schedule = make("interleaved_1f1b", ranks=ranks, microbatches=microbatches, chunks=chunks)
    assert count_ticks(schedule) < padded


def test_interleaved_with_one_chunk_is_1f1b():
    for ranks, microbatches in SIZES:
        sizes = {"ranks": ranks, "microbatches": microbatches}
        assert make("interleaved_1f1b", chunks=1, **sizes) == make("1f1b", **sizes)


@pytest.mark.parametrize(("name", "ticks"), [("gpipe", 110), ("1f1b", 110), ("interleaved_1f1b", 206), ("zb_h1", 103)])
def test_ticks_of_8_ranks_and_32_microbatches(name, ticks):
    assert count_ticks(make(name, ranks=8, microbatches=32)) == ticks


def test_registry():
    assert names() == ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")
    for name in names():
        family = describe(name)
        assert family.name == name
        assert "\n" not in family.summary and family.source
    assert (describe("interleaved_1f1b").chunks, describe("interleaved_1f1b").max_chunks) == (2, None)
    assert (describe("zb_h1").chunks, describe("zb_h1").max_chunks) == (1, 1)


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("zbh1", {}, "schedule 'zbh1' is unknown; did you mean 'zb_h1'"),
        ("1F1B", {}, "use one of gpipe, 1f1b, interleaved_1f1b, zb_h1"),
        ("", {}, "use one of gpipe"),
        ("1f1b", {"chunks": 2}, "chunks=2: 1f1b has one stage a rank; .* with chunks: interleaved_1f1b"),
        ("1f1b", {"chunks": 0}, "chunks=0 is too small for 1f1b; use 1 or more"),
        ("gpipe", {"microbatches": 0}, "microbatches=0"),
        ("gpipe", {"ranks": -1}, "ranks=-1"),
    ],
)
def test_refused(name, sizes, words):
    with pytest.raises(ScheduleError, match=words):
        make(name, **{"ranks": 2, "microbatches": 4} | sizes)

"""Every family runs for every number of microbatches, in the ticks and with the activations that it promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from schedules.actions import Kind, ScheduleError, from_csv, split_backward
from schedules.costs import Costs
from schedules.families import describe, make, names
from schedules.simulate import simulate
from schedules.slots import Lifetime, build_table
from schedules.ticks import assign_ticks
from schedules.validate import live, validate
from tests.oracles import other_software

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
@pytest.mark.parametrize("name", ["interleaved_1f1b", "looped_bfs"])
def test_any_number_of_chunks(name, chunks):
    for ranks, microbatches in SIZES:
        schedule = make(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        validate(split_backward(schedule), microbatches=microbatches)
        assert (schedule.ranks, schedule.chunks) == (ranks, chunks)


@pytest.mark.parametrize("name", names())
def test_placement(name):
    placements = {
        "line": {1: (0,), 3: (0, 1, 2)},
        "loop": {1: (0, 0), 3: (0, 1, 2, 0, 1, 2)},
        "v": {1: (0, 0), 3: (0, 1, 2, 2, 1, 0)},
        "both": {1: (0, 0), 3: (0, 1, 2, 2, 1, 0)},
    }
    for ranks, placement in placements[describe(name).placement].items():
        schedule = make(name, ranks=ranks, microbatches=2)
        assert schedule.placement == placement
        assert schedule.pipelines == (2 if describe(name).placement == "both" else 1)


def test_gpipe_holds_everything():
    schedule = make("gpipe", ranks=3, microbatches=5)
    assert [str(action) for action in schedule.actions[1]] == [f"1{kind}{m}" for kind in "FB" for m in range(5)]
    assert live(schedule) == (5, 5, 5)


def test_1f1b_holds_fewer_further_down():
    for ranks, microbatches in SIZES:
        schedule = make("1f1b", ranks=ranks, microbatches=microbatches)
        assert live(schedule) == tuple(min(ranks - rank, microbatches) for rank in range(ranks))
        assert count_ticks(schedule) == 3 * microbatches + 2 * ranks - 2


def test_looped_bfs_takes_chunk_after_chunk():
    schedule = make("looped_bfs", ranks=2, microbatches=3, chunks=2)
    assert " ".join(map(str, schedule.actions[1])) == "1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2"
    for ranks, microbatches in SIZES:
        if microbatches >= ranks:
            for chunks in (1, 2, 3):
                schedule = make("looped_bfs", ranks=ranks, microbatches=microbatches, chunks=chunks)
                assert count_ticks(schedule) == 3 * chunks * microbatches + 2 * (ranks - 1)
                assert set(live(schedule)) == {chunks * microbatches}


def test_eager_1f1b_runs_twice_as_far_ahead():
    for ranks, microbatches in SIZES:
        schedule = make("eager_1f1b", ranks=ranks, microbatches=microbatches)
        assert live(schedule) == tuple(min(2 * (ranks - rank) - 1, microbatches) for rank in range(ranks))


def test_kfkb_is_1f1b_of_groups():
    schedule = make("kfkb", ranks=2, microbatches=7, group=3)  # of 3, 2 and 2
    assert " ".join(map(str, schedule.actions[0])) == "0F0 0F1 0F2 0F3 0F4 0B0 0B1 0B2 0F5 0F6 0B3 0B4 0B5 0B6"
    assert make("kfkb", ranks=2, microbatches=7).actions == make("kfkb", ranks=2, microbatches=7, group=2).actions
    for ranks, microbatches in SIZES:
        sizes = {"ranks": ranks, "microbatches": microbatches}
        assert make("kfkb", group=1, **sizes).actions == make("1f1b", **sizes).actions
        assert make("kfkb", group=99, **sizes).actions == make("gpipe", **sizes).actions
        held = live(make("kfkb", group=3, **sizes))
        assert max(held) <= 3 * max(live(make("1f1b", **sizes)))


def test_kfkb_hides_transfers():
    # A transfer as long as a forward, and ranks that run freely: Ada-Grouper's case.
    costs = Costs(F=1, B=2, send=1)
    for group, makespan in ((1, 185), (2, 131)):
        schedule = make("kfkb", ranks=8, microbatches=32, group=group)
        assert simulate(schedule, costs, "asynchronous").makespan == makespan


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


def test_zb_h2_never_lets_the_last_rank_wait():
    for ranks, microbatches in SIZES:
        schedule = make("zb_h2", ranks=ranks, microbatches=microbatches)
        assert max(live(schedule)) <= 2 * ranks - 1
        if microbatches >= 2 * ranks - 1:
            assert count_ticks(schedule) == 3 * microbatches + ranks - 1


def test_zbv_has_no_bubble():
    for ranks, microbatches in SIZES:
        schedule = make("zbv", ranks=ranks, microbatches=microbatches)
        assert max(live(schedule)) <= 2 * ranks
        if microbatches >= 2 * ranks - 1:
            ticks = assign_ticks(schedule)
            for rank, row in enumerate(schedule.actions):
                assert [ticks[action] for action in row] == list(range(rank, rank + 6 * microbatches))


def deepseek(ranks, microbatches):
    """The steps of DualPipe-V as its software names them; `B` is whole, `I` and `W` are its zero-bubble backward."""
    rows = []
    for rank in range(ranks):
        steps = ["F0"] * (2 * (ranks - rank - 1))
        steps += ["F0", "F1"] * (rank + 1)
        steps += ["I1", "W", "F1"] * (ranks - rank - 1)
        steps += ["F0", "B1", "F1", "B0"] * (microbatches - 2 * ranks + rank + 1)
        steps += ["B1", "F1", "B0"] * (ranks - rank - 1)
        last = ["B1", "B0"] * (rank + 1)
        steps += last[: rank + 1] + [word.replace("B", "I") for word in last[rank + 1 :]]
        steps += ["W", "I0"] * (ranks - rank - 1) + ["W"] * (rank + 1)
        stage = {"0": rank, "1": 2 * ranks - 1 - rank}
        count, pending, row = dict.fromkeys(("F0", "F1", "B0", "B1"), 0), [], []
        for step in steps:
            if step == "W":
                row.append(pending.pop(0))
                continue
            key = step.replace("I", "B")
            row.append(f"{stage[step[1]]}{step[0]}{count[key]}")
            if step[0] == "I":
                pending.append(f"{stage[step[1]]}W{count[key]}")
            count[key] += 1
        rows.append(row)
    return rows


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (2, 7), (4, 8), (5, 13)])
def test_dualpipe_v_is_deepseeks(ranks, microbatches):
    schedule = make("dualpipe_v", ranks=ranks, microbatches=microbatches)
    assert [[str(action) for action in row] for row in schedule.actions] == deepseek(ranks, microbatches)
    assert max(live(schedule)) <= 2 * ranks + 1


@pytest.mark.parametrize(("name", "writer"), [("zbv", other_software.zbv), ("dualpipe_v", other_software.dualpipev)])
def test_no_slower_than_a_greedy_writer(name, writer):
    for ranks in (2, 3, 4, 8):
        for microbatches in (2 * ranks, 3 * ranks + 1):
            schedules = make(name, ranks=ranks, microbatches=microbatches), from_csv(writer(ranks, microbatches))
            ours, its = (count_ticks(schedule) for schedule in schedules)
            assert ours <= its


def test_less_memory_on_the_v():
    for ranks, microbatches in SIZES:
        sizes = {"ranks": ranks, "microbatches": microbatches}
        least = max(6 * microbatches + ranks - 1, 4 * ranks + 1)
        for name, held in (("v_half", ranks + ranks % 2), ("v_min", 2 * (ranks // 3) + 2)):
            schedule = make(name, **sizes)
            assert max(live(schedule)) <= max(held, 3)
            for row in schedule.actions:
                pending = [sum((a.kind is Kind.I) - (a.kind is Kind.W) for a in row[:end]) for end in range(len(row))]
                assert max(pending) <= 2
            assert least <= count_ticks(schedule) <= 1.2 * least + 3 * ranks


@pytest.mark.parametrize(("name", "most"), [("v_half", 0.60), ("v_min", 0.48)])
def test_less_memory_than_1f1b(name, most):
    schedules = [split_backward(make(each, ranks=8, microbatches=32)) for each in ("1f1b", name)]
    whole, less = [max(simulate(schedule, Costs()).peak_activations) for schedule in schedules]
    assert less <= most * whole
    # The program's buffers, each as large as a stage: half as large on the V.
    lives = [Lifetime(frozenset(range(schedule.stages)), Kind.F, Kind.W) for schedule in schedules]
    slots = [build_table(one, [life]).counts[life] for one, life in zip(schedules, lives, strict=True)]
    assert slots[1] / 2 <= most * slots[0]


def test_chimera_fills_and_drains_in_half_the_time():
    for ranks, microbatches in SIZES:
        schedule = make("chimera", ranks=ranks, microbatches=microbatches)
        assert max(live(schedule)) <= ranks
        assert {action.stage // ranks for action in schedule if action.microbatch % 2} <= {1}
        if ranks % 2 == 0 and microbatches % ranks == 0:
            assert count_ticks(schedule) == 3 * microbatches + ranks - 2


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


# Chunks are half as long where there are two, so their ticks are to be halved.
@pytest.mark.parametrize(
    ("name", "ticks", "activations"),
    [
        ("gpipe", 110, 32),
        ("looped_bfs", 206, 64),
        ("1f1b", 110, 8),
        ("eager_1f1b", 110, 15),
        ("kfkb", 110, 16),
        ("interleaved_1f1b", 206, 23),
        ("zb_h1", 103, 8),
        ("zb_h2", 103, 15),
        ("zbv", 199, 16),
        ("v_half", 215, 8),
        ("v_min", 243, 6),
        ("dualpipe_v", 199, 17),
        ("chimera", 102, 8),
        ("cross_region", 103, 8),
        ("cross_region_wave", 200, 16),
    ],
)
def test_8_ranks_and_32_microbatches(name, ticks, activations):
    schedule = make(name, ranks=8, microbatches=32)
    assert count_ticks(schedule) == ticks
    assert max(live(schedule)) == activations


def test_registry():
    for name in names():
        family = describe(name)
        assert family.name == name
        assert "\n" not in family.summary and family.source
    assert (describe("interleaved_1f1b").chunks, describe("interleaved_1f1b").max_chunks) == (2, None)
    assert (describe("zb_h1").chunks, describe("zb_h1").max_chunks) == (1, 1)
    options = {name: describe(name).options for name in names() if describe(name).options}
    assert options == {
        "interleaved_1f1b": ("chunks",),
        "looped_bfs": ("chunks",),
        "kfkb": ("group",),
        "cross_region": ("chunks", "costs", "memory_cap"),
        "cross_region_wave": ("chunks", "costs", "memory_cap"),
    }


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("zbh1", {}, "schedule 'zbh1' is unknown; did you mean 'zb_h1'"),
        ("1F1B", {}, "use one of gpipe, looped_bfs, 1f1b, .*zb_h1"),
        ("", {}, "use one of gpipe"),
        ("1f1b", {"chunks": 2}, "chunks=2: 1f1b has one stage a rank; .* with chunks: looped_bfs, interleaved_1f1b"),
        ("zbv", {"chunks": 1}, "chunks=1: zbv has 2 stages a rank; set chunks=2 or use a schedule with chunks: "),
        ("zbv", {"chunks": 0}, "chunks=0 is too small"),
        ("kfkb", {"group": 0}, "group=0 is too small for kfkb; use 1 or more"),
        ("1f1b", {"group": 2}, "group=2: 1f1b takes no group; leave it out, or use kfkb"),
        ("zb_h1", {"costs": Costs()}, "costs=.*: zb_h1 takes no costs; leave it out"),
        ("zb_h1", {"memory_cap": 8}, "memory_cap=8: zb_h1 takes no memory_cap; leave it out, or use cross_region"),
        ("cross_region", {"memory_cap": 0.5}, "memory_cap=0.5 is below one microbatch"),
        ("1f1b", {"chunks": 0}, "chunks=0 is too small for 1f1b; use 1 or more"),
        ("gpipe", {"microbatches": 0}, "microbatches=0"),
        ("gpipe", {"ranks": -1}, "ranks=-1"),
    ],
)
def test_refused(name, sizes, words):
    with pytest.raises(ScheduleError, match=words):
        make(name, **{"ranks": 2, "microbatches": 4} | sizes)


def test_the_configuration_page_lists_every_family():
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| [\w`, ]+ \| (.+) \|$", page, re.MULTILINE))
    assert {name: listed.get(name) for name in names()} == {name: describe(name).summary for name in names()}

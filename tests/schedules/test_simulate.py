"""Times of schedules: reference values, and an event simulator that knows no ticks."""

from __future__ import annotations

import pytest

from schedules.actions import Action, Kind, ScheduleError, from_csv, split_backward
from schedules.costs import Costs
from schedules.families import make, names
from schedules.simulate import simulate
from schedules.ticks import timeline
from schedules.validate import live


@pytest.mark.parametrize(
    ("name", "split", "timing", "makespan"),
    [
        ("1f1b", False, "lockstep", 148),
        ("1f1b", False, "asynchronous", 117),
        ("1f1b", True, "lockstep", 110),
        ("1f1b", True, "asynchronous", 110),
        ("zb_h1", False, "lockstep", 103),
    ],
)
def test_reference_of_8_ranks_and_32_microbatches(name, split, timing, makespan):
    schedule = make(name, ranks=8, microbatches=32)
    found = simulate(split_backward(schedule) if split else schedule, Costs(), timing)
    assert found.makespan == makespan
    assert found.work == (96,) * 8
    assert found.bubble_fraction == pytest.approx(1 - 96 / makespan)
    assert found.peak_activations == live(schedule)


def test_unequal_parts_in_lockstep():
    schedule = split_backward(make("1f1b", ranks=8, microbatches=32))
    assert simulate(schedule, Costs(I=1.3, W=0.7)).makespan == pytest.approx(140)


def events(schedule, costs):
    """Starts, one by one, the action that can start first; returns the starts."""
    queue = [list(row) for row in schedule.actions]
    free = [0.0] * schedule.ranks
    ends: dict[str, tuple[float, int]] = {}
    starts = {}
    while any(queue):
        ready = []
        for rank, row in enumerate(queue):
            if not row:
                continue
            stage, kind, m = row[0].stage, row[0].kind.value, row[0].microbatch
            waits = [f"{stage}I{m}" if kind == "W" else f"{stage}F{m}"] if kind != "F" else []
            if kind == "F" and stage > 0:
                waits.append(f"{stage - 1}F{m}")
            if kind in "IB" and stage + 1 < schedule.stages:
                waits.append(f"{stage + 1}{kind}{m}")
            if all(word in ends for word in waits):
                arrivals = [end + (costs.send if owner != rank else 0) for end, owner in map(ends.__getitem__, waits)]
                ready.append((max([free[rank], *arrivals]), rank))
        begin, rank = min(ready)
        action = queue[rank].pop(0)
        own = {"F": costs.F, "I": costs.I, "W": costs.W, "B": costs.I + costs.W}[action.kind.value]
        if costs.stages:
            own *= costs.stages[action.stage]
        starts[action] = begin
        free[rank] = begin + own
        ends[str(action)] = (begin + own, rank)
    return starts, max(free)


COSTS = [
    Costs(),
    Costs(F=2, I=3, W=1, send=0.5),
    Costs(F=1, I=1.25, W=0.75, send=2, stages=(1, 0.5, 2, 1, 1, 3)),
]


@pytest.mark.parametrize("costs", COSTS, ids=["unit", "send", "stages"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", names())
def test_asynchronous_is_the_event_simulation(name, split, costs):
    schedule = make(name, ranks=3, microbatches=5)
    schedule = split_backward(schedule) if split else schedule
    found = simulate(schedule, costs, "asynchronous")
    starts, makespan = events(schedule, costs)
    assert found.start == pytest.approx(starts)
    assert found.makespan == pytest.approx(makespan)


@pytest.mark.parametrize("costs", COSTS, ids=["unit", "send", "stages"])
@pytest.mark.parametrize("name", names())
def test_lockstep_sums_the_slowest_rank_of_each_tick(name, costs):
    schedule = make(name, ranks=3, microbatches=5)
    found = simulate(schedule, costs)
    clock = 0.0
    for cells in zip(*timeline(schedule), strict=True):
        column = [action for action in cells if action is not None]
        assert all(found.start[action] == pytest.approx(clock) for action in column)
        clock += max(costs.of(action) for action in column) + costs.send
    assert found.makespan == pytest.approx(clock)
    assert all(found.end[action] == found.start[action] + costs.of(action) for action in schedule)


def test_one_rank_has_no_bubbles_and_sends_nothing():
    schedule = make("1f1b", ranks=1, microbatches=4)
    for timing in ("lockstep", "asynchronous"):
        found = simulate(schedule, Costs(send=5), timing)
        assert (found.makespan, found.bubble_fraction) == (12, 0)


def test_a_neighbour_on_the_same_rank_sends_nothing():
    schedule = from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0")
    assert simulate(schedule, Costs(send=1), "asynchronous").makespan == 4 + 8 + 4


def test_costs():
    costs = Costs.parse(" F=1, I = 1.3,W=0.7,")
    assert costs == Costs(F=1, I=1.3, W=0.7)
    assert costs.of(Action(0, Kind.B, 0)) == 2
    assert Costs.parse("B=2.5,R=.5,send=1e-3") == Costs(B=2.5, R=0.5, send=1e-3)
    assert Costs.parse("") == Costs()
    assert Costs(stages=(1, 3)).of(Action(1, Kind.B, 0)) == 6
    assert simulate(make("1f1b", ranks=2, microbatches=1), Costs(F=0, I=0, W=0)).bubble_fraction == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("G=1", "'G' is no cost; use F, I, W, B, R, send"),
        ("F=1,F=2", "'F' is named twice"),
        ("F", "'F' has no number"),
        ("F=fast", "'F=fast' has no number"),
        ("F=-1", "cost F=-1.0 is not a time"),
        ("F=nan", "cost F=nan is not a time"),
        ("F=inf", "cost F=inf is not a time"),
    ],
)
def test_costs_refused(text, words):
    with pytest.raises(ScheduleError, match=words):
        Costs.parse(text)


def test_simulate_refuses():
    schedule = make("1f1b", ranks=2, microbatches=1)
    with pytest.raises(ScheduleError, match="timing='loose' is unknown; use lockstep or asynchronous"):
        simulate(schedule, Costs(), "loose")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="none for stage 1"):
        simulate(schedule, Costs(stages=(1,)))

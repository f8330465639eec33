"""Times of schedules: reference values, and an event simulator that knows no ticks."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import pytest

from schedules.actions import Action, Kind, ScheduleError, from_csv, split_backward
from schedules.costs import Costs, Link
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
    """Starts, one by one, the action that can start first; returns the starts and the arrivals of results."""
    queue = [list(row) for row in schedule.actions]
    words = {str(action) for action in schedule}
    free = [0.0] * schedule.ranks
    link_free: dict[tuple[int, int], float] = {}
    ends: dict[str, tuple[float, int]] = {}
    arrivals: dict[tuple[str, int], float] = {}
    starts, sent = {}, {}
    while any(queue):
        ready = []
        for rank, row in enumerate(queue):
            if not row:
                continue
            stage, kind, m = row[0].stage, row[0].kind.value, row[0].microbatch
            waits = [f"{stage}I{m}" if kind == "W" else f"{stage}F{m}"] if kind != "F" else []
            if kind == "F" and stage % schedule.depth > 0:
                waits.append(f"{stage - 1}F{m}")
            if kind in "IB" and stage % schedule.depth + 1 < schedule.depth:
                waits += words & {f"{stage + 1}I{m}", f"{stage + 1}B{m}"}
            if all(word in ends for word in waits):
                came = [ends[word][0] if ends[word][1] == rank else arrivals[word, rank] for word in waits]
                ready.append((max([free[rank], *came]), rank))
        begin, rank = min(ready)
        action = queue[rank].pop(0)
        place = action.stage % schedule.depth
        time = {kind: getattr(costs, kind) for kind in "FIWBR"}
        time = {kind: value[place] if isinstance(value, tuple) else value for kind, value in time.items()}
        own = time["I"] + time["W"] if action.kind == "B" and costs.B is None else time[action.kind]
        if costs.stages:
            own *= costs.stages[place]
        starts[action] = begin
        free[rank] = end = begin + own
        ends[str(action)] = (end, rank)
        first = action.stage - place
        neighbour = action.stage + {"F": 1, "I": -1, "B": -1}.get(action.kind, schedule.stages)
        if first <= neighbour < first + schedule.depth and schedule.placement[neighbour] != rank:
            to = schedule.placement[neighbour]
            latency, transfer = costs.send, costs.transfer
            for link in costs.links:
                if (link.sender, link.receiver) == (rank, to):
                    latency, transfer = link.latency, link.transfer
            link_free[rank, to] = max(end, link_free.get((rank, to), 0)) + transfer
            sent[action] = arrivals[str(action), to] = link_free[rank, to] + latency
    return starts, sent, max(free)


COSTS = {
    "unit": Costs(),
    "send": Costs(F=2, I=3, W=1, send=0.5),
    "stages": Costs(F=1, I=1.25, W=0.75, send=2, stages=(1, 0.5, 2, 1, 1, 3)),
    "times": Costs(F=(1, 0.5, 2, 1, 1, 3), I=1.5, W=(2, 1, 1, 1, 0.5, 0), B=(2, 2, 2, 3, 3, 4), R=0.25),
    "queue": Costs(F=0.5, I=0.75, W=0.5, send=0.25, transfer=1.25),
    "links": Costs(send=0.5, links=(Link(0, 1, 3, 1.5), Link(2, 1, transfer=2), Link(2, 0, latency=1))),
}
costs_parameter = pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)


def of_the_first_stages(costs, stages):
    """The costs of as many stages as a schedule has."""
    lists = {field.name: getattr(costs, field.name) for field in fields(costs) if field.name != "links"}
    return replace(costs, **{name: value[:stages] for name, value in lists.items() if isinstance(value, tuple)})


def schedules_with_recompute(name, split):
    """The family at 3 ranks and 5 microbatches, and the same with each backward's recomputation before it."""
    schedule = make(name, ranks=3, microbatches=5)
    schedule = split_backward(schedule) if split else schedule
    rows = tuple(
        tuple(
            one
            for action in row
            for one in ((Action(action.stage, Kind.R, action.microbatch), action) if action.kind in "BI" else (action,))
        )
        for row in schedule.actions
    )
    return schedule, replace(schedule, actions=rows)


@costs_parameter
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", names())
def test_asynchronous_is_the_event_simulation(name, split, costs):
    for schedule in schedules_with_recompute(name, split):
        costs = of_the_first_stages(costs, schedule.depth)
        found = simulate(schedule, costs, "asynchronous")
        starts, sent, makespan = events(schedule, costs)
        assert found.start == pytest.approx(starts)
        assert found.arrival == pytest.approx(sent)
        assert found.makespan == pytest.approx(makespan)


@costs_parameter
@pytest.mark.parametrize("name", names())
def test_lockstep_sums_the_slowest_rank_of_each_tick(name, costs):
    for schedule in schedules_with_recompute(name, split=False):
        costs = of_the_first_stages(costs, schedule.depth)
        found = simulate(schedule, costs)
        pairs = {pair for pair in pairwise(schedule.placement) if pair[0] != pair[1]}
        pairs |= {(b, a) for a, b in pairs}
        send = max(costs.link(*pair).latency + costs.link(*pair).transfer for pair in pairs)
        time = {action: costs.time(action.kind, action.stage % schedule.depth) for action in schedule}
        clock = 0.0
        for cells in zip(*timeline(schedule), strict=True):
            column = [action for action in cells if action is not None]
            assert all(found.start[action] == pytest.approx(clock) for action in column)
            clock += max(time[action] for action in column) + send
            assert all(found.arrival.get(action, clock) == pytest.approx(clock) for action in column)
        assert found.makespan == pytest.approx(clock)
        assert all(found.end[action] == found.start[action] + time[action] for action in schedule)


@pytest.mark.parametrize("name", names())
def test_what_a_rank_holds(name):
    schedule = split_backward(make(name, ranks=4, microbatches=7))
    found = simulate(schedule, Costs())
    for rank, row in enumerate(schedule.actions):
        done: set[str] = set()
        held, stashed = [], []
        for action in row:
            pair = f"{action.stage}{{}}{action.microbatch}"
            done.add(str(action))
            # All pairs so far, of which those that have run W are done with; before it counts as held while W runs.
            pairs = {str(one).replace(str(one.kind), "{}") for one in row}
            held.append(sum(p.format("F") in done and (p.format("W") not in done) for p in pairs))
            stashed.append(sum(p.format("I") in done and (p.format("W") not in done) for p in pairs))
            assert pair in pairs
        assert found.peak_activations[rank] == pytest.approx(max(held) * schedule.ranks / schedule.depth)
        assert found.peak_weight_stash[rank] == pytest.approx(max(stashed) * schedule.ranks / schedule.depth)


def test_two_pipelines():
    schedule = from_csv("0F0,3F1,0B0,3B1\n1F0,2F1,1B0,2B1")
    assert schedule.pipelines == 2
    costs = Costs(F=(1, 2), I=(2, 1.5), send=0.5, transfer=0.25)
    found = simulate(schedule, costs, "asynchronous")
    starts, sent, makespan = events(schedule, costs)
    assert (found.start, found.arrival, found.makespan) == (starts, sent, makespan)
    assert found.peak_activations == (2, 2)
    assert found.work == (1 + 2 + 3 + 2.5, 2 + 1 + 2.5 + 3)


def test_messages_queue_on_a_link():
    schedule = from_csv("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2")
    found = simulate(schedule, Costs(links=(Link(0, 1, latency=10, transfer=3),)), "asynchronous")
    assert [found.start[Action(1, Kind.F, m)] for m in range(3)] == [1 + 3 + 10, 1 + 6 + 10, 1 + 9 + 10]
    assert found.start[Action(0, Kind.B, 0)] == found.end[Action(1, Kind.B, 0)]  # the way back is free


def test_one_rank_has_no_bubbles_and_sends_nothing():
    schedule = make("1f1b", ranks=1, microbatches=4)
    for timing in ("lockstep", "asynchronous"):
        found = simulate(schedule, Costs(send=5), timing)
        assert (found.makespan, found.bubble_fraction) == (12, 0)


def test_a_neighbour_on_the_same_rank_sends_nothing():
    schedule = from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0")
    assert simulate(schedule, Costs(send=1), "asynchronous").makespan == 4 + 8 + 4


def test_simulate_refuses():
    schedule = make("1f1b", ranks=2, microbatches=1)
    with pytest.raises(ScheduleError, match="timing='loose' is unknown; use lockstep or asynchronous"):
        simulate(schedule, Costs(), "loose")  # type: ignore[arg-type]
    for costs, words in (
        (Costs(stages=(1,)), "stages is given for 1 stages, and the schedule has 2; give each a time"),
        (Costs(F=(1, 1, 1)), "F is given for 3 stages, and the schedule has 2"),
        (Costs(links=(Link(1, 2),)), "no link from rank 1 to rank 2; the schedule has the ranks 0 to 1"),
    ):
        with pytest.raises(ScheduleError, match=words):
            simulate(schedule, costs)
    stuck = from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0")
    for timing in ("lockstep", "asynchronous"):
        with pytest.raises(ScheduleError, match="waits for"):
            simulate(stuck, Costs(), timing)

"""R in a schedule: there, in order, and where it costs least."""

from __future__ import annotations

import pytest

from schedules.actions import Action, Kind, ScheduleError, from_csv, split_backward, to_csv
from schedules.costs import Costs
from schedules.families import make
from schedules.recompute import add_recompute
from schedules.simulate import simulate
from schedules.validate import live, recomputing_stages, validate

# A matmul-bound layer under full remat: recomputation is nearly a forward.
APART, INSIDE = Costs(F=1, R=1, I=1, W=1), Costs(F=1, I=2, W=1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (3, 2), (4, 9)])
def test_one_recompute_for_every_backward(name, split, ranks, microbatches):
    plain = make(name, ranks=ranks, microbatches=microbatches)
    plain = split_backward(plain) if split else plain
    schedule = add_recompute(plain, APART)
    validate(schedule)
    again = [action for action in schedule if action.kind is Kind.R]
    pairs = {(action.stage, action.microbatch) for action in plain}
    assert {(action.stage, action.microbatch) for action in again} == pairs and len(again) == len(pairs)
    rows = tuple(tuple(action for action in row if action.kind is not Kind.R) for row in schedule.actions)
    assert rows == plain.actions and live(schedule) == live(plain)
    assert recomputing_stages(schedule) == set(range(plain.stages)) and not recomputing_stages(plain)


def test_some_stages():
    schedule = add_recompute(make("1f1b", ranks=4, microbatches=3), APART, stages={1, 3})
    assert recomputing_stages(schedule) == {1, 3}
    assert {action.stage for action in schedule if action.kind is Kind.R} == {1, 3}


def test_a_waiting_rank_recomputes():
    """The rank would wait for two units: R runs then, and not after the gradient has come."""
    schedule = add_recompute(from_csv("0F0,0B0\n1F0,1B0"), Costs(F=1, R=1, B=2), "asynchronous", stages={0})
    times = simulate(schedule, Costs(F=1, R=1, B=2), "asynchronous")
    assert to_csv(schedule) == "0F0,0R0,0B0\n1F0,1B0\n"
    assert times.start[Action(0, Kind.R, 0)] == 1 and times.makespan == 6


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("timing", ["lockstep", "asynchronous"])
@pytest.mark.parametrize("send", [0.0, 0.5])
def test_recompute_apart_costs_less_than_on_the_critical_path(name, timing, send):
    plain = split_backward(make(name, ranks=8, microbatches=32))
    apart, inside = (Costs(F=1, R=1, I=one.I, W=1, send=send) for one in (APART, INSIDE))
    assert (
        simulate(add_recompute(plain, apart, timing), apart, timing).makespan < simulate(plain, inside, timing).makespan
    )


def test_all_microbatches_of_a_stage_or_none():
    with pytest.raises(ScheduleError, match="stage 0 has 0R0 but no 0R1; write R for all microbatches of a stage"):
        validate(from_csv("0F0,0R0,0B0,0F1,0B1"))

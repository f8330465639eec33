"""Searched schedules: against all there are where these can be counted, and their promises elsewhere."""

from __future__ import annotations

import dataclasses

import pytest

from schedules.actions import ScheduleError, from_csv, to_csv
from schedules.costs import Costs, Link
from schedules.families import make
from schedules.search import Question, find, lower_bound, search
from schedules.search.exact import Solution, solve
from schedules.search.lockstep import lockstep_exhaustive
from schedules.search.question import Shape
from schedules.simulate import simulate
from schedules.slots import build_table
from schedules.ticks import timeline
from schedules.validate import live, validate
from tests.oracles.all_schedules import shortest, shortest_table
from tests.oracles.table_machine import execute

UNEVEN = Costs(F=1, I=1.3, W=0.7)
BY_STAGE = Costs(F=(1, 1.5), I=(1.3, 2), W=(0.7, 0.4))


@pytest.mark.parametrize("cap", [1, 2, 3])
@pytest.mark.parametrize("timing", ["lockstep", "asynchronous"])
@pytest.mark.parametrize(
    ("ranks", "microbatches", "costs"),
    [
        (2, 2, Costs()),
        (2, 2, UNEVEN),
        (2, 2, BY_STAGE),
        (3, 2, Costs(F=1, I=1.3, W=0.7, send=0.25)),
        (2, 2, Costs(F=2, I=1, W=0.5, links=(Link(0, 1, latency=0.5), Link(1, 0, latency=2)))),
    ],
)
def test_nothing_is_shorter(ranks, microbatches, costs, timing, cap):
    question = Question(ranks, microbatches, costs, cap, timing, seconds=0.1)
    answer = search(question)
    least = shortest(ranks, microbatches, costs, timing, cap)
    if timing == "lockstep":
        send = max([costs.send, *(link.delay for link in costs.links)])
        least = min(least, shortest_table(ranks, microbatches, costs, cap, send))
    assert lower_bound(question) <= least + 1e-9
    assert answer.makespan == pytest.approx(least)


@pytest.mark.parametrize("timing", ["lockstep", "asynchronous"])
@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "cap"),
    [
        (1, 3, 1, 1),
        (4, 1, 1, 4),
        (4, 6, 1, 1),
        (4, 6, 1, 3),
        (3, 5, 2, 1),
        (3, 5, 2, 2.5),
        (2, 4, 3, 2),
        (4, 9, 1, 100),
    ],
)
def test_an_answer_is_a_schedule_within_the_cap(ranks, microbatches, chunks, cap, timing):
    answer = search(Question(ranks, microbatches, UNEVEN, cap, timing, chunks, seconds=0.1))
    validate(answer.schedule, microbatches=microbatches)
    assert (answer.schedule.ranks, answer.schedule.chunks) == (ranks, chunks)
    assert max(live(answer.schedule)) <= cap * chunks
    assert answer.makespan == simulate(answer.schedule, UNEVEN, timing).makespan
    assert answer.lower_bound <= answer.makespan + 1e-9
    assert answer.optimal == (answer.makespan <= answer.lower_bound + 1e-9)


@pytest.mark.parametrize(("ranks", "microbatches", "cap"), [(2, 4, 2), (2, 5, 3), (3, 3, 2), (3, 3, 3)])
@pytest.mark.parametrize("costs", [Costs(), UNEVEN, Costs(F=1, I=2, W=0.5)])
def test_the_exhaustive_search_proves_the_least(ranks, microbatches, cap, costs):
    question = Question(ranks, microbatches, costs, cap)
    least = shortest_table(ranks, microbatches, costs, cap)
    shape = Shape(question, question.placements[0])
    table, closed = lockstep_exhaustive(shape, 10**6, least + 0.05)
    assert closed and table is not None and table.makespan == pytest.approx(least)
    assert lockstep_exhaustive(shape, 10**6, least) == (None, True)
    assert lockstep_exhaustive(shape, 3, least + 0.05) == (None, False)
    answer = search(question)
    assert answer.optimal and answer.lower_bound == answer.makespan == pytest.approx(least)


@pytest.mark.parametrize("timing", ["lockstep", "asynchronous"])
@pytest.mark.parametrize("costs", [Costs(), UNEVEN, BY_STAGE])
def test_the_solver_proves_the_least(costs, timing):
    pytest.importorskip("ortools")
    question = Question(2, 2, costs, 2, timing)
    shape = Shape(question, question.placements[0])
    least = shortest(2, 2, costs, timing, 2)
    if timing == "lockstep":
        least = min(least, shortest_table(2, 2, costs, 2))
    found = solve(question, shape, least + 0.05, 5)
    assert found.closed and found.makespan == pytest.approx(least)
    assert solve(question, shape, least, 5) == Solution(None, True)


def test_several_chunks_are_proved_by_the_solver():
    pytest.importorskip("ortools")
    answer = search(Question(2, 2, UNEVEN, 2, chunks=2, seconds=20))
    assert answer.optimal and answer.note is None


def test_without_the_solver_a_line_says_so(monkeypatch):
    monkeypatch.setattr(find, "solver_is_there", lambda: False)
    question = Question(2, 3, UNEVEN, 1.5, "asynchronous", chunks=2, seconds=0.1)
    answer = search(question)
    assert not answer.optimal and "pip install 'meshsys[search]'" in answer.note and "\n" not in answer.note


def test_many_ranks():
    answer = search(Question(40, 3, UNEVEN, 40, seconds=0.1))
    assert answer.makespan <= simulate(make("zb_h1", ranks=40, microbatches=3), UNEVEN).makespan


def test_never_worse_than_a_family():
    costs = Costs(send=0.5)
    for timing in ("lockstep", "asynchronous"):
        family = simulate(make("zb_h1", ranks=4, microbatches=8), costs, timing).makespan
        assert search(Question(4, 8, costs, 4, timing, seconds=0.01)).makespan <= family


def test_the_same_question_has_the_same_answer():
    question = Question(4, 8, UNEVEN, 4, seconds=0.3, seed=3)
    assert search(question).schedule == search(question).schedule


@pytest.mark.parametrize("cap", [4, 8])
def test_uneven_costs_in_lock_step(cap):
    """Like actions meet: the families, made for equal costs, take far longer."""
    answer = search(Question(4, 16, UNEVEN, cap, seconds=2))
    family = simulate(make("zb_h1", ranks=4, microbatches=16), UNEVEN).makespan
    assert answer.makespan < family - 3


@pytest.mark.parametrize(
    ("cap", "timing", "bound"),
    [
        (16, "asynchronous", 7 + 96),  # the last rank's work after seven forwards
        # The last rank runs all F and I and, to hold no more than 8, 24 W before its last I; which then goes down.
        (8, "asynchronous", 7 + 32 * 2.3 + 24 * 0.7 + 7 * 1.3 + 0.7),
        # Rank 0's first I comes after 8 F and 7 I, and it has run one F of its own till then; 95 more follow.
        (1, "asynchronous", 8 + 7 * 1.3 + 96 - 1),
        # 103 ticks of 0.7 or more, 7 + 64 + 7 of 1.0 or more (an input gradient is last), 7 + 32 of 1.3.
        (16, "lockstep", 0.7 * 103 + 0.3 * 78 + 0.3 * 39),
    ],
)
def test_lower_bounds_counted_by_hand(cap, timing, bound):
    assert lower_bound(Question(8, 32, UNEVEN, cap, timing)) == pytest.approx(bound)


def test_actions_wait_for_their_like():
    """The answer holds actions back, and its table runs them when it says so."""
    question = Question(4, 12, UNEVEN, 4, seconds=1)
    schedule = search(question).schedule
    assert schedule.holds
    free = dataclasses.replace(schedule, holds=())
    assert simulate(schedule, UNEVEN).makespan < simulate(free, UNEVEN).makespan
    done = execute(build_table(schedule), schedule.stages, schedule.ranks)
    assert done == {(action.stage, action.kind, action.microbatch) for action in schedule}
    assert from_csv(to_csv(schedule, timeline(schedule)), "search") == schedule


@pytest.mark.parametrize(("cap", "least"), [(8, 107.2), (12, 104.4), (16, 103.0)])
def test_free_ranks_reach_the_bound(cap, least):
    """The families take 107.2 or more with any memory."""
    answer = search(Question(8, 32, UNEVEN, cap, "asynchronous", seconds=1))
    assert answer.optimal and answer.makespan == pytest.approx(least)


@pytest.mark.slow
@pytest.mark.parametrize(("cap", "target"), [(16, 107.3), (8, 116.6)])
def test_eight_ranks(cap, target):
    answer = search(Question(8, 32, UNEVEN, cap))
    assert answer.makespan <= target
    assert max(answer.timeline.peak_activations) <= cap


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 0}, "ranks=0 is too small"),
        ({"microbatches": 0}, "microbatches=0 is too small"),
        ({"chunks": 0}, "chunks=0 is too small"),
        ({"ranks": 1000}, "ranks=1000 is too large"),
        ({"microbatches": 100_000}, "microbatches=100000 is too large"),
        ({"memory_cap": 0.5}, "memory_cap=0.5 is below"),
        ({"memory_cap": float("nan")}, "memory_cap=nan"),
        ({"timing": "free"}, "timing='free' is unknown"),
        ({"seconds": 0}, "seconds=0"),
        ({"costs": Costs(F=(1.0, 2.0))}, "given for 2 stages"),
    ],
)
def test_questions_without_an_answer(change, message):
    with pytest.raises(ScheduleError, match=message) as caught:
        Question(**({"ranks": 4, "microbatches": 4} | change))
    assert "\n" not in str(caught.value)

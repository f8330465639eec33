"""Schedules that cannot run are refused with rank, action, reason and a way out."""

from __future__ import annotations

import dataclasses
import random

import pytest

from schedules.actions import Action, Kind, Schedule, ScheduleError, from_csv, split_backward
from schedules.families import make, names
from schedules.validate import live, validate


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0B0",
        "0F0,0I0,0W0\n1F0,1B0",
        "0F0,0R0,0B0\n1F0,1R0,1I0,1W0",
        "0F1,0F0,0B0,0B1\n1F1,1B1,1F0,1B0",
        "0F0,1F0,2F0,2B0,1I0,0I0,1W0,0W0",
    ],
    ids=["one rank", "mixed backwards", "recompute", "microbatches out of order", "three stages on one rank"],
)
def test_valid(text):
    validate(from_csv(text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0B0,0F1", "rank 0, action 0I1 is missing; after 0F1 add I and W, or B for both"),
        ("0F0,0B0,0B1", "rank 0, action 0F1 is missing; every stage runs microbatches 0 to 1: add it"),
        ("0F0,0B0\n1F0,1I0", "rank 1, action 1W0 is missing; 1I0 is half a backward: add it, or write B"),
        ("0F0,0B0\n1F0,1W0", "rank 1, action 1I0 is missing; 1W0 is half a backward"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0", "rank 1, action 1F1 is missing"),
        ("0F0,0B0,0F2,0B2", "rank 0, action 0F1 is missing"),
        ("0F0,0B0,0W0", "rank 0, action 0W0 repeats a part of 0B0"),
        ("0F0,0B0,0I0", "rank 0, action 0I0 repeats a part of 0B0"),
        ("0F0,0F0,0B0", "rank 0, action 0F0 is there twice, as the rank's actions 1 and 2; remove one"),
        ("0F0,0R0,0R0,0B0", "rank 0, action 0R0 is there twice"),
        ("0B0,0F0", "rank 0, action 0B0 comes before 0F0, whose result it needs; move it after 0F0"),
        ("0F0,0W0,0I0", "rank 0, action 0W0 comes before 0I0"),
        ("1F0,0F0,1B0,0B0", "rank 0, action 1F0 comes before 0F0"),
        ("0F0,1F0,0B0,1B0", "rank 0, action 0B0 comes before 1B0"),
        ("0R0,0F0,0B0", "rank 0, action 0R0 comes before 0F0"),
        ("0F0,0I0,0R0,0W0", "rank 0, action 0R0 recomputes what 0I0 has used already; move it before 0I0"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "deadlock: rank 0, action 0B0 waits for 1B0"),
        ("0F0,0B0\n,\n1F0,1B0", "rank 1 runs no stage; give it one or remove the rank"),
    ],
)
def test_damaged(text, words):
    with pytest.raises(ScheduleError, match=words) as caught:
        validate(from_csv(text))
    assert "\n" not in str(caught.value)


def rows(*texts):
    return tuple(from_csv(text).actions[0] if text else () for text in texts)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Schedule("x", rows("0F0,0B0"), (1,)), "stage 0 is placed on rank 1; the ranks are 0 to 0"),
        (Schedule("x", rows("0F0,0B0"), ()), "rank 0 runs no stage"),
        (Schedule("x", ((Action(1, Kind.F, 0),),), (0,)), "rank 0, action 1F0: the stages are 0 to 0"),
        (Schedule("x", ((Action(1, Kind.F, 0),), ()), (0, 1)), "rank 0, action 1F0: stage 1 is on rank 1; move it"),
        (Schedule("x", ((Action(0, Kind.F, -1),),), (0,)), "microbatches count from 0"),
        (Schedule("x", ((),), (0,)), "no rank runs an action"),
        (Schedule("x", rows("0F0,1F0,1B0,0B0"), (0, 0), 3), "pipelines=3 does not divide the 2 stages"),
        (Schedule("x", rows("0F0,0B0,1F0,1B0"), (0, 0), 2), r"microbatch 0 runs in pipelines \[0, 1\]; keep it in one"),
        (Schedule("x", rows("0F0,1F0,2F1,1B0,0B0,2B1"), (0, 0, 0, 0), 2), "rank 0, action 3F1 is missing"),
    ],
)
def test_damaged_by_hand(schedule, words):
    with pytest.raises(ScheduleError, match=words):
        validate(schedule)


def test_microbatches_must_be_those_asked_for():
    validate(make("1f1b", ranks=2, microbatches=4), microbatches=4)
    with pytest.raises(ScheduleError, match="microbatches=6: the schedule 1f1b has 4; use microbatches=4"):
        validate(make("1f1b", ranks=2, microbatches=4), microbatches=6)


@pytest.mark.parametrize(
    ("hold", "words"),
    [
        ((Action(0, Kind.F, 1), 2), "action 0F1 is held back until tick 2, and no rank runs it"),
        ((Action(0, Kind.B, 0), 2), "action 0B0 is held back until tick 2; 2 actions take ticks 0 to 1"),
        ((Action(0, Kind.B, 0), -1), "tick -1"),
    ],
)
def test_holds(hold, words):
    schedule = from_csv("0F0,0B0")
    validate(dataclasses.replace(schedule, holds=((Action(0, Kind.B, 0), 1),)))
    with pytest.raises(ScheduleError, match=words):
        validate(dataclasses.replace(schedule, holds=(hold,)))


@pytest.mark.parametrize("name", names())
def test_one_action_lost_or_doubled_is_noticed(name):
    schedule = split_backward(make(name, ranks=3, microbatches=3))
    for rank, row in enumerate(schedule.actions):
        for at in range(len(row)):
            for changed in (row[:at] + row[at + 1 :], row[: at + 1] + row[at:]):
                actions = schedule.actions[:rank] + (changed,) + schedule.actions[rank + 1 :]
                with pytest.raises(ScheduleError):
                    validate(dataclasses.replace(schedule, actions=actions))


def runs(schedule):
    """Whether ranks that take turns, each going on as long as it can, get to the end."""
    done: set[str] = set()
    left = [[(a.stage, a.kind.value, a.microbatch) for a in row] for row in schedule.actions]
    moved = True
    while moved:
        moved = False
        for row in left:
            while row:
                stage, kind, m = row[0]
                before = {"F": [(stage - 1, "F")], "I": [(stage, "F"), (stage + 1, "I")], "W": [(stage, "I")]}[kind]
                own = range(stage - stage % schedule.depth, stage - stage % schedule.depth + schedule.depth)
                if not all(f"{s}{k}{m}" in done for s, k in before if s in own):
                    break
                done.add(f"{stage}{kind}{m}")
                row.pop(0)
                moved = True
    return not any(left)


@pytest.mark.parametrize("seed", range(40))
def test_swapped_actions_are_refused_exactly_when_they_cannot_run(seed):
    random_ = random.Random(seed)
    schedule = split_backward(make(random_.choice(names()), ranks=3, microbatches=4))
    shuffled = [list(row) for row in schedule.actions]
    for _ in range(random_.randint(1, 4)):
        row = random_.choice(shuffled)
        at = random_.randrange(len(row) - 1)
        row[at], row[at + 1] = row[at + 1], row[at]
    changed = dataclasses.replace(schedule, actions=tuple(map(tuple, shuffled)))
    try:
        validate(changed)
        valid = True
    except ScheduleError:
        valid = False
    assert valid == runs(changed)


def test_live_counts_from_forward_to_the_end_of_the_backward():
    assert live(from_csv("0F0,0F1,0I0,0W0,0F2,0I1,0I2,0W1,0W2\n1F0,1B0,1F1,1B1,1F2,1B2")) == (2, 1)
    assert live(from_csv("0F0,1F0,1I0,0I0,1W0,0W0")) == (2,)

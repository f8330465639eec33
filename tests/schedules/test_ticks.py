"""The ticks of the lock-step program against a longest path found by relaxation."""

from __future__ import annotations

import re

import pytest

from schedules.actions import Action, Kind, ScheduleError, from_csv, split_backward, to_csv
from schedules.families import make, names
from schedules.ticks import assign_ticks, needs, timeline


def relaxed(schedule):
    """Raises every tick until each action comes after what it waits for; works on the words, as in 0F3."""
    rows = [[str(action) for action in row] for row in schedule.actions]
    words = {word for row in rows for word in row}
    waits = []
    for row in rows:
        waits += list(zip(row[1:], row, strict=False))
        for word in row:
            stage, kind, m = re.findall(r"\d+|\w", word)
            before, after = int(stage) - 1, int(stage) + 1
            wanted = {
                "F": [f"{before}F{m}"],
                "R": [f"{stage}F{m}"],
                "I": [f"{stage}F{m}", f"{after}B{m}", f"{after}I{m}"],
                "B": [f"{stage}F{m}", f"{after}B{m}", f"{after}I{m}"],
                "W": [f"{stage}I{m}"],
            }[kind]
            waits += [(word, other) for other in wanted if other in words]
    ticks = dict.fromkeys(words, 0)
    while True:
        late = [(word, other) for word, other in waits if ticks[word] <= ticks[other]]
        if not late:
            return ticks
        for word, other in late:
            ticks[word] = max(ticks[word], ticks[other] + 1)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 1), (4, 3), (4, 8), (3, 7)])
@pytest.mark.parametrize("name", names())
def test_ticks_are_the_longest_path(name, ranks, microbatches, split):
    schedule = make(name, ranks=ranks, microbatches=microbatches)
    schedule = split_backward(schedule) if split else schedule
    assert {str(action): tick for action, tick in assign_ticks(schedule).items()} == relaxed(schedule)


def test_timeline_by_hand():
    rows = timeline(from_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1B0,1F1,1I1,1W1"))
    assert [" ".join(str(action) if action else "." for action in row) for row in rows] == [
        "0F0 0F1 . 0I0 0W0 0I1 0W1",
        ". 1F0 1B0 1F1 1I1 1W1 .",
    ]


def test_held_actions_by_hand():
    """`-` holds the next action back until the tick of its column; without it, 1F1 and 0I0 would run in tick 3."""
    text = "0F0,0F1,,-,0I0,0W0,0I1,0W1\n,1F0,1I0,-,1F1,1I1,1W0,1W1\n"
    schedule = from_csv(text)
    assert schedule.holds == ((Action(0, Kind.I, 0), 4), (Action(1, Kind.F, 1), 4))
    assert to_csv(schedule, timeline(schedule)) == text
    early = timeline(from_csv(text.replace("-", "")))
    assert (early[0][3], early[1][3]) == (Action(0, Kind.I, 0), Action(1, Kind.F, 1))


def test_a_deadlock_after_a_hold_is_found():
    with pytest.raises(ScheduleError, match="0I0 waits for 0F0"):
        assign_ticks(from_csv("-,-,-,0I0,0F0,0W0"))


def test_needs():
    schedule = from_csv("0F0,0R0,0I0,0W0\n1F0,1B0")
    assert needs(Action(0, Kind.F, 0), schedule) == ()
    assert needs(Action(1, Kind.F, 0), schedule) == (Action(0, Kind.F, 0),)
    assert needs(Action(0, Kind.R, 0), schedule) == (Action(0, Kind.F, 0),)
    assert needs(Action(0, Kind.I, 0), schedule) == (Action(0, Kind.F, 0), Action(1, Kind.B, 0))
    assert needs(Action(0, Kind.W, 0), schedule) == (Action(0, Kind.I, 0),)
    assert needs(Action(1, Kind.B, 0), schedule) == (Action(1, Kind.F, 0),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "deadlock: rank 0, action 0B0 waits for 1B0, which rank 1 has after 1F1"),
        ("0F0,0B0\n1B0", "rank 1, action 1B0 waits for 1F0, which no rank runs"),
    ],
)
def test_deadlock(text, words):
    with pytest.raises(ScheduleError, match=words):
        assign_ticks(from_csv(text))

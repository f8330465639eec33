"""The times of actions and transfers: text, JSON, and what is refused."""

from __future__ import annotations

import json

import pytest

from schedules.actions import Action, Kind, ScheduleError, split_backward
from schedules.costs import Costs, Link
from schedules.families import make


def test_text():
    costs = Costs.parse(" F=1, I = 1.3,W=0.7,")
    assert costs == Costs(F=1, I=1.3, W=0.7)
    assert costs.of(Action(0, Kind.B, 0)) == 2
    assert Costs.parse("B=2.5,R=.5,send=1e-3,transfer=2") == Costs(B=2.5, R=0.5, send=1e-3, transfer=2)
    assert Costs.parse("") == Costs()


def test_stages():
    costs = Costs(F=(1, 2), I=(3, 4), W=5)
    assert [costs.time(kind, stage) for stage in (0, 1) for kind in (Kind.F, Kind.I, Kind.W, Kind.B)] == [
        *(1, 3, 5, 8),
        *(2, 4, 5, 9),
    ]
    assert Costs(stages=(1, 3)).of(Action(1, Kind.B, 0)) == 6
    assert Costs(F=(1, 2), stages=(1, 3)).of(Action(1, Kind.F, 0)) == 6
    with pytest.raises(ScheduleError, match="F is given for 2 stages, none for stage 2; give all of them"):
        costs.of(Action(2, Kind.F, 0))


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "chimera"])
def test_a_rank_has_three_units_of_work_a_microbatch(name):
    schedule = split_backward(make(name, ranks=4, microbatches=8))
    costs = Costs.per_rank(schedule)
    times = [sum(costs.time(action.kind, action.stage % schedule.depth) for action in row) for row in schedule.actions]
    assert times == [3 * 8] * 4


def test_links():
    costs = Costs(send=1, transfer=2, links=(Link(0, 1, latency=3), Link(1, 0, transfer=4)))
    assert costs.link(0, 1) == Link(0, 1, 3, 0)
    assert costs.link(1, 0) == Link(1, 0, 0, 4)
    assert costs.link(1, 2) == Link(1, 2, 1, 2)
    assert [costs.link(*pair).delay for pair in ((0, 1), (1, 0), (2, 1))] == [3, 4, 3]


@pytest.mark.parametrize(
    "costs",
    [
        Costs(),
        Costs(F=2, I=3, W=0.5, B=4, R=1, send=0.25, transfer=0.125),
        Costs(F=(1, 2), I=(0.5, 1), B=(1, 1), stages=(1, 0)),
        Costs(links=(Link(0, 1, 1.5, 2), Link(1, 0))),
    ],
)
def test_json_reads_back(costs):
    assert Costs.from_json(costs.to_json()) == costs
    assert Costs.from_json(costs.to_json({"device": "cpu", "F": "whatever"})) == costs


def test_json_may_leave_things_out():
    assert Costs.from_json("{}") == Costs()
    assert Costs.from_json('{"F": [1, 2], "links": [{"sender": 0, "receiver": 1, "latency": 2}]}') == Costs(
        F=(1, 2), links=(Link(0, 1, latency=2),)
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("G=1", "'G' is no cost; use F, I, W, B, R, send, transfer, as in"),
        ("F=1,F=2", "'F' is named twice"),
        ("F", "'F' has no number"),
        ("F=fast", "'F=fast' has no number"),
        ("F=-1", "cost F=-1.0 is not a time"),
        ("F=nan", "cost F=nan is not a time"),
        ("F=inf", "cost F=inf is not a time"),
        ("F=1e31", "cost F=1e\\+31 is not a time; use a number from 0 to 1e\\+30"),
    ],
)
def test_text_refused(text, words):
    with pytest.raises(ScheduleError, match=words):
        Costs.parse(text)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ([], "holds no JSON object"),
        ({"G": 1}, "'G' is no cost; use .*transfer"),
        ({"F": "1"}, 'cost F="1" is not a time'),
        ({"F": True}, "cost F=true is not a time"),
        ({"F": None}, "cost F=null is not a time"),
        ({"F": -1}, "cost F=-1.0 is not a time"),
        ({"F": 10**400}, "cost F=inf is not a time"),
        ({"F": [1, "x"]}, r'cost F\[1\]="x" is not a time'),
        ({"F": [1, -2]}, r"cost F\[1\]=-2.0 is not a time"),
        ({"send": [1, 1]}, r"cost send=\[1, 1\] is not a time"),
        ({"F": [1, 1], "I": [1, 1, 1]}, "different numbers of stages: F for 2, I for 3; give all the same number"),
        ({"F": []}, "F is an empty list; give a time for each stage"),
        ({"stages": 2}, "stages=2 is no list; write one factor a stage"),
        ({"links": {}}, "links={} is no list; write one object a link"),
        ({"links": [1]}, "link 1 must be an object"),
        ({"links": [{"sender": 0}]}, "must be an object with sender, receiver"),
        ({"links": [{"sender": 0, "receiver": 1, "speed": 1}]}, "must be an object with sender, receiver"),
        ({"links": [{"sender": 0, "receiver": 0}]}, "from rank 0 to rank 0 joins no two ranks"),
        ({"links": [{"sender": -1, "receiver": 0}]}, "from rank -1 to rank 0 joins no two ranks"),
        ({"links": [{"sender": 0.5, "receiver": 0}]}, "sender is no rank; use a whole number from 0"),
        ({"links": [{"sender": 0, "receiver": 1, "latency": "x"}]}, 'cost latency="x" is not a time'),
        ({"links": [{"sender": 0, "receiver": 1, "latency": -1}]}, "latency of the link from rank 0 to rank 1=-1.0"),
        ({"links": [{"sender": 0, "receiver": 1}] * 2}, "from rank 0 to rank 1 is there twice; remove one"),
    ],
)
def test_json_refused(raw, words):
    with pytest.raises(ScheduleError, match=words) as caught:
        Costs.from_json(json.dumps(raw))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "F=1", "[" * 100_000, '{"F": 1e999}', '{"F": NaN}'])
def test_json_that_is_none(text):
    with pytest.raises(ScheduleError, match="is not JSON|is not a time"):
        Costs.from_json(text)

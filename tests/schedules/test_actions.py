"""Actions, the cut of the backward, and the CSV form."""

from __future__ import annotations

import pytest

from schedules.actions import Action, Kind, Schedule, ScheduleError, from_csv, split_backward, to_csv
from schedules.families import make, names
from schedules.ticks import timeline
from schedules.validate import validate

# Stage s and stage 2 P - 1 - s on one rank, written by hand. The first pairs forwards with backwards as
# DualPipeV does, the second cuts every backward as ZBV does.
DUAL_PIPE_V = """\
0F0,0F1,,3F0,(0F2;3B0)OVERLAP_F_B,3F1,3B1,0B0,3F2,3I2,3W2,0B1,,0B2
,1F0,2F0,1F1,2F1,(1F2;2B0)OVERLAP_F_B,1B0,2F2,2B1,1B1,,2B2,1I2,1W2
"""
ZBV = """\
0F0,0F1,,3F0,3I0,3F1,3I1,3W0,0I0,3W1,0I1,0W0,0W1
,1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,1W0,2W1,1W1
"""


def test_action_prints_as_pytorch_does():
    assert [str(Action(0, kind, 12)) for kind in Kind] == ["0F12", "0B12", "0I12", "0W12", "0R12"]


def test_split_backward_puts_w_right_after_i():
    split = split_backward(from_csv("0F0,0F1,0B0,0I1,0W1"))
    assert to_csv(split) == "0F0,0F1,0I0,0W0,0I1,0W1\n"
    assert split_backward(split) == split


def test_split_backward_holds_i_back_in_the_place_of_b():
    split = split_backward(from_csv("0F0,-,0B0,0F1,-,-,0I1,0W1"))
    assert split.holds == ((Action(0, Kind.I, 0), 2), (Action(0, Kind.I, 1), 6))


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("bubbles", [False, True])
def test_csv_round_trip(name, bubbles):
    schedule = make(name, ranks=3, microbatches=5)
    text = to_csv(schedule, timeline(schedule) if bubbles else None)
    assert from_csv(text, name=name) == schedule


def test_csv_round_trip_keeps_a_v_shape():
    schedule = from_csv(ZBV)
    assert from_csv(to_csv(schedule, timeline(schedule))) == schedule


@pytest.mark.parametrize("text", [DUAL_PIPE_V, ZBV], ids=["dual_pipe_v", "zbv"])
def test_v_shaped_files(text):
    schedule = from_csv(text)
    validate(schedule)
    assert schedule.placement == (0, 1, 1, 0)
    assert (schedule.ranks, schedule.stages, schedule.chunks) == (2, 4, 2)
    assert schedule.stages_of(0) == (0, 3)
    validate(split_backward(schedule))


# Microbatches 0 and 2 go down the ranks, microbatch 1 goes up through the same layers.
BIDIRECTIONAL = """\
0F0,,3F1,0F2,3I1,0I0,3W1,0W0,,0I2,0W2
2F1,1F0,1I0,1F2,1W0,,2I1,1I2,2W1,1W2
"""


def test_two_pipelines():
    schedule = from_csv(BIDIRECTIONAL)
    validate(schedule)
    assert (schedule.pipelines, schedule.depth, schedule.placement) == (2, 2, (0, 1, 1, 0))
    assert from_csv(to_csv(schedule, timeline(schedule))) == schedule


def test_pairs_run_in_the_order_in_which_they_are_written():
    schedule = from_csv(DUAL_PIPE_V)
    assert [str(action) for action in schedule.actions[0][2:5]] == ["3F0", "0F2", "3B0"]
    assert schedule.microbatches == 3


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0B0\r\n1F0,1B0\r\n",
        "\ufeff0F0,0B0\n1F0,1B0",
        "\n0F0,0B0,,,\n\n,1F0,1B0\n,,,\n\n",
        ' 0F0 ,"0B0"\n1 F 0,1B0',
    ],
    ids=["crlf", "byte order mark", "blank lines", "spaces and quotes"],
)
def test_csv_of_other_writers(text):
    assert from_csv(text) == from_csv("0F0,0B0\n1F0,1B0\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no action"),
        (",,\n,,\n", "holds no action"),
        ("0F0,0X0", r"rank 0, cell 2: '0X0' is not an action; write stage"),
        ("0F0,0B0\n1F0,1b0", r"rank 1, cell 2: '1b0' is not an action"),
        ("0F0,F0", "rank 0, cell 2: 'F0' is not an action"),
        ("0F0,0B", "rank 0, cell 2: '0B' is not an action"),
        ("0F-1", "'0F-1' is not an action"),
        ("0F0,0BW0", "'0BW0' is not an action"),
        ("0F0;0B0", "'0F0;0B0' is not an action"),
        ("(0F0;0B0)OVERLAP", "is not an action"),
        ("(0F0;0B?)OVERLAP_F_B", r"'0B\?' is not an action"),
        ("0F0,0SEND_F0", "communication; export the compute-only form"),
        ("0UNSHARD,0F0", "communication; export the compute-only form"),
        ("0F0,0B0\n0F1,0B1", "rank 1, action 0F1: stage 0 is on rank 0 already"),
        ("0F0,0B0\n2F0,2B0", "stage 1 is on no rank"),
        ("999999F0", "stage 0 is on no rank"),
        ('0F0,"0B0\n1F0,1B0\n', "rank 0, cell 2: .* is not an action"),
        ("0F0," + "9" * 5000 + "B0", r"9\.\.\.' is not an action"),
        ('"' + "x" * 200_000, "field larger than field limit"),
    ],
)
def test_damaged_csv(text, words):
    with pytest.raises(ScheduleError, match=words) as caught:
        from_csv(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_an_empty_row_between_others_is_an_idle_rank():
    assert from_csv("0F0,0B0\n,\n1F0,1B0").actions[1] == ()


def test_schedule_counts():
    schedule = make("interleaved_1f1b", ranks=2, microbatches=3, chunks=2)
    assert isinstance(schedule, Schedule)
    assert (schedule.ranks, schedule.stages, schedule.chunks, schedule.microbatches) == (2, 4, 2, 3)
    assert len(list(schedule)) == 4 * 3 * 2

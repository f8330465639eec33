"""Schedules as text, SVG and CSV."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from schedules.actions import Schedule, split_backward, to_csv
from schedules.costs import Costs
from schedules.families import describe, make, names
from schedules.perfetto import perfetto
from schedules.render import svg, svg_in_time, text
from schedules.simulate import simulate
from schedules.ticks import timeline

SVG = "{http://www.w3.org/2000/svg}"


def test_text_by_eye():
    assert text(make("1f1b", ranks=2, microbatches=3)).splitlines() == [
        "1f1b: 2 ranks, 3 microbatches, 8 ticks, 25.0% bubbles, a peak of 2 activations",
        "",
        "tick    0              5",
        "rank 0  F0 F1 .  B0 F2 B1 .  B2",
        "rank 1  .  F0 B0 F1 B1 F2 B2 .",
    ]


def test_text_names_the_stage_where_a_rank_has_several():
    lines = text(make("interleaved_1f1b", ranks=2, microbatches=1, chunks=2)).splitlines()
    assert lines[0].startswith("interleaved_1f1b: 2 ranks, 1 microbatch, 4 stages, 8 ticks")
    assert lines[3] == "rank 0  0F0 .   2F0 .   .   2B0 .   0B0"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", names())
def test_text_fits_and_loses_nothing(name, width):
    schedule = split_backward(make(name, ranks=8, microbatches=32))
    head, *lines = text(schedule, width=width).splitlines()
    assert max(map(len, lines)) <= width
    for rank, row in enumerate(timeline(schedule)):
        shown = [line.removeprefix(f"rank {rank} ") for line in lines if line.startswith(f"rank {rank} ")]
        cells = [(str(a) if schedule.chunks > 1 else str(a).removeprefix(str(a.stage))) if a else "." for a in row]
        assert " ".join(shown).split() == cells


def test_text_of_a_narrow_terminal_still_shows_a_tick_a_grid():
    assert text(make("gpipe", ranks=1, microbatches=2), width=1).count("rank 0") == 4


@pytest.mark.parametrize("name", names())
def test_svg_has_a_cell_an_action(name):
    schedule = split_backward(make(name, ranks=4, microbatches=5))
    root = ElementTree.fromstring(svg(schedule))
    titles = [str(element.text).split(":")[0] for element in root.iter(f"{SVG}title")]
    assert sorted(titles) == sorted(str(action) for action in schedule)
    for rect in root.iter(f"{SVG}rect"):
        assert 0 <= float(rect.attrib["x"]) <= float(root.attrib["width"]) - float(rect.attrib["width"])
        assert 0 <= float(rect.attrib["y"]) <= float(root.attrib["height"]) - float(rect.attrib["height"])


def test_svg_can_be_put_into_a_page_many_times():
    picture = svg(make("interleaved_1f1b", ranks=2, microbatches=2))
    assert not re.search(r"\bid=|\bclass=|<style|url\(|href", picture)


def test_svg_tells_chunks_apart():
    root = ElementTree.fromstring(svg(make("interleaved_1f1b", ranks=2, microbatches=2, chunks=3)))
    fills = {rect.attrib["fill"] for group in root.iter(f"{SVG}g") for rect in group.iter(f"{SVG}rect")}
    assert len(fills) == 2 * 3


@pytest.mark.parametrize(
    ("words", "read"), [('<b> & "quotes"', '<b> & "quotes"'), ("a\x00nul", "a?nul"), ("ünïcode ✓", "ünïcode ✓")]
)
def test_svg_escapes(words, read):
    schedule = make("1f1b", ranks=2, microbatches=1)
    for picture in (svg(schedule, title=words), svg(Schedule(words, schedule.actions, schedule.placement))):
        root = ElementTree.fromstring(picture)
        assert root.attrib["aria-label"].startswith(read)
        assert "".join(root.itertext()).strip().startswith(read)


def test_csv_with_bubbles():
    schedule = make("gpipe", ranks=2, microbatches=1)
    assert to_csv(schedule, timeline(schedule)) == "0F0,,,0B0\n,1F0,1B0,\n"


COSTS = {
    "lockstep": Costs(F=1, I=1.5, W=0.5, send=0.25),
    "asynchronous": Costs(F=1, I=1.5, W=0.5, send=0.5, transfer=0.25),
}


@pytest.mark.parametrize("timing", COSTS)
@pytest.mark.parametrize("name", ["zb_h1", "interleaved_1f1b", "chimera"])
def test_svg_in_time_is_to_scale(name, timing):
    schedule = split_backward(make(name, ranks=4, microbatches=6))
    found = simulate(schedule, COSTS[timing], timing)
    root = ElementTree.fromstring(svg_in_time(schedule, found))
    drawn = {}
    for group in root.iter(f"{SVG}g"):
        title, rect = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        drawn[title.text.split(":")[0]] = rect.attrib
    assert sorted(drawn) == sorted(str(action) for action in schedule)
    scale = 26  # a forward is the median
    for action in schedule:
        box = {name: float(drawn[str(action)][name]) for name in ("x", "y", "width")}
        assert box["x"] == pytest.approx(64 + scale * found.start[action], abs=0.06)
        assert box["width"] == pytest.approx(scale * (found.end[action] - found.start[action]) - 1, abs=0.06)
        assert box["y"] == 36 + 26 * schedule.placement[action.stage]
    assert len(list(root.iter(f"{SVG}path"))) == len(found.arrival)
    assert root.attrib["aria-label"].startswith(f"{name}: makespan {found.makespan:.6g}")


@pytest.mark.parametrize("costs", [Costs(F=0, I=0, W=0), Costs(F=1e-7, I=1e-6, W=0), Costs(F=1e6)])
def test_svg_in_time_of_odd_times(costs):
    schedule = make("zb_h1", ranks=2, microbatches=3)
    root = ElementTree.fromstring(svg_in_time(schedule, simulate(schedule, costs)))
    assert len(list(root.iter(f"{SVG}title"))) == 18
    assert float(root.attrib["width"]) < 21_000


@pytest.mark.parametrize("timing", COSTS)
@pytest.mark.parametrize(
    "name", [name for name in names() if describe(name).takes_costs or name in ("1f1b", "chimera")]
)
def test_perfetto(name, timing):
    schedule = make(name, ranks=3, microbatches=4)
    found = simulate(schedule, COSTS[timing], timing)
    trace = json.loads(perfetto(schedule, found, {"timing": timing}))
    assert trace["otherData"]["timing"] == timing and trace["otherData"]["schedule"] == schedule.name
    events = trace["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert sorted(event["name"] for event in slices) == sorted(map(str, schedule))
    for rank in range(schedule.ranks):
        row = sorted((event["ts"], event["dur"]) for event in slices if event["tid"] == rank)
        assert sum(dur for _, dur in row) == pytest.approx(1e3 * found.work[rank])
        assert all(ts + dur <= later + 1e-6 for (ts, dur), (later, _) in pairwise(row))
    names_of = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names_of == {rank: f"rank {rank}" for rank in range(schedule.ranks)}

    def slice_at(event):
        """The slice that an arrow is tied to: the one open at its time."""
        at = (one for one in slices if one["tid"] == event["tid"] and one["ts"] <= event["ts"] < one["ts"] + one["dur"])
        return next(at)["name"]

    begins, ends = ({event["id"]: slice_at(event) for event in events if event["ph"] == phase} for phase in "sf")
    assert len(begins) == len(found.arrival) and sorted(begins.values()) == sorted(map(str, found.arrival))
    kinds = {"F": 1, "I": -1, "B": -1}
    for name, sender in begins.items():
        stage, kind, m = re.fullmatch(r"(\d+)([FIB])(\d+)", sender).groups()
        assert ends[name] == f"{int(stage) + kinds[kind]}{kind}{m}"

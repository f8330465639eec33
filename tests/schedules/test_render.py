"""Schedules as text, SVG and CSV."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from schedules.actions import Schedule, split_backward, to_csv
from schedules.families import make, names
from schedules.render import svg, text
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

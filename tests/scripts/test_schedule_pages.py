"""The committed gallery is what its script writes, and the counts that the benchmark promises hold."""

from __future__ import annotations

import re

import pytest

from schedules.families import names
from scripts import bench_schedules, make_schedule_gallery


def test_the_gallery_is_up_to_date():
    files = make_schedule_gallery.files()
    stale = [path.name for path, text in files.items() if not path.exists() or path.read_text() != text]
    assert stale == [], "run python scripts/make_schedule_gallery.py"
    folder = make_schedule_gallery.ROOT / "docs/schedules"
    assert {path.stem for path in folder.iterdir()} == {*names(), *names(flush=False)}


def test_the_gallery_shows_what_is_known_of_1f1b():
    row = re.search(r"^\| \[`1f1b`\].*$", make_schedule_gallery.page(), re.MULTILINE)
    # 3 M + 2 P - 2 ticks, of which 3 M work; fused and free 3 (M + P - 1); P activations.
    assert row and row[0].split(" | ")[1:] == ["110", "110", f"{14 / 110:.1%}", "117", "8", "1 |"]


@pytest.mark.parametrize("benchmark", ["makespan", "memory", "links", "regions"])
def test_no_target_is_missed(benchmark):
    rows, _ = bench_schedules.BENCHMARKS[benchmark]
    assert [row for row in rows() if not row.met] == []

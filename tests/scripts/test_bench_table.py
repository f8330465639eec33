"""What a benchmark prints, when, and how it is judged."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from scripts.bench_table import Row, run

ROWS = [Row("bytes", 1.5, "MiB"), Row("  ratio [a, b]", 1.05, "x", 1.1, 0.9), Row("count", 3, "", at_most=2)]


def command(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    return run("About.", {"first": (lambda: iter(ROWS[:2]), "small"), "second": (lambda: iter(ROWS[2:]), "large")})


def test_rows(monkeypatch, capsys):
    assert command(monkeypatch, "all") == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["first:", "small"],
        ["bytes", "1.500", "MiB"],
        ["ratio", "[a,", "b]", "1.050", "x", ">=", "0.9", "<=", "1.1", "pass"],
        ["second:", "large"],
        ["count", "3", "<=", "2", "FAIL"],
    ]


def test_json(monkeypatch, capsys):
    assert command(monkeypatch, "first", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["first"]["size"] == "small" and [row["met"] for row in found["first"]["rows"]] == [True, True]


@pytest.mark.parametrize(("value", "met"), [(0.8, False), (0.9, True), (1.1, True), (1.2, False)])
def test_a_target_has_two_ends(value, met):
    assert Row("", value, "", 1.1, 0.9).met is met


def test_rows_are_printed_as_they_come(monkeypatch, capsys):
    """A benchmark can take minutes, and may be stopped."""

    def rows() -> Iterator[Row]:
        yield ROWS[0]
        assert "bytes" in capsys.readouterr().out
        yield ROWS[1]

    monkeypatch.setattr(sys, "argv", ["bench", "only"])
    assert run("About.", {"only": (rows, "small")}) == 0

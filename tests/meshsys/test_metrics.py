"""metrics.jsonl: each step once, whatever the file held before, and always JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from meshsys.metrics import MetricsWriter


def record(step: int) -> dict[str, float]:
    return {"step": step, "loss": 1 / 3 + step, "tokens": 128}


def write(folder: Path, start: int, stop: int) -> None:
    writer = MetricsWriter(folder, start)
    for step in range(start + 1, stop + 1):
        writer.write(record(step))
    writer.close()


def read(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_full_precision_and_one_line_a_step(tmp_path):
    write(tmp_path, 0, 5)
    assert read(tmp_path) == [record(step) for step in range(1, 6)]
    assert any((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize("resumed_after", [0, 1, 3, 5])
def test_steps_that_are_taken_again(tmp_path, resumed_after):
    write(tmp_path, 0, 5)
    write(tmp_path, resumed_after, 7)
    assert read(tmp_path) == [record(step) for step in range(1, 8)]


def test_a_line_is_in_the_file_at_once(tmp_path):
    """So that a process which is killed has recorded every step that it had taken."""
    writer = MetricsWriter(tmp_path, 0)
    writer.write(record(1))
    assert read(tmp_path) == [record(1)]
    writer.close()


@pytest.mark.parametrize(
    "remains", ['{"step": 4, "lo', '{"step": 3, "loss": 1}', "", "\n", "\0\0\0", "7\n", "{}\n", "[]\n"]
)
def test_a_last_line_that_was_cut_short(tmp_path, remains):
    write(tmp_path, 0, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(remains)
    write(tmp_path, 3, 5)
    assert read(tmp_path) == [record(step) for step in range(1, 6)]


def test_a_broken_line_costs_no_other(tmp_path):
    write(tmp_path, 0, 4)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\xff\xfe{\n" + b"".join(lines[2:]))
    write(tmp_path, 4, 5)
    assert [line["step"] for line in read(tmp_path)] == [1, 3, 4, 5]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(tmp_path, value):
    writer = MetricsWriter(tmp_path, 0)
    writer.write({"step": 1, "loss": value, "tokens": 3})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": null, "tokens": 3}\n'

"""Rows of a benchmark, and how they are printed, as they come, and judged."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

__all__ = ["Row", "run"]


@dataclass(frozen=True)
class Row:
    """One number; `at_most` and `at_least` are its target, None where it only explains another."""

    what: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def met(self) -> bool:
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )

    @property
    def target(self) -> str:
        """In words; empty where there is none."""
        bounds = {">=": self.at_least, "<=": self.at_most}
        return " ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)


def run(description: str, benchmarks: Mapping[str, tuple[Callable[[], Iterator[Row]], str]]) -> int:
    """Runs what the command line names; returns 1 if a target is missed.

    Args:
        benchmarks: by name, the rows and what they were measured with.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=[*benchmarks, "all"])
    parser.add_argument("--json", action="store_true", help="one JSON object, {benchmark: {size, rows}}")
    arguments = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    found: dict[str, dict[str, Any]] = {}
    for name in benchmarks if arguments.benchmark == "all" else [arguments.benchmark]:
        benchmark, size = benchmarks[name]
        rows = []
        if not arguments.json:
            console.print(Text(f"{name}: {size}", "italic"))
        for row in benchmark():
            rows.append(asdict(row) | {"met": row.met})
            if not arguments.json:
                console.print(_line(row))
        found[name] = {"size": size, "rows": rows}
    if arguments.json:
        print(json.dumps(found, indent=2))
    return 0 if all(row["met"] for one in found.values() for row in one["rows"]) else 1


def _line(row: Row) -> Text:
    digits = 0 if row.value == int(row.value) else 3
    line = Text(f"{row.what:{_WIDTH}}{row.value:12.{digits}f} {row.unit:6}".rstrip())
    if row.target:
        line.pad_right(max(0, _WIDTH + 19 - len(line)))
        line.append(f" {row.target:18}").append(*(("pass", "green") if row.met else ("FAIL", "red")))
    return line


_WIDTH = 64  # of what a number is; rows are printed before all of them are known

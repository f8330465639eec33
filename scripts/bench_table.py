"""Rows of a benchmark, and how they are printed and judged."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["Row", "run"]


@dataclass(frozen=True)
class Row:
    """One number; `at_most` is its target, None where it only explains another."""

    what: str
    value: float
    unit: str
    at_most: float | None = None

    @property
    def met(self) -> bool:
        return self.at_most is None or self.value <= self.at_most


def run(description: str, benchmarks: Mapping[str, tuple[Callable[[], Iterator[Row]], str]]) -> int:
    """Runs what the command line names; returns 1 if a target is missed.

    Args:
        benchmarks: by name, the rows and what they were measured with.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=[*benchmarks, "all"])
    parser.add_argument("--json", action="store_true", help="one JSON object, {benchmark: {size, rows}}")
    arguments = parser.parse_args()
    console = Console()
    found: dict[str, dict[str, Any]] = {}
    for name in benchmarks if arguments.benchmark == "all" else [arguments.benchmark]:
        benchmark, size = benchmarks[name]
        rows = list(benchmark())
        found[name] = {"size": size, "rows": [asdict(row) | {"met": row.met} for row in rows]}
        if not arguments.json:
            console.print(_table(f"{name}: {size}", rows))
    if arguments.json:
        print(json.dumps(found, indent=2))
    return 0 if all(row["met"] for one in found.values() for row in one["rows"]) else 1


def _table(title: str, rows: list[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("target", justify="right")
    table.add_column("")
    for row in rows:
        digits = 0 if row.value == int(row.value) else 3
        target = "" if row.at_most is None else f"<= {row.at_most:g}"
        verdict = "" if row.at_most is None else "[green]pass[/]" if row.met else "[red]FAIL[/]"
        table.add_row(row.what, f"{row.value:.{digits}f} {row.unit}".strip(), target, verdict)
    return table

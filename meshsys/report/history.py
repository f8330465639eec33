"""What a run recorded, step by step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["History", "read_history"]


@dataclass(frozen=True)
class History:
    """Records by step; a number that was not finite, or is not there, is NaN.

    Attributes:
        steps: rising.
        series: `series[name][i]` belongs to `steps[i]`.
    """

    steps: tuple[int, ...] = ()
    series: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def of(self, name: str) -> tuple[float, ...]:
        return self.series.get(name, (math.nan,) * len(self.steps))

    def last(self, name: str) -> float:
        """The last finite value, or NaN."""
        return next((value for value in reversed(self.of(name)) if math.isfinite(value)), math.nan)


def read_history(path: Path) -> History:
    """Reads metrics.jsonl; a line that is no record (one that is being written) is passed over, a later one of the
    same step counts."""
    if not path.is_file():
        return History()
    records: dict[int, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records[record["step"]] = {name: _number(value) for name, value in record.items()}
    steps = tuple(sorted(records))
    names = dict.fromkeys(name for step in steps for name in records[step])
    return History(steps, {name: tuple(records[step].get(name, math.nan) for step in steps) for name in names})


def _number(value: object) -> float:
    try:
        number = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # an integer beyond every float
        number = math.nan
    return number if math.isfinite(number) else math.nan

"""How far a job is, from the metrics.jsonl of its run."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshsys.cluster.store import JobSpec

__all__ = ["Advance", "advance"]

_TAIL = 4096  # bytes; a few lines


@dataclass(frozen=True)
class Advance:
    """What the last whole line of the metrics says.

    Attributes:
        step: 0 before the first.
        loss: None where it is not known, or not finite.
        step_seconds: that the step took; None where it is not known.
    """

    step: int = 0
    loss: float | None = None
    step_seconds: float | None = None

    def seconds_left(self, steps: int) -> float:
        """Until the job ends; infinity where that is not known."""
        if self.step_seconds is None or not steps:
            return math.inf
        return max(0, steps - self.step) * self.step_seconds


def advance(spec: JobSpec) -> Advance:
    """How far a job is now."""
    with suppress(OSError):
        with (Path(spec.run_dir) / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            lines = file.read().split(b"\n")
        for line in reversed(lines[:-1]):
            with suppress(ValueError, TypeError, KeyError):
                row = json.loads(line)
                return Advance(int(row["step"]), row.get("loss"), row.get("step_seconds"))
    return Advance()

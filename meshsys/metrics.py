"""What a run records of every step: metrics.jsonl and TensorBoard events."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from meshsys.files import keep_until

__all__ = ["MetricsWriter"]


class MetricsWriter:
    """Appends one JSON object a step to metrics.jsonl, and the same numbers to TensorBoard.

    Lines of steps after `step`, which the run is about to take again, are dropped, so the file has each step once.
    A number that is not finite is written as null.
    """

    def __init__(self, folder: Path, step: int):
        path = folder / "metrics.jsonl"
        keep_until(path, step)
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1, flush_secs=10)

    def write(self, record: dict[str, Any]) -> None:
        """Writes a record, which holds `step`; it is in the file when this returns."""
        finite = {name: value if math.isfinite(value) else None for name, value in record.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()
        for name, value in finite.items():
            if name != "step" and value is not None:
                self._board.add_scalar(f"train/{name}", value, record["step"])

    def close(self) -> None:
        self._file.close()
        self._board.close()

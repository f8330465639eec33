"""Responses that a run of `meshsys rl` kept."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Sample", "read_samples"]


@dataclass(frozen=True)
class Sample:
    """One response; `reward` is NaN where there is none, `answer` empty."""

    step: int
    prompt: str
    response: str
    answer: str
    reward: float
    tokens: int
    has_stopped: bool


def read_samples(path: Path, first: int, last: int) -> tuple[Sample, ...]:
    """Reads samples.jsonl: so many lines from its beginning and from its end, in their order.

    A line that is no sample (one that is being written) is passed over.
    """
    if not path.is_file():
        return ()
    # Not `splitlines`: a response may hold what that takes for the end of a line, as U+2028.
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    found = [sample for line in lines if (sample := _sample(line)) is not None]
    return tuple(found if len(found) <= first + last else [*found[:first], *found[-last:]])


def _sample(line: str) -> Sample | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not (isinstance(record, dict) and isinstance(record.get("step"), int)):
        return None
    reward, tokens = record.get("reward"), record.get("tokens")
    return Sample(
        step=record["step"],
        prompt=_text(record.get("prompt")),
        response=_text(record.get("response")),
        answer=_text(record.get("answer")),
        reward=float(reward) if isinstance(reward, (int, float)) and abs(reward) < math.inf else math.nan,
        tokens=tokens if isinstance(tokens, int) else 0,
        has_stopped=record.get("stopped") is True,
    )


def _text(value: object) -> str:
    return "" if value is None else str(value)

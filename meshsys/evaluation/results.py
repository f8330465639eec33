"""What an evaluation found, as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Metric", "Result", "mean", "table", "to_json"]


@dataclass(frozen=True)
class Metric:
    """A number, and its standard error where it is a mean over items."""

    value: float
    error: float | None = None


@dataclass(frozen=True)
class Result:
    """Of one task.

    Attributes:
        task: the file.
        kind: `text`, `chat` or `questions`.
        count: documents, conversations or questions.
        metrics: by name.
        samples: each question with its answers.
    """

    task: str
    kind: str
    count: int
    metrics: Mapping[str, Metric]
    samples: Sequence[Mapping[str, Any]] = field(default=(), repr=False)


def mean(values: Sequence[float]) -> Metric:
    """The mean with its standard error, of the sample's standard deviation; no error of one value."""
    count, middle = len(values), math.fsum(values) / len(values)
    if count < 2:
        return Metric(middle)
    variance = math.fsum((value - middle) ** 2 for value in values) / (count - 1)
    return Metric(middle, math.sqrt(variance / count))


def table(results: Sequence[Result]) -> str:
    """Task, number of items, metric and value, a line each."""
    rows = [("task", "items", "metric", "value")]
    for result in results:
        named = (result.task, f"{result.count:,}")
        for name, metric in result.metrics.items():
            error = "" if metric.error is None else f" ± {metric.error:.4f}"
            rows.append((*named, name, f"{metric.value:.4f}{error}"))
            named = ("", "")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def to_json(model: str, settings: Mapping[str, Any], results: Sequence[Result], *, samples: bool) -> str:
    """One object; with `samples`, the questions and their answers too."""
    shown = [asdict(result) for result in results]
    for result in shown:
        if not (samples and result["samples"]):
            del result["samples"]
    return json.dumps({"model": model, **settings, "results": shown}, ensure_ascii=False)

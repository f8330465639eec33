"""What a step of a run comes to, in whatever order it samples and learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from meshsys.rl.collect import Collected
from meshsys.state import Metrics, State

__all__ = ["Stepped"]


@dataclass(frozen=True, eq=False)
class Stepped:
    """A step that was taken.

    Attributes:
        state: after it.
        collected: what it learned from.
        learned: what its record says of the updates; `metrics` are the last one's.
        train_seconds: that updates took.
        record: what else its record says.
        position: where the run stands among the prompts after it, for a checkpoint: `prompt`, the next new one, and
            `again`, those whose responses no step has learned from yet.
    """

    state: State
    collected: Collected
    learned: dict[str, float]
    metrics: Metrics
    train_seconds: float
    position: dict[str, Any]
    record: dict[str, Any] = field(default_factory=dict)

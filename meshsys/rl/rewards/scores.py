"""What a pool found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

__all__ = ["Failure", "Scores"]


class Failure(NamedTuple):
    """A reward that could not be computed, and counts as 0.

    Attributes:
        sample: its number.
        kind: the function raised or gave no finite number (`error`); took too long (`timeout`); ended its process
            (`crash`).
        reward: the reward's name; None where all of the sample's are lost.
        message: one line.
    """

    sample: int
    kind: Literal["error", "timeout", "crash"]
    reward: str | None
    message: str


@dataclass(frozen=True)
class Scores:
    """The rewards of N samples, in their order.

    Attributes:
        total: float64 [N], the weighted sums.
        by_name: float64 [N] for each reward, before weighting.
        failures: by sample.
        seconds: from submission until the last one was there.
    """

    total: np.ndarray
    by_name: Mapping[str, np.ndarray]
    failures: tuple[Failure, ...]
    seconds: float

    @property
    def errors(self) -> int:
        """Rewards whose function raised, or gave no finite number."""
        return self._count("error")

    @property
    def timeouts(self) -> int:
        """Samples whose rewards took too long."""
        return self._count("timeout")

    @property
    def crashes(self) -> int:
        """Samples whose worker ended."""
        return self._count("crash")

    def _count(self, kind: str) -> int:
        return sum(failure.kind == kind for failure in self.failures)

"""What the V-shaped families share: the placement, and a rank's actions written as steps."""

from __future__ import annotations

from collections import Counter

from schedules.actions import Action, Kind

__all__ = ["VRow", "v_placement"]


def v_placement(ranks: int) -> tuple[int, ...]:
    """Rank r has stages r and `2 ranks - 1 - r`: the last stage is on the first rank."""
    return (*range(ranks), *reversed(range(ranks)))


class VRow:
    """The actions of one rank, added step by step.

    A step is a kind and a chunk, 0 on the way down and 1 on the way up: `F0` is the chunk's next forward, `B0` its next
    backward, whole, `I0` the same without its weight gradient, and `W0` the chunk's next weight gradient. `W` is the
    weight gradient that has waited longest, of either chunk.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.actions: list[Action] = []
        self._stages = rank, 2 * ranks - 1 - rank
        self._next: Counter[str] = Counter()
        self._waiting: list[Action] = []

    def add(self, steps: str, times: int) -> None:
        """Adds steps, separated by spaces, so many times over."""
        for _ in range(times):
            for step in steps.split():
                self.actions.append(self._weight(step[1:]) if step[0] == "W" else self._take(Kind(step[0]), step[1]))

    def _take(self, kind: Kind, chunk: str) -> Action:
        direction = "forward" if kind is Kind.F else "backward"
        m = self._next[direction + chunk]
        self._next[direction + chunk] += 1
        stage = self._stages[int(chunk)]
        if kind is Kind.I:
            self._waiting.append(Action(stage, Kind.W, m))
        return Action(stage, kind, m)

    def _weight(self, chunk: str) -> Action:
        at = next(k for k, one in enumerate(self._waiting) if not chunk or one.stage == self._stages[int(chunk)])
        return self._waiting.pop(at)

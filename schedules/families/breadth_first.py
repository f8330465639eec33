"""Looped breadth-first pipeline: GPipe over several chunks a rank (Lamy-Poirier 2022, arXiv:2211.05953)."""

from __future__ import annotations

from schedules.actions import Action, Kind, Schedule

__all__ = ["looped_bfs"]


def looped_bfs(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """All microbatches through one chunk, then through the next; backwards from the last chunk to the first.

    Stage s is on rank `s % ranks`. The fill and the drain are as short as with `interleaved_1f1b`, and a stage's
    weights are needed in one stretch a direction, so that one gather of them serves all microbatches. The price
    is GPipe's: every activation is held at the turn. The backwards run in the order of the forwards, as in `gpipe`.
    """
    rows = tuple(
        tuple(
            Action(chunk * ranks + rank, kind, m)
            for kind, order in ((Kind.F, range(chunks)), (Kind.B, reversed(range(chunks))))
            for chunk in order
            for m in range(microbatches)
        )
        for rank in range(ranks)
    )
    return Schedule("looped_bfs", rows, tuple(stage % ranks for stage in range(ranks * chunks)))

"""1F1B, also PipeDream-Flush (Narayanan et al. 2021, arXiv:2006.09503)."""

from __future__ import annotations

from schedules.actions import Action, Kind, Schedule

__all__ = ["one_f_one_b"]


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Rank r runs `ranks - 1 - r` forwards ahead, then one forward and one backward in turn.

    Rank r holds at most `min(ranks - r, microbatches)` activations.
    """
    rows = []
    for rank in range(ranks):
        ahead = ranks - 1 - rank
        row = [Action(rank, Kind.F, m) for m in range(min(ahead, microbatches))]
        for m in range(microbatches):
            if m + ahead < microbatches:
                row.append(Action(rank, Kind.F, m + ahead))
            row.append(Action(rank, Kind.B, m))
        rows.append(tuple(row))
    return Schedule("1f1b", tuple(rows), tuple(range(ranks)))

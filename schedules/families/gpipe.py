"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""

from __future__ import annotations

from schedules.actions import Action, Kind, Schedule

__all__ = ["gpipe"]


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Every rank runs its `microbatches` forwards and then its backwards, and holds all activations at the turn.

    The backwards run in the order of the forwards and not, as the paper draws them, reversed. Both orders
    take the same ticks and hold the same activations; this one adds up the weight gradients in the
    order of every other family and of plain gradient accumulation, so that sums compare bit for bit.
    """
    rows = tuple(
        tuple(Action(rank, kind, m) for kind in (Kind.F, Kind.B) for m in range(microbatches)) for rank in range(ranks)
    )
    return Schedule("gpipe", rows, tuple(range(ranks)))

"""Zero bubble schedules: weight gradients fill what would be bubbles (Qi et al. 2023, arXiv:2401.10241)."""

from __future__ import annotations

from schedules.actions import Action, Kind, Schedule

__all__ = ["zb_h1"]


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1: the order of 1F1B with the weight gradients of rank r put off by r microbatches.

    The last rank, with the fewest activations of its own, answers with input gradients at once and
    catches up on weight gradients later, so that rank 0 never waits after its first backward. A rank holds at
    most `min(ranks, microbatches)` activations from F to W: as many as rank 0 of 1F1B, which is what the
    buffers of one SPMD program are sized for on all ranks. At most `rank + 1` microbatches are between I and W.

    With F, I and W of one unit this takes `max(3 M + P - 1, 2 M + 2 P - 1)` ticks, the least
    that this many activations allow.
    """
    rows = []
    for rank in range(ranks):
        ahead = min(ranks - rank, microbatches)
        row = [Action(rank, Kind.F, m) for m in range(ahead)]
        for m in range(microbatches):
            row.append(Action(rank, Kind.I, m))
            if m >= rank:
                row.append(Action(rank, Kind.W, m - rank))
            if m + ahead < microbatches:
                row.append(Action(rank, Kind.F, m + ahead))
        row += [Action(rank, Kind.W, m) for m in range(max(microbatches - rank, 0), microbatches)]
        rows.append(tuple(row))
    return Schedule("zb_h1", tuple(rows), tuple(range(ranks)))

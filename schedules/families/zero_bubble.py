"""Zero bubble schedules: weight gradients fill what would be bubbles (Qi et al. 2023, arXiv:2401.10241)."""

from __future__ import annotations

from schedules.actions import Action, Kind, Schedule

__all__ = ["zb_h1", "zb_h2"]


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1: the order of 1F1B with the weight gradients of rank r put off by r microbatches.

    The last rank, with the fewest activations of its own, answers with input gradients at once and
    catches up on weight gradients later, so that rank 0 never waits after its first backward. A rank holds at
    most `min(ranks, microbatches)` activations from F to W: as many as rank 0 of 1F1B, which is what the
    buffers of one SPMD program are sized for on all ranks. At most `rank + 1` microbatches are between I and W.

    With F, I and W of one unit this takes `max(3 M + P - 1, 2 M + 2 P - 1)` ticks, the least
    that this many activations allow.
    """
    return _put_off("zb_h1", [ranks - rank for rank in range(ranks)], microbatches)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """ZB-H2: forwards also fill the time until the first gradient comes, for twice the activations.

    Rank r runs `2 (ranks - r) - 1` forwards before its first input gradient and puts its weight gradients off by r
    microbatches. It holds at most `2 ranks - 1` activations. With `M >= 2 P - 1` and F, I and W of one unit this takes
    `3 M + P - 1` ticks, and the last rank, which begins last, never waits.
    """
    return _put_off("zb_h2", [2 * (ranks - rank) - 1 for rank in range(ranks)], microbatches)


def _put_off(name: str, ahead: list[int], microbatches: int) -> Schedule:
    """Rank r runs `ahead[r]` forwards, then I, W of r microbatches before, and F in turn."""
    rows = []
    for rank, count in enumerate(ahead):
        row = [Action(rank, Kind.F, m) for m in range(min(count, microbatches))]
        for m in range(microbatches):
            row.append(Action(rank, Kind.I, m))
            if m >= rank:
                row.append(Action(rank, Kind.W, m - rank))
            if m + count < microbatches:
                row.append(Action(rank, Kind.F, m + count))
        row += [Action(rank, Kind.W, m) for m in range(max(microbatches - rank, 0), microbatches)]
        rows.append(tuple(row))
    return Schedule(name, tuple(rows), tuple(range(len(ahead))))

"""ZB-V: zero bubble on a V of stages (Qi et al. 2024, arXiv:2405.15362)."""

from __future__ import annotations

from schedules.actions import Action, Schedule
from schedules.families.v_row import VRow, v_placement

__all__ = ["zbv"]


def zbv(ranks: int, microbatches: int) -> Schedule:
    """No rank waits between its first action and its last, with the activations of 1F1B.

    A rank holds at most `2 ranks` chunks, each half as large as a stage of `1f1b`. With F, I and W of one unit for a
    chunk this takes `6 M + P - 1` ticks, the least that there is: the last rank cannot begin before `P - 1`.

    The order is made for `2 ranks - 1` microbatches or more; with fewer, those that are missing are left out.
    """
    rows = [_row(rank, ranks, max(microbatches, 2 * ranks - 1)) for rank in range(ranks)]
    kept = (tuple(action for action in row if action.microbatch < microbatches) for row in rows)
    return Schedule("zbv", tuple(kept), v_placement(ranks))


def _row(rank: int, ranks: int, microbatches: int) -> list[Action]:
    below = ranks - 1 - rank
    row = VRow(rank, ranks)
    row.add("F0", 2 * below + 1)
    row.add("F1 F0", rank)
    row.add("F1 I1 W1", below + 1)
    row.add("F0 I0 W0 F1 I1 W1", microbatches - ranks - below)
    row.add("I0 W0 F1 I1 W1", below)
    row.add("I0 I1", rank)
    row.add("I0 W0", below + 1)
    row.add("W1", rank)
    row.add("W0", rank)
    return row.actions

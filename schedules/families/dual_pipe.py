"""DualPipe-V: forwards paired with backwards on a V of stages (DeepSeek-AI 2024, arXiv:2412.19437)."""

from __future__ import annotations

from schedules.actions import Action, Schedule
from schedules.families.v_row import VRow, v_placement

__all__ = ["dualpipe_v"]


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe cut in half: a V in place of two pipelines, so that weights are held once.

    In its steady state a forward of one chunk is paired with a full backward of the other, so that a GPU hides the
    communication of each behind the other; here they run one after another. Near the ends, backwards are cut in
    I and W. A rank holds at most `2 ranks + 1` chunks, each half as large as a stage of `1f1b`.

    The order is made for `2 ranks` microbatches or more; with fewer, those that are missing are left out.
    """
    rows = [_row(rank, ranks, max(microbatches, 2 * ranks)) for rank in range(ranks)]
    kept = (tuple(action for action in row if action.microbatch < microbatches) for row in rows)
    return Schedule("dualpipe_v", tuple(kept), v_placement(ranks))


def _row(rank: int, ranks: int, microbatches: int) -> list[Action]:
    below, above = ranks - 1 - rank, rank + 1
    row = VRow(rank, ranks)
    row.add("F0", 2 * below)
    row.add("F0 F1", above)
    row.add("I1 W F1", below)
    row.add("F0 B1 F1 B0", microbatches - 2 * ranks + above)
    row.add("B1 F1 B0", below)
    last = ["B1", "B0"] * above
    cut = [step.replace("B", "I") for step in last[above:]]
    row.add(" ".join(last[:above] + cut), 1)
    row.add("W I0", below)
    row.add("W", above)
    return row.actions

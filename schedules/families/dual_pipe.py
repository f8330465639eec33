"""DualPipe-V: forwards and backwards in pairs on a V of stages (DeepSeek-AI 2025, github.com/deepseek-ai/DualPipe)."""

from __future__ import annotations

from collections import deque

from schedules.actions import Action, Kind, Schedule
from schedules.families.v_shape import v_placement

__all__ = ["dualpipe_v"]


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """The order of DualPipe-V, DualPipe cut in half: a V in place of two pipelines, so weights are held once.

    Rank r has stages r and `2 ranks - 1 - r`. Its steady state is a forward of the one paired with a full backward
    of the other, in which a GPU hides the communication of each behind the other; here they run one after
    another. Near the ends the backwards are cut in I and W. A rank holds at most `2 ranks + 1` chunks.

    The order is made for `2 ranks` microbatches or more; with fewer, those that are missing are left out.
    """
    rows = [_row(rank, ranks, max(microbatches, 2 * ranks), microbatches) for rank in range(ranks)]
    return Schedule("dualpipe_v", tuple(rows), v_placement(ranks))


def _row(rank: int, ranks: int, full: int, microbatches: int) -> tuple[Action, ...]:
    stages = rank, 2 * ranks - 1 - rank
    following = {(kind, chunk): 0 for kind in (Kind.F, Kind.B) for chunk in (0, 1)}
    pending: deque[tuple[int, int]] = deque()
    row: list[Action] = []

    def take(kind: Kind, chunk: int) -> int:
        following[kind, chunk] += 1
        return following[kind, chunk] - 1

    def forward(chunk: int) -> None:
        row.append(Action(stages[chunk], Kind.F, take(Kind.F, chunk)))

    def backward(chunk: int, *, whole: bool = True) -> None:
        m = take(Kind.B, chunk)
        row.append(Action(stages[chunk], Kind.B if whole else Kind.I, m))
        if not whole:
            pending.append((stages[chunk], m))

    def weight() -> None:
        stage, m = pending.popleft()
        row.append(Action(stage, Kind.W, m))

    before, after = ranks - 1 - rank, rank + 1
    for _ in range(2 * before):
        forward(0)
    for _ in range(after):
        forward(0)
        forward(1)
    for _ in range(before):
        backward(1, whole=False)
        weight()
        forward(1)
    for _ in range(full - 2 * ranks + after):
        forward(0)
        backward(1)
        forward(1)
        backward(0)
    for _ in range(before):
        backward(1)
        forward(1)
        backward(0)
    for k in range(2 * after):
        backward(1 - k % 2, whole=k < after)
    for _ in range(before):
        weight()
        backward(0, whole=False)
    while pending:
        weight()
    return tuple(action for action in row if action.microbatch < microbatches)

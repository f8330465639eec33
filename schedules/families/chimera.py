"""Chimera: two pipelines in opposite directions (Li and Hoefler 2021, arXiv:2107.06925)."""

from __future__ import annotations

from schedules.actions import Action, Kind, Schedule

__all__ = ["chimera"]


def chimera(ranks: int, microbatches: int) -> Schedule:
    """Even microbatches go down the ranks, odd ones go up, so both ends begin at once and each fills the other's gaps.

    Each pipeline keeps to the activations of 1F1B, the two together to `ranks` on every rank. For an even number of
    ranks and whole rounds of `ranks` microbatches, 1F1B's fill and drain of `2 P - 2` ticks become `P - 2`. The
    price: each rank holds the weights of two stages.

    The two orders are merged by playing them in ticks: a rank that is free runs the oldest backward that it can, else
    the oldest forward. A backward takes two ticks, and its gradient leaves after the first of them.
    """
    play = _Play(ranks, microbatches)
    while play.left:
        play.tick()
    placement = (*range(ranks), *reversed(range(ranks)))
    return Schedule("chimera", tuple(map(tuple, play.rows)), placement, pipelines=2)


class _Play:
    """What has begun, and what can be seen of it by others, as counts for each stage of both pipelines."""

    def __init__(self, ranks: int, microbatches: int) -> None:
        stages = 2 * ranks
        self.ranks, self.left = ranks, 2 * ranks * microbatches
        self.due = [len(range(0, microbatches, 2))] * ranks + [len(range(1, microbatches, 2))] * ranks
        self.begun = {kind: [0] * stages for kind in (Kind.F, Kind.B)}
        self.ended = {kind: [0] * stages for kind in (Kind.F, Kind.B)}
        self.busy = [False] * ranks
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]

    def tick(self) -> None:
        ran = []
        for rank, row in enumerate(self.rows):
            able = [] if self.busy[rank] else self._able(rank)
            self.busy[rank] = False
            if able:
                action = min(able, key=lambda action: (action.kind is Kind.F, action.microbatch))
                row.append(action)
                self.begun[action.kind][action.stage] += 1
                self.busy[rank] = action.kind is Kind.B
                ran.append(action)
        for action in ran:
            self.ended[action.kind][action.stage] += 1
        self.left -= len(ran)

    def _able(self, rank: int) -> list[Action]:
        """What the rank can run now."""
        stages = rank, 2 * self.ranks - 1 - rank
        held = {stage: self.begun[Kind.F][stage] - self.begun[Kind.B][stage] for stage in stages}
        able = []
        for pipeline, stage in enumerate(stages):
            first, last = pipeline * self.ranks, (pipeline + 1) * self.ranks - 1
            k = self.begun[Kind.F][stage]
            came = self.due[stage] if stage == first else self.ended[Kind.F][stage - 1]
            if k < came and held[stage] <= last - stage and sum(held.values()) < self.ranks:
                able.append(Action(stage, Kind.F, 2 * k + pipeline))
            k = self.begun[Kind.B][stage]
            came = self.ended[Kind.F][stage] if stage == last else self.ended[Kind.B][stage + 1]
            if k < came:
                able.append(Action(stage, Kind.B, 2 * k + pipeline))
        return able

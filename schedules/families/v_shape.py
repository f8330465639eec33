"""V-shaped schedules: two chunks a rank, stages down the ranks and back up (Qi et al. 2024, arXiv:2405.15362).

They are built by a list scheduler that walks the ticks of the lock-step program: a rank takes, of the actions
that can run within its memory, the one that is due first. The actions of microbatch m are due `6 m` ticks after
those of microbatch 0, since a rank works six ticks on each.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from schedules.actions import Action, Kind, Schedule

__all__ = ["v_placement", "zbv"]


def v_placement(ranks: int) -> tuple[int, ...]:
    """Rank r has stages r and `2 ranks - 1 - r`: the last stage is on the first rank."""
    return (*range(ranks), *reversed(range(ranks)))


def zbv(ranks: int, microbatches: int) -> Schedule:
    """ZB-V: hardly a bubble between a rank's first action and its last, with the activations of 1F1B.

    A rank holds at most `2 ranks` chunks, each half as large as a stage of `1f1b`. Weight gradients run when
    nothing else can.
    """
    stages = 2 * ranks

    def due(kind: Kind, stage: int) -> float:
        """As early as a microbatch alone would be there; the weight gradient after everything else."""
        return {Kind.F: stage, Kind.I: 2 * stages - 1 - stage, Kind.W: inf}[kind]

    return _pack("zbv", ranks, microbatches, 2 * ranks, due)


def _pack(name: str, ranks: int, microbatches: int, most: int, due: Callable[[Kind, int], float]) -> Schedule:
    """Every rank takes the action that is due first; it holds at most `most` (stage, microbatch) pairs from F to W.

    At most `most - 1` of them are on the way down, so that the oldest microbatch can always go on.

    Args:
        most: 2 or more.
        due: `due(kind, stage)` for microbatch 0, in ticks.
    """
    stages, kinds = 2 * ranks, (Kind.F, Kind.I, Kind.W)
    # Microbatches go in order, so what has run is a count for each kind and stage; the last entry is ahead of all.
    done = [0] * (3 * stages) + [microbatches]
    forward, backward, nothing = 0, stages, 3 * stages

    def stream(kind: Kind, stage: int) -> tuple:
        """An index into `done`, the two indices that must be ahead of it, and when it is due."""
        needs = {
            Kind.F: (forward + stage - 1 if stage else nothing, nothing),
            Kind.I: (forward + stage, backward + stage + 1 if stage + 1 < stages else nothing),
            Kind.W: (backward + stage, nothing),
        }[kind]
        return kinds.index(kind) * stages + stage, *needs, due(kind, stage), kind, stage

    streams = [
        [stream(kind, stage) for stage in (rank, stages - 1 - rank) for kind in kinds] for rank in range(ranks)
    ]
    held = [0] * stages
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    left = 3 * stages * microbatches
    while left:
        ran = []
        for rank, row in enumerate(rows):
            down, up = held[rank], held[stages - 1 - rank]
            full = down + up >= most, down + up >= most or down >= most - 1
            soonest, chosen = inf, None
            for candidate in streams[rank]:
                index, first, second, offset, kind, stage = candidate
                m = done[index]
                if m < done[first] and m < done[second] and not (kind is Kind.F and full[stage < ranks]):
                    when = 6 * m + offset
                    if chosen is None or when < soonest:
                        soonest, chosen = when, candidate
            if chosen:
                index, _, _, _, kind, stage = chosen
                row.append(Action(stage, kind, done[index]))
                held[stage] += (kind is Kind.F) - (kind is Kind.W)
                ran.append(index)
        for index in ran:
            done[index] += 1
        left -= len(ran)
    return Schedule(name, tuple(map(tuple, rows)), v_placement(ranks))

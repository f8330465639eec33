"""V-shaped schedules with a memory to keep to (Qi et al. 2024, arXiv:2405.15362).

Both are built by a list scheduler that walks the ticks of the lock-step program: a rank runs, of the actions that can
run within its memory, the one that is due first. How far apart in time the ranks are due decides how well microbatches
fit between one another once the pipeline is full. Which of a few such paces is best depends on the number of ranks; all
are tried, on a shorter batch where the batch is long.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from schedules.actions import Action, Kind, Schedule
from schedules.families.v_row import v_placement

__all__ = ["v_half", "v_min"]


def v_half(ranks: int, microbatches: int) -> Schedule:
    """V-Half: half of the activations of 1F1B, for a longer fill and drain.

    A rank holds at most `ranks` chunks, or one more for an odd number of ranks, each half as large as a stage of
    `1f1b`; with two ranks three, as they would take turns with two. At most two chunks are between I and W, as much as
    the one stage of `1f1b`.
    """
    return _best("v_half", ranks, microbatches, max(ranks + ranks % 2, 3))


def v_min(ranks: int, microbatches: int) -> Schedule:
    """V-Min: a third of the activations of 1F1B, and a little.

    A rank holds at most `2 floor(ranks / 3) + 2` chunks, three if that is two, each half as large as a stage of
    `1f1b`; at most two are between I and W. A microbatch is on its way for `4 ranks` ticks, and the ranks take a new
    one every six, so that with less they could not be kept busy. With 5, 8, 11, ... ranks the microbatches do not quite
    fit, and it takes longer than with others.
    """
    return _best("v_min", ranks, microbatches, max(2 * (ranks // 3) + 2, 3))


@dataclass(frozen=True)
class _Pace:
    """When the actions of microbatch 0 are due, in ticks; those of m are due `6 m` later, as each is six ticks of work.

    Attributes:
        steps: from one rank's forward to the next one's on the way down, and on the way up; then the same of input
            gradients, on the way back down the ranks and back up.
        turns: the same between two stages of one rank: the last rank's forwards, the first one's forward and
            input gradient, the last one's input gradients.
        weights: from an input gradient to its weight gradient, on stages of the way down and of the way up.
        ahead: by how many ticks a forward on the way down may run before it is due.
    """

    steps: tuple[float, float, float, float]
    turns: tuple[int, int, int]
    weights: tuple[float, float]
    ahead: float

    def due(self, ranks: int) -> dict[tuple[Kind, int], float]:
        """By kind and stage."""
        down, up, back_down, back_up = self.steps
        bottom, top, back_bottom = self.turns
        last = ranks - 1
        at_bottom = last * down + bottom
        at_top = at_bottom + last * up + top
        back_at_bottom = at_top + last * back_down + back_bottom
        found: dict[tuple[Kind, int], float] = {}
        for rank in range(ranks):
            early, late = rank, 2 * ranks - 1 - rank
            found[Kind.F, early] = rank * down
            found[Kind.F, late] = at_bottom + (last - rank) * up
            found[Kind.I, late] = at_top + rank * back_down
            found[Kind.I, early] = back_at_bottom + (last - rank) * back_up
            for stage, wait in zip((early, late), self.weights, strict=True):
                found[Kind.W, stage] = found[Kind.I, stage] + wait
        return found


_PACES = (
    _Pace((1, 1, 1, 1), (1, 1, 1), (inf, inf), 3),
    _Pace((1, 1, 2, 1.5), (2, 1, 2), (4.5, 2.5), 12),
    _Pace((1, 1, 2, 1.5), (2, 1, 2), (4.5, inf), 12),
    _Pace((1, 1, 2, 1), (1, 2, 3), (6.5, inf), 6),
    _Pace((1, 1, 0.5, 0.5), (2, 1, 1), (inf, inf), 12),
    _Pace((1, 0.5, 1, 1), (1, 1, 1), (4.5, inf), 4),
    _Pace((1, 0.5, 1, 1), (1, 3, 1), (2.5, inf), 4),
)
_MOST_STASHED = 2  # between I and W, in chunks: as much as the one stage of 1f1b


def _best(name: str, ranks: int, microbatches: int, most: int) -> Schedule:
    shorter = min(microbatches, max(2 * ranks, 24))
    pace = min(_PACES, key=lambda pace: _play(pace, ranks, shorter, most)[1])
    rows, _ = _play(pace, ranks, microbatches, most)
    return Schedule(name, tuple(map(tuple, rows)), v_placement(ranks))


def _play(pace: _Pace, ranks: int, microbatches: int, most: int) -> tuple[list[list[Action]], int]:
    """The ranks' actions, and the number of ticks.

    At most `most - 1` of what a rank holds is on the way down, so that the oldest microbatch can always go on.
    """
    stages, kinds = 2 * ranks, (Kind.F, Kind.I, Kind.W)
    nothing = stages * len(kinds)
    # Microbatches go in order, so what has run is a count for each kind and stage; the last entry is ahead of all.
    done = [0] * nothing + [microbatches]
    index = {(kind, stage): k * stages + stage for k, kind in enumerate(kinds) for stage in range(stages)}
    due = pace.due(ranks)

    def choice(kind: Kind, stage: int) -> tuple:
        """Where its count is, the two counts that must be ahead of it, when it is due, its place in `full`, itself."""
        if kind is Kind.F:
            needs, place = (index.get((kind, stage - 1), nothing), nothing), 0 if stage < ranks else 1
        elif kind is Kind.I:
            needs, place = (index[Kind.F, stage], index.get((kind, stage + 1), nothing)), 2
        else:
            needs, place = (index[Kind.I, stage], nothing), 3
        return index[kind, stage], *needs, due[kind, stage], place, kind, stage

    choices = [[choice(kind, stage) for stage in (r, stages - 1 - r) for kind in kinds] for r in range(ranks)]
    held = [0] * stages
    stashed = [0] * ranks
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    left, tick = 3 * stages * microbatches, 0
    while left:
        ran = []
        for rank, row in enumerate(rows):
            down, both = held[rank], held[rank] + held[stages - 1 - rank]
            full = down >= most - 1 or both >= most, both >= most, stashed[rank] >= _MOST_STASHED, False
            soonest, chosen = inf, None
            for one in choices[rank]:
                count, first, second, offset, place, _, _ = one
                m = done[count]
                if m < done[first] and m < done[second] and not full[place]:
                    when = 6 * m + offset
                    early = place == 0 and tick < when - pace.ahead
                    if not early and (chosen is None or when < soonest):
                        soonest, chosen = when, one
            if chosen:
                count, _, _, _, _, kind, stage = chosen
                row.append(Action(stage, kind, done[count]))
                held[stage] += (kind is Kind.F) - (kind is Kind.W)
                stashed[rank] += (kind is Kind.I) - (kind is Kind.W)
                ran.append(count)
        for count in ran:
            done[count] += 1
        left -= len(ran)
        tick += 1
    return rows, tick

"""Times that no schedule can beat.

Two arguments, and the larger result of the two counts.

**Chains and work.** For each rank: its work, what must pass before its first action (microbatch 0 has to come down
from stage 0) and what must follow its last one (the input gradient has to go up to stage 0). With a cap, a rank
can run only so much before its first input gradient, which comes after a whole round trip: the rest of that wait is
lost. And it must have done all but so many weight gradients before its last forward, so before its last input gradient.

**Layers**, in lock step. The makespan is a sum over ticks of their lengths, which is the integral over x of the
number of ticks longer than x. Ticks that long are needed for the actions that long, whatever the others do. So count
each such action as 1 and every other as 0, and apply the first argument: it bounds the number of these ticks. Summed
over all x between two costs, this counts that input gradients, the longest, need a fill and a drain of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedules.search.question import Question, Shape

__all__ = ["Bound", "lower_bound"]


def lower_bound(question: Question) -> float:
    """A makespan that no schedule within the cap beats, with F, I and W apart, in any of the placements."""
    start = np.zeros((1, question.stages, 3), np.int16)
    shapes = (Shape(question, placement) for placement in question.placements)
    return min(float(Bound(shape, layers=question.timing == "lockstep")(start)[0]) for shape in shapes)


class Bound:
    """The least time from a state of the search to the end.

    A state is the number of actions done: [K, Q, 3] for K states, Q stages and F, I, W. Identical microbatches may be
    run in order without loss: what the k-th action of a stage needs is the k-th of another.
    """

    def __init__(self, shape: Shape, layers: bool) -> None:
        self._shape = shape
        self._chains = [_Chains(shape, shape.times)]
        self._heights: list[float] = []
        if layers:
            levels = np.unique(shape.times)
            self._heights = [float(height) for height in np.diff(levels, prepend=0.0)]
            self._chains += [_Chains(shape, (shape.times >= level).astype(float)) for level in levels]

    def __call__(self, done: np.ndarray) -> np.ndarray:
        """[K] the least time that remains."""
        facts = _Facts.of(self._shape, done)
        work, *layers = (chains.longest(facts) for chains in self._chains)
        if not layers:
            return work
        return np.maximum(work, sum(height * count for height, count in zip(self._heights, layers, strict=True)))


@dataclass(frozen=True)
class _Facts:
    """What a bound needs of K states, whatever the actions take.

    Attributes:
        left: [K, P, V, 3] actions that are left.
        pending: [K, P, V] W that could run.
        early: [K, P] W that must run before the rank's last F.
        more: [K, P] the most F that the rank can run before its next I.
        forward: [K, Q] the nearest place, from each stage upwards in model order, whose next F has its input; 0 is one.
        gradient: [K, Q] the nearest place, from each stage downwards, whose next I has the gradient that it needs; the
            last place is one, though it may lack its F.
        turn: [K] whether the last stage has run the F of its next I.
    """

    left: np.ndarray
    pending: np.ndarray
    early: np.ndarray
    more: np.ndarray
    forward: np.ndarray
    gradient: np.ndarray
    turn: np.ndarray

    @classmethod
    def of(cls, shape: Shape, done: np.ndarray) -> _Facts:
        K, Q = len(done), shape.Q
        by_rank = done.reshape(K, shape.P, shape.V, 3)
        left = shape.M - by_rank
        pending = by_rank[..., 1] - by_rank[..., 2]
        held = (by_rank[..., 0] - by_rank[..., 2]).sum(2)
        forwards = left[..., 0].sum(2)
        F, I = done[:, shape.column, 0], done[:, shape.column, 1]  # noqa: E741
        places = np.arange(Q)
        forward, gradient = np.zeros((K, Q), int), np.full((K, Q), Q - 1)
        forward[:, 1:] = np.where(F[:, :-1] > F[:, 1:], places[1:], 0)
        gradient[:, :-1] = np.where(I[:, 1:] > I[:, :-1], places[:-1], Q - 1)
        return cls(
            left=left,
            pending=pending,
            early=np.where(forwards > 0, np.maximum(left[..., 2].sum(2) - shape.pairs, 0), 0),
            more=np.minimum(shape.pairs - held + pending.sum(2), forwards),
            forward=np.maximum.accumulate(forward, axis=1),
            gradient=np.minimum.accumulate(gradient[:, ::-1], axis=1)[:, ::-1],
            turn=I[:, -1] < F[:, -1],
        )


class _Chains:
    """The first argument for given times [Q, 3]."""

    def __init__(self, shape: Shape, times: np.ndarray) -> None:
        P, V, column = shape.P, shape.V, shape.column
        self._shape = shape
        self._times = times.reshape(P, V, 3)
        forwards, gradients = times[column, 0], times[column, 1]
        # From the start of a stage's F to the input of a later one's, and likewise for I, as differences of these.
        self._down = np.concatenate([[0], np.cumsum(forwards[:-1] + shape.delay_before[column[1:]])])
        self._up = np.concatenate([np.cumsum((gradients[1:] + shape.delay_after[column[:-1]])[::-1])[::-1], [0]])
        self._last_forward = forwards[-1]
        # From the end of a stage's I to the end of all: on to stage 0, and its W.
        tails = np.empty(shape.Q)
        back = gradients[:-1] + shape.delay_after[column[:-1]]
        tails[column] = np.concatenate([[0], np.cumsum(back)]) + times[column[0], 2]
        self._tails = tails.reshape(P, V)
        self._rank_place = np.argsort(column)

    def longest(self, facts: _Facts) -> np.ndarray:
        """[K] the time of the rank that takes longest."""
        shape, times, left = self._shape, self._times, facts.left
        by_rank = (len(left), shape.P, shape.V)
        # When the next F and the next I of each stage can start.
        forward = self._down - self._down[facts.forward]
        turn = np.where(facts.turn, 0.0, forward[:, -1] + self._last_forward)
        gradient = self._up - self._up[facts.gradient]
        gradient += np.where(facts.gradient == shape.Q - 1, turn[:, None], 0)
        forward = np.where(left[..., 0] > 0, forward[:, self._rank_place].reshape(by_rank), np.inf).min(2)
        gradient = np.where(left[..., 1] > 0, gradient[:, self._rank_place].reshape(by_rank), np.inf).min(2)

        forwards = left[..., 0] * times[..., 0]
        without = (forwards + left[..., 1] * times[..., 1]).sum(2)
        pending = (facts.pending * times[..., 2]).sum(2)
        filling = np.minimum(facts.more * times[..., 0].max(1), forwards.sum(2))
        some = np.isfinite(gradient)
        wait = np.where(some, gradient, 0.0)
        first = np.where(some, np.minimum(forward, gradient), 0.0)

        all_work = without + (left[..., 2] * times[..., 2]).sum(2)
        whole = all_work + np.maximum(np.where(pending > 0, 0.0, first), wait - filling - pending)
        before_last = without + facts.early * times[..., 2].min(1) + np.maximum(first, wait - filling)
        tail = np.where(left[..., 1] > 0, self._tails, np.inf).min(2)
        return np.maximum(whole, np.where(some, before_last + np.where(some, tail, 0.0), 0.0)).max(1)

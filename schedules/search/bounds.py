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
        self._layers: list[tuple[float, np.ndarray]] = []
        if layers:
            below = 0.0
            for level in np.unique(shape.times):
                self._layers.append((level - below, (shape.times >= level).astype(float)))
                below = level

    def __call__(self, done: np.ndarray) -> np.ndarray:
        """[K] the least time that remains."""
        bound = self.per_rank(done, self._shape.times).max(1)
        if self._layers:
            layers = sum(height * self.per_rank(done, ones).max(1) for height, ones in self._layers)
            bound = np.maximum(bound, layers)
        return bound

    def per_rank(
        self,
        done: np.ndarray,
        times: np.ndarray,
        clock: np.ndarray | None = None,
        arrival: np.ndarray | None = None,
    ) -> np.ndarray:
        """[K, P] when each rank's actions and what must follow them can be over.

        Args:
            times: [Q, 3].
            clock: [K, P] when each rank is free; 0 if None.
            arrival: [K, Q, 2] when the inputs of each stage's next F and I are there, inf if that is not known
                yet; 0 if None.
        """
        shape = self._shape
        K, P, V = len(done), shape.P, shape.V
        free = np.zeros((K, P)) if clock is None else clock
        first = self._first(done, times, free, arrival)
        left = shape.M - done
        work = (left * times).reshape(K, P, V, 3)
        first = np.where(left[..., :2] > 0, first, np.inf).reshape(K, P, V, 2)
        early = first.min((2, 3))
        gradient = first[..., 1].min(2)
        gradients_left = np.isfinite(gradient)

        pending = done[..., 1] - done[..., 2]
        pending_work = (pending * times[:, 2]).reshape(K, P, V).sum(2)
        held = (done[..., 0] - done[..., 2]).reshape(K, P, V).sum(2)
        more = np.minimum(shape.pairs - held + pending.reshape(K, P, V).sum(2), left[..., 0].reshape(K, P, V).sum(2))
        forwards = np.minimum(more * times[:, 0].reshape(P, V).max(1), work[..., 0].sum(2))

        wait = np.where(gradients_left, gradient, 0.0) - free
        all_work = work.sum((2, 3))
        starts = np.where((pending_work > 0) | ~np.isfinite(early), free, early)
        whole = np.maximum(starts, free + np.maximum(wait - forwards - pending_work, 0)) + all_work
        tail = np.where(left[..., 1] > 0, self._tails(times), np.inf).reshape(K, P, V).min(2)
        # Before the last forward all but `pairs` weight gradients are done, and its input gradient is yet to come.
        early_weights = np.maximum(left[..., 2].reshape(K, P, V).sum(2) - shape.pairs, 0)
        early_weights = early_weights * (left[..., 0].reshape(K, P, V).sum(2) > 0)
        without = work[..., :2].sum((2, 3)) + early_weights * times[:, 2].reshape(P, V).min(1)
        begin = np.maximum(np.where(np.isfinite(early), early, free), free + np.maximum(wait - forwards, 0))
        return np.maximum(whole, np.where(gradients_left, begin + without + np.where(gradients_left, tail, 0), 0))

    def _first(self, done: np.ndarray, times: np.ndarray, free: np.ndarray, arrival: np.ndarray | None) -> np.ndarray:
        """[K, Q, 2] the earliest start of each stage's next F and I."""
        shape = self._shape
        first = np.repeat(free, shape.V, axis=1)[..., None].repeat(2, axis=2)
        column = shape.column
        for place, q in enumerate(column):
            if place:
                up = column[place - 1]
                came = first[:, up, 0] + times[up, 0] + shape.delay_before[q]
                known = done[:, up, 0] > done[:, q, 0]
                there = 0.0 if arrival is None else arrival[:, q, 0]
                first[:, q, 0] = np.maximum(first[:, q, 0], np.where(known, there, came))
        for place in reversed(range(shape.Q)):
            q = column[place]
            own = np.where(done[:, q, 1] < done[:, q, 0], 0.0, first[:, q, 0] + times[q, 0])
            first[:, q, 1] = np.maximum(first[:, q, 1], own)
            if place + 1 < shape.Q:
                down = column[place + 1]
                came = first[:, down, 1] + times[down, 1] + shape.delay_after[q]
                known = done[:, down, 1] > done[:, q, 1]
                there = 0.0 if arrival is None else arrival[:, q, 1]
                first[:, q, 1] = np.maximum(first[:, q, 1], np.where(known, there, came))
        return first

    def _tails(self, times: np.ndarray) -> np.ndarray:
        """[Q] the least time from the end of a stage's last I to the end of all."""
        shape = self._shape
        tails = np.zeros(shape.Q)
        after = times[shape.column[0], 2]
        for place, q in enumerate(shape.column):
            tails[q] = after
            after += times[q, 1] + (shape.delay_after[shape.column[place]] if place + 1 < shape.Q else 0.0)
        return tails

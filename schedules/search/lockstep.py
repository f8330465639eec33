"""Lock step: a beam search over ticks.

A state is how many F, I and W each stage has done. A step is a tick: a limit on its length (one of the costs), and for
each rank one of the actions that can run within it. Which of them to take is rarely a question: F or I where both
can run, W where the memory is full. There the search tries several answers, some of them by chance. It keeps
the `width` states with the least elapsed time plus bound (`schedules.search.bounds`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from schedules.search.bounds import Bound
from schedules.search.question import Shape

__all__ = ["Table", "lockstep_beam", "lockstep_exhaustive"]

_MOST_LIMITS = 6  # limits on a tick's length that are tried; with a cost for each stage there are many more
# Chances that a rank puts F before I, and W before all else where its memory is full.
_CHANCES = ((1.0, 0.0), (0.5, 0.0), (0.0, 1.0), (0.5, 0.5))
_MOST_AT_ONCE = 1 << 18  # states and choices that the exhaustive search holds in memory
_NEAR = 1e-9


@dataclass(frozen=True)
class Table:
    """A lock-step schedule.

    Attributes:
        makespan: the sum over ticks of the longest action.
        cells: [T, P] 3 x chunk + (0, 1, 2 for F, I, W), or -1 where the rank idles.
    """

    makespan: float
    cells: np.ndarray


@dataclass(frozen=True)
class _States:
    """K states, and how each came about.

    Attributes:
        done: [K, Q, 3] actions done.
        barred: [K, Q, 3] actions that were ready when their rank last idled. A program that runs each rank's list as
            early as it can would have run them then, so they cannot come next.
        elapsed: [K] time.
        parent: [K] the state one tick before.
        cells: [K, P] what each rank did in that tick.
    """

    done: np.ndarray
    barred: np.ndarray
    elapsed: np.ndarray
    parent: np.ndarray
    cells: np.ndarray

    def take(self, index: np.ndarray) -> _States:
        return _States(*(part[index] for part in vars(self).values()))


def lockstep_beam(shape: Shape, width: int, seed: int, *, waits: bool, goal: float = -math.inf) -> Table | None:
    """The best schedule that a beam of `width` states meets; None if all of them run into dead ends.

    Args:
        waits: let a rank idle though its next action could run, where that would make the tick longer.
        goal: a makespan that is good enough to stop at.
    """
    return _Beam(shape, width, seed, waits).run(goal)


def lockstep_exhaustive(shape: Shape, effort: int, beat: float) -> tuple[Table | None, bool]:
    """The best schedule that takes less than `beat`, if there is one; and whether this is proved.

    With one stage a rank little is left to try. A rank that can run something within the tick's length loses
    nothing by running it, and nothing by running F before W: in any schedule the two can change places. So the only
    choice is whether I comes first or last. (With several stages a rank, one's F can take the room of another's.)

    Args:
        effort: ticks of states that may be tried before giving up.
    """
    assert shape.V == 1
    beam = _Exhaustive(shape, effort)
    table = beam.run(-math.inf, beat)
    return table, not beam.exhausted


class _Beam:
    def __init__(self, shape: Shape, width: int, seed: int, waits: bool) -> None:
        self._shape, self._width, self._waits = shape, width, waits
        self._random = np.random.default_rng(seed)
        self._bound = Bound(shape, layers=True)
        self._hash, self._hash_barred = self._random.integers(1, 1 << 62, (2, shape.Q, 3))
        limits = np.unique(shape.times)
        if len(limits) > _MOST_LIMITS:
            limits = limits[np.linspace(0, len(limits) - 1, _MOST_LIMITS).round().astype(int)]
        self._limits = limits
        # What ends a microbatch sooner goes first: forwards of later chunks, input gradients of earlier ones.
        self._late = np.tile(np.arange(shape.V) / (2 * shape.V), shape.P)
        self._usual = np.stack([2 + self._late, 3 - self._late, 1 - self._late], axis=1)

    def run(self, goal: float, best: float = math.inf) -> Table | None:
        """What takes less than `best`."""
        shape = self._shape
        none = np.zeros((1, shape.Q, 3), np.int16)
        states = _States(none, none > 0, np.zeros(1), np.zeros(1, int), np.zeros((1, shape.P), np.int16))
        history: list[_States] = []
        cells = None
        while len(states.elapsed) and best > goal + _NEAR:
            states = self._select(self._step(states), best)
            over = (states.done[..., 2] == shape.M).all(1)
            history.append(states)
            if over.any():
                at = int(np.where(over, states.elapsed, np.inf).argmin())
                best, cells = float(states.elapsed[at]), _trace(history, at)
                states = states.take(np.flatnonzero(~over))
                history[-1] = states
        return None if cells is None else Table(best, cells)

    def _step(self, states: _States) -> _States:
        """All that the states may be one tick later, with repetitions."""
        shape = self._shape
        edge = np.full((len(states.done), 1), shape.M + 1, np.int16)
        F, I, W = np.moveaxis(states.done, 2, 0)  # noqa: E741
        held = self._by_rank(F - W).sum(2).repeat(shape.V, 1)
        ready = np.stack(
            [
                (F < shape.M) & (np.hstack([F, edge])[:, shape.before] > F) & (held < shape.room),
                (I < F) & (np.hstack([I, edge])[:, shape.after] > I),
                W < I,
            ],
            axis=2,
        )
        can = ready & ~states.barred
        full = (held >= shape.pairs) & (F < shape.M)
        below = -1.0
        parts = []
        for limit in self._limits:
            allowed = can & (shape.times <= limit)
            new = np.flatnonzero((allowed & (shape.times > below)).any((1, 2)))
            below = limit
            torn = new[self._torn(allowed[new], full[new])]
            for index, scores in ((new, self._usual), *self._preferences(torn, full)):
                parts.append(self._run(states, index, allowed[index], ready[index], scores))
        return _States(*(np.concatenate(part) for part in zip(*(vars(p).values() for p in parts), strict=True)))

    def _by_rank(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(len(array), self._shape.P, self._shape.V, *array.shape[2:])

    def _torn(self, allowed: np.ndarray, full: np.ndarray) -> np.ndarray:
        """[K] whether some rank has a choice that matters."""
        several = self._by_rank(allowed[..., :2]).sum((2, 3)) > 1
        pressed = self._by_rank(allowed[..., 2] & full).any(2) & self._by_rank(allowed[..., 1]).any(2)
        return (several | pressed).any(1)

    def _preferences(self, torn: np.ndarray, full: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For the states `torn`, some scores [K, Q, 3]; the action of the highest score runs."""
        if not len(torn):
            return
        shape = self._shape
        draws = len(torn), shape.P
        for forward_first, weight_first in _CHANCES:
            scores = np.broadcast_to(self._usual, (len(torn), *self._usual.shape)).copy()
            scores[..., 0] += 2 * (self._random.random(draws) < forward_first).repeat(shape.V, 1)
            scores[..., 2] += 4 * (full[torn] & (self._random.random(draws) < weight_first).repeat(shape.V, 1))
            if shape.V > 1:
                turned = (self._random.random((len(torn), 1, 2)) < 0.3) * 2 * self._late[:, None]
                scores[..., :2] += turned * (-1, 1)
            yield torn, scores

    def _run(
        self, states: _States, index: np.ndarray, allowed: np.ndarray, ready: np.ndarray, scores: np.ndarray
    ) -> _States:
        """One tick of the states `index`, each rank running the allowed action of the highest score."""
        shape = self._shape
        flat = np.where(allowed, scores, -1.0).reshape(len(index), shape.P, 3 * shape.V)
        cells = flat.argmax(2)
        runs = np.take_along_axis(flat, cells[..., None], 2)[..., 0] >= 0
        chosen = np.zeros(flat.shape, bool)
        np.put_along_axis(chosen, cells[..., None], runs[..., None], 2)
        now = chosen.reshape(allowed.shape)
        barred = states.barred[index]
        if not self._waits:
            barred = (barred | ready) & ~runs.repeat(shape.V, 1)[..., None]
        return _States(
            done=states.done[index] + now,
            barred=barred,
            elapsed=states.elapsed[index] + (now * shape.times).max((1, 2)),
            parent=index,
            cells=np.where(runs, cells, -1).astype(np.int16),
        )

    def _select(self, states: _States, best: float) -> _States:
        """The most promising states, each once, that may still beat `best`."""
        shape, done = self._shape, states.done
        code = (done * self._hash).sum((1, 2))
        if not self._waits:
            code += (states.barred * self._hash_barred).sum((1, 2))
            left = np.stack([done[..., 0] < shape.M, done[..., 1] < done[..., 0], done[..., 2] < done[..., 1]], axis=2)
            comes = self._by_rank(left & ~states.barred).any((2, 3))
            ended = self._by_rank(done[..., 2] == shape.M).all(2)
            code[~(comes | ended).all(1)] = 0  # a dead end
        order = np.lexsort((states.elapsed, code))
        once = order[np.diff(code[order], prepend=0) != 0]
        states = states.take(once)
        total = states.elapsed + self._bound(states.done)
        progress = (states.done * shape.times).sum((1, 2))
        order = np.lexsort((-progress, total))
        return states.take(order[total[order] < best - _NEAR][: self._width])


class _Exhaustive(_Beam):
    """Tries whatever may matter, without limit of width.

    Attributes:
        exhausted: whether the effort was spent before the end.
    """

    def __init__(self, shape: Shape, effort: int) -> None:
        super().__init__(shape, effort, 0, waits=True)
        self._effort = effort
        self.exhausted = False
        last = np.array([4, 3, 3.5])  # F, then W, then I
        choices = itertools.product((False, True), repeat=shape.P)
        self._choices = [np.where(np.array(ranks)[:, None], last, self._usual) for ranks in choices]

    def _step(self, states: _States) -> _States:
        tried = len(states.done) * len(self._choices)
        self._effort -= tried
        if self._effort < 0 or tried > _MOST_AT_ONCE:
            self.exhausted = True
            return states.take(np.zeros(0, int))
        return super()._step(states)

    def _torn(self, allowed: np.ndarray, full: np.ndarray) -> np.ndarray:
        return (allowed[..., 1] & (allowed[..., 0] | allowed[..., 2])).any(1)

    def _preferences(self, torn: np.ndarray, full: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from ((torn, scores) for scores in self._choices)


def _trace(history: list[_States], at: int) -> np.ndarray:
    rows = []
    for states in reversed(history):
        rows.append(states.cells[at])
        at = int(states.parent[at])
    return np.stack(rows[::-1])

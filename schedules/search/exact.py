"""Small questions, by constraint programming: OR-tools' CP-SAT, from the extra `search`.

Both models run identical microbatches in order, which loses nothing. The solver works on one thread and counts its time
in operations, so that the answer does not depend on the machine.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedules.search.question import Question, Shape

__all__ = ["Solution", "is_small", "solve", "solver_is_there"]

_MOST_CHOICES = 1500  # truth values of the lock-step model
_MOST_ACTIONS = 120  # intervals of the other
_NEAR = 1e-9


@dataclass(frozen=True)
class Solution:
    """What the solver knows at its end.

    Attributes:
        words: per rank 3 x chunk + (0, 1, 2 for F, I, W), with -1 for a tick in which it idles in lock step; None if
            it found nothing that takes less than what it was given to beat.
        closed: whether nothing can take less than `words`, or than what it was given to beat.
        makespan: of `words`.
    """

    words: list[list[int]] | None
    closed: bool
    makespan: float = math.inf


def solver_is_there() -> bool:
    """Whether OR-tools is installed."""
    return importlib.util.find_spec("ortools") is not None


def is_small(question: Question) -> bool:
    """Whether the solver can be expected to end."""
    actions = 3 * question.stages * question.microbatches
    if question.timing == "asynchronous":
        return actions <= _MOST_ACTIONS
    ticks = 3 * question.chunks * question.microbatches + 2 * question.stages
    return 3 * question.stages * ticks <= _MOST_CHOICES


def solve(question: Question, shape: Shape, beat: float, effort: float) -> Solution:
    """Looks for a schedule that takes less than `beat`; needs OR-tools.

    Args:
        effort: the solver's deterministic time, about seconds.
    """
    scale = _scale([*shape.times.ravel(), *shape.delay_before, *shape.delay_after])
    if scale is None:
        return Solution(None, False)
    most = _below(beat, scale)
    if most < 0:
        return Solution(None, True)

    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    makespan, words = (_in_step if question.timing == "lockstep" else _running_free)(model, shape, scale, most)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = question.seed % 2**31
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    closed = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Solution(None, closed)
    return Solution(words(solver.value), closed, solver.objective_value / scale)


def _scale(times: Sequence[float]) -> int | None:
    """What makes all times whole; None if they have more than six digits after the point."""
    for digits in range(7):
        scale = 10**digits
        if all(abs(time * scale - round(time * scale)) < 1e-6 for time in times):
            return scale
    return None


def _below(beat: float, scale: int) -> int:
    """The largest whole makespan that is less."""
    return math.ceil(beat * scale - 1e-4) - 1


# The makespan of a model, times the scale and at most `most`, and what reads `Solution.words` from the solver's values.
_Model = tuple[Any, Callable[[Callable[[Any], int]], list[list[int]]]]


def _in_step(model: Any, shape: Shape, scale: int, most: int) -> _Model:
    """One truth value for each stage, kind and tick, and one for each tick and length: is the tick at least as long?"""
    levels = np.unique(np.round(shape.times * scale).astype(int))
    ticks = 3 * shape.Q * shape.M
    if levels[0] > 0:
        ticks = min(ticks, most // int(levels[0]))
    runs = [[[model.new_bool_var("") for _ in range(ticks)] for _ in range(3)] for _ in range(shape.Q)]
    long = [[model.new_bool_var("") for _ in levels] for _ in range(ticks)]
    # count[q][kind][t]: how many have run before tick t.
    count = [[[model.new_int_var(0, shape.M, "") for _ in range(ticks + 1)] for _ in range(3)] for _ in range(shape.Q)]
    for q in range(shape.Q):
        for kind in range(3):
            level = int(np.searchsorted(levels, round(shape.times[q, kind] * scale)))
            model.add(count[q][kind][0] == 0)
            model.add(count[q][kind][ticks] == shape.M)
            for t in range(ticks):
                model.add(count[q][kind][t + 1] == count[q][kind][t] + runs[q][kind][t])
                model.add_implication(runs[q][kind][t], long[t][level])
                for other, what in _needs(shape, q, kind):
                    model.add(count[q][kind][t + 1] <= count[other][what][t])
    for t in range(ticks):
        for low in range(len(levels) - 1):
            model.add_implication(long[t][low + 1], long[t][low])
        if t:
            model.add_implication(long[t][0], long[t - 1][0])  # ticks that are not used come last
        for rank in range(shape.P):
            model.add_at_most_one(runs[q][kind][t] for q, kind, _ in _cells(shape, rank))
            mine = range(rank * shape.V, (rank + 1) * shape.V)
            model.add(sum(count[q][0][t + 1] - count[q][2][t + 1] for q in mine) <= shape.pairs)
    heights = np.diff(levels, prepend=0).tolist()
    makespan = sum(heights[level] * long[t][level] for t in range(ticks) for level in range(len(levels)))
    model.add(makespan <= most)

    def words(value: Callable[[Any], int]) -> list[list[int]]:
        return [
            [next((cell for q, kind, cell in _cells(shape, rank) if value(runs[q][kind][t])), -1) for t in range(ticks)]
            for rank in range(shape.P)
        ]

    return makespan, words


def _cells(shape: Shape, rank: int) -> Iterator[tuple[int, int, int]]:
    """The (column, kind) of each number in the words of a rank."""
    for cell in range(3 * shape.V):
        yield rank * shape.V + cell // 3, cell % 3, cell


def _needs(shape: Shape, q: int, kind: int) -> list[tuple[int, int]]:
    """The (column, kind) whose k-th action must have run before the k-th of this one."""
    if kind == 0:
        return [(int(shape.before[q]), 0)] if shape.before[q] < shape.Q else []
    if kind == 2:
        return [(q, 1)]
    return [(q, 0), *([(int(shape.after[q]), 1)] if shape.after[q] < shape.Q else [])]


def _running_free(model: Any, shape: Shape, scale: int, most: int) -> _Model:
    """One interval for each action and for each pair that is held; messages do not queue on links."""
    makespan = model.new_int_var(0, most, "")
    times = np.round(shape.times * scale).astype(int).tolist()
    starts = [[[model.new_int_var(0, most, "") for _ in range(shape.M)] for _ in range(3)] for _ in range(shape.Q)]
    held: list[list[Any]] = [[] for _ in range(shape.P)]
    busy: list[list[Any]] = [[] for _ in range(shape.P)]
    for q in range(shape.Q):
        for kind in range(3):
            for m, start in enumerate(starts[q][kind]):
                time = times[q][kind]
                busy[q // shape.V].append(model.new_fixed_size_interval_var(start, time, ""))
                model.add(start + time <= makespan)
                if m:
                    model.add(start >= starts[q][kind][m - 1] + time)
                for other, what in _needs(shape, q, kind):
                    delay = 0.0 if other == q else (shape.delay_before if kind == 0 else shape.delay_after)[q]
                    model.add(start >= starts[other][what][m] + times[other][what] + round(delay * scale))
        for m in range(shape.M):
            first, last = starts[q][0][m], starts[q][2][m]
            length = model.new_int_var(0, most, "")
            held[q // shape.V].append(model.new_interval_var(first, length, last + times[q][2], ""))
    for rank in range(shape.P):
        model.add_no_overlap(busy[rank])
        model.add_cumulative(held[rank], [1] * len(held[rank]), shape.pairs)

    def words(value: Callable[[Any], int]) -> list[list[int]]:
        # Of actions that take no time and start together, those that others need go first.
        order = [
            sorted((value(start), kind, cell) for q, kind, cell in _cells(shape, rank) for start in starts[q][kind])
            for rank in range(shape.P)
        ]
        return [[cell for _, _, cell in row] for row in order]

    return makespan, words

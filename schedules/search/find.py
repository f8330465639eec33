"""From a question to its answer: the best of what is known and what is found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from schedules.actions import Action, Schedule
from schedules.search.asynchronous import greedy, tempers
from schedules.search.bounds import lower_bound
from schedules.search.exact import is_small, solve, solver_is_there
from schedules.search.known import known_schedules
from schedules.search.lockstep import Table, lockstep_beam, lockstep_exhaustive
from schedules.search.question import KINDS, Question, Shape
from schedules.simulate import Timeline, simulate
from schedules.ticks import needs
from schedules.validate import validate

__all__ = ["ALGORITHM", "Answer", "search"]

ALGORITHM = 1
"""Counts changes after which the same question may have another answer; whoever keeps answers must keep it too."""

_NEAR = 1e-9
# On a slow core: a state of a beam for a stage and a tick; an action of a greedy order; a state and a choice
# for a stage and a tick of the exhaustive search. Effort is counted by these and not by a clock, so that it does not
# depend on the machine.
_SECONDS_PER_CELL = 1.2e-5
_SECONDS_PER_ACTION = 1.2e-5
_SECONDS_PER_CHOICE = 1.2e-6
_FEWEST_TEMPERS, _MOST_TEMPERS = 6, 1000
_MOST_RANKS = 8  # of the exhaustive search, whose choices double with each


@dataclass(frozen=True)
class Answer:
    """The best schedule found.

    Attributes:
        timeline: of the schedule, by `schedules.simulate`.
        lower_bound: a makespan that no schedule of the question beats.
        method: what found it: a family's name, `beam` (`schedules.search.lockstep`), `greedy` (`.asynchronous`), or
            `exact` (`.exact`, and in lock step with one stage a rank `.lockstep`).
        optimal: whether it is proved that no schedule of the question is shorter, with F, I and W apart and stages
            placed in one of the question's ways.
        note: what would have let the search do better, in one line; None for nothing.
    """

    question: Question
    schedule: Schedule
    timeline: Timeline
    lower_bound: float
    method: str
    optimal: bool
    note: str | None = None

    @property
    def makespan(self) -> float:
        return self.timeline.makespan


def search(question: Question) -> Answer:
    """Searches with the effort that the question allows; the answer depends on the question alone.

    And on whether OR-tools is installed, where that could prove more (`Answer.note`).
    """
    bound = lower_bound(question)
    shapes = [Shape(question, placement) for placement in question.placements]
    best: _Found | None = None
    for method, schedule in _candidates(question, shapes, bound):
        timeline = simulate(schedule, question.costs, question.timing)
        if max(timeline.peak_activations) > question.memory_cap + _NEAR:
            continue
        if best is None or timeline.makespan < best[2].makespan - _NEAR:
            best = method, schedule, timeline
        if best[2].makespan <= bound + _NEAR:
            break
    assert best is not None  # the last of the known schedules is within any cap
    note = None
    if best[2].makespan > bound + _NEAR:
        best, closed, note = _prove(question, shapes, best)
        bound = best[2].makespan if closed else bound
    method, schedule, timeline = best
    validate(schedule, microbatches=question.microbatches)
    return Answer(question, schedule, timeline, bound, method, timeline.makespan <= bound + _NEAR, note)


_Found = tuple[str, Schedule, Timeline]


def _prove(question: Question, shapes: list[Shape], best: _Found) -> tuple[_Found, bool, str | None]:
    """The best there is, as far as an exact method gets; whether that is proved; and what the user should know."""
    in_step = question.timing == "lockstep"
    if in_step and question.chunks == 1:
        if question.ranks > _MOST_RANKS:
            return best, False, None
        effort = int(question.seconds / 3 / (question.stages * _SECONDS_PER_CHOICE))
        table, closed = lockstep_exhaustive(shapes[0], effort, best[2].makespan)
        if table is not None:
            schedule = _from_table(shapes[0], table)
            best = "exact", schedule, simulate(schedule, question.costs, question.timing)
        return best, closed, None
    if not is_small(question):
        return best, False, None
    if not solver_is_there():
        return best, False, "without OR-tools the best schedule is not proved; pip install 'meshsys[search]'"
    proved = True
    for shape in shapes:
        solution = solve(question, shape, best[2].makespan, question.seconds / 10 / len(shapes))
        proved &= solution.closed
        if solution.words is None:
            continue
        if in_step:
            schedule = _from_table(shape, Table(solution.makespan, np.array(solution.words).T))
        else:
            schedule = _from_words(shape, map(np.array, solution.words))
        timeline = simulate(schedule, question.costs, question.timing)
        proved &= timeline.makespan <= solution.makespan + 1e-6  # not so where messages queue on links
        if timeline.makespan < best[2].makespan - _NEAR:
            best = "exact", schedule, timeline
    return best, proved, None


def _candidates(question: Question, shapes: list[Shape], bound: float) -> Iterator[tuple[str, Schedule]]:
    for schedule in known_schedules(question):
        yield schedule.name, schedule
    if question.timing == "lockstep":
        yield from (("beam", schedule) for schedule in _in_step(question, shapes, question.seconds, bound))
    else:
        yield from _running_free(question, shapes, bound)


def _in_step(question: Question, shapes: list[Shape], seconds: float, bound: float) -> Iterator[Schedule]:
    """Narrow beams over each placement, with and without waiting; then a wide one of the kind that did best."""
    width = max(4, math.ceil(seconds / 2 / (_ticks(question) * question.stages * _SECONDS_PER_CELL)))
    first: list[tuple[float, int, Shape, bool]] = []
    for shape in shapes:
        for waits in (False, True):
            table = lockstep_beam(shape, math.ceil(width / 8), question.seed, waits=waits, goal=bound)
            if table is not None:
                first.append((table.makespan, len(first), shape, waits))
                yield _from_table(shape, table)
    if first:
        *_, shape, waits = min(first)
        table = lockstep_beam(shape, width, question.seed, waits=waits, goal=bound)
        if table is not None:
            yield _from_table(shape, table)


def _running_free(question: Question, shapes: list[Shape], bound: float) -> Iterator[tuple[str, Schedule]]:
    """Greedy orders, and those of lock step, which plan further ahead where memory is short."""
    actions = 3 * question.stages * question.microbatches
    draws = int(question.seconds / 2 / len(shapes) / (actions * _SECONDS_PER_ACTION))
    for shape in shapes:
        tried = islice(tempers(shape, question.seed), max(min(draws, _MOST_TEMPERS), _FEWEST_TEMPERS))
        makespan, word = math.inf, np.zeros((shape.P, 0), int)
        for temper in tried:
            makespan, word = min((makespan, word), greedy(shape, temper), key=lambda found: found[0])
            if makespan <= bound + _NEAR:
                break
        if makespan < math.inf:
            yield "greedy", _from_words(shape, word)
    for schedule in _in_step(question, shapes, question.seconds / 2, -math.inf):
        yield "beam", replace(schedule, holds=())


def _ticks(question: Question) -> int:
    """About as many as a schedule has."""
    return 3 * question.chunks * question.microbatches + 2 * question.stages


def _from_table(shape: Shape, table: Table) -> Schedule:
    """The table as lists of actions, with whatever runs later there than it could held back."""
    words = [column[column >= 0] for column in table.cells.T]
    schedule = _from_words(shape, words)
    ticks: dict[Action, int] = {}
    for row, column in zip(schedule.actions, table.cells.T, strict=True):
        ticks.update(zip(row, map(int, np.flatnonzero(column >= 0)), strict=True))
    holds = []
    for row in schedule.actions:
        for before, action in zip((None, *row), row, strict=False):
            earlier = [ticks[need] for need in needs(action, schedule, frozenset())]
            earlier += [] if before is None else [ticks[before]]
            if ticks[action] > 1 + max(earlier, default=-1):
                holds.append((action, ticks[action]))
    return replace(schedule, holds=tuple(holds))


def _from_words(shape: Shape, words: Iterable[np.ndarray]) -> Schedule:
    """Per-rank lists of 3 x chunk + (0, 1, 2 for F, I, W) as a schedule, microbatches in order."""
    stages = np.argsort(shape.column)
    rows = []
    for rank, word in enumerate(words):
        count = np.zeros(3 * shape.V, int)
        row = []
        for cell in map(int, word):
            chunk, kind = divmod(cell, 3)
            row.append(Action(int(stages[rank * shape.V + chunk]), KINDS[kind], int(count[cell])))
            count[cell] += 1
        rows.append(tuple(row))
    return Schedule("search", tuple(rows), shape.placement)

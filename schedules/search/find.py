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
from schedules.search.known import known_schedules
from schedules.search.lockstep import Table, lockstep_beam
from schedules.search.question import KINDS, Question, Shape
from schedules.simulate import Timeline, simulate
from schedules.ticks import needs
from schedules.validate import validate

__all__ = ["ALGORITHM", "Answer", "search"]

ALGORITHM = 1
"""Counts changes after which the same question may have another answer; whoever keeps answers must keep it too."""

_NEAR = 1e-9
# On a slow core: a state of a beam for a stage and a tick; an action of a greedy order. Effort is counted by these
# and not by a clock, so that it does not depend on the machine.
_SECONDS_PER_CELL = 1.2e-5
_SECONDS_PER_ACTION = 1.2e-5
_FEWEST_TEMPERS, _MOST_TEMPERS = 6, 1000


@dataclass(frozen=True)
class Answer:
    """The best schedule found.

    Attributes:
        timeline: of the schedule, by `schedules.simulate`.
        lower_bound: a makespan that no schedule of the question beats.
        method: what found it: `exact`, `beam` (`schedules.search.lockstep`), `greedy` (`.asynchronous`), or a
            family's name.
        optimal: whether it is proved that no schedule of the question is shorter.
    """

    question: Question
    schedule: Schedule
    timeline: Timeline
    lower_bound: float
    method: str
    optimal: bool

    @property
    def makespan(self) -> float:
        return self.timeline.makespan


def search(question: Question) -> Answer:
    """Searches with the effort that the question allows; the answer depends on the question alone."""
    bound = lower_bound(question)
    best: tuple[str, Schedule, Timeline] | None = None
    for method, schedule in _candidates(question, bound):
        timeline = simulate(schedule, question.costs, question.timing)
        if max(timeline.peak_activations) > question.memory_cap + _NEAR:
            continue
        if best is None or timeline.makespan < best[2].makespan - _NEAR:
            best = method, schedule, timeline
        if best[2].makespan <= bound + _NEAR:
            break
    assert best is not None  # the last of the known schedules is within any cap
    method, schedule, timeline = best
    validate(schedule, microbatches=question.microbatches)
    return Answer(question, schedule, timeline, bound, method, timeline.makespan <= bound + _NEAR)


def _candidates(question: Question, bound: float) -> Iterator[tuple[str, Schedule]]:
    for schedule in known_schedules(question):
        yield schedule.name, schedule
    shapes = [Shape(question, placement) for placement in question.placements]
    if question.timing == "lockstep":
        yield from (("beam", schedule) for schedule in _in_step(question, shapes, question.seconds, bound))
    else:
        yield from _running_free(question, shapes)


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


def _running_free(question: Question, shapes: list[Shape]) -> Iterator[tuple[str, Schedule]]:
    """Greedy orders, and those of lock step, which plan further ahead where memory is short."""
    actions = 3 * question.stages * question.microbatches
    draws = int(question.seconds / 2 / len(shapes) / (actions * _SECONDS_PER_ACTION))
    for shape in shapes:
        tried = islice(tempers(shape, question.seed), max(min(draws, _MOST_TEMPERS), _FEWEST_TEMPERS))
        makespan, word = min((greedy(shape, temper) for temper in tried), key=lambda found: found[0])
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
            earlier = [ticks[need] for need in needs(action, schedule)]
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

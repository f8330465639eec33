"""From a question to its answer: the best of what is known and what is found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from schedules.actions import Action, Schedule
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
# Seconds that a state of a beam takes for a stage and a tick, on a slow core.
_SECONDS_PER_CELL = 1.2e-5


@dataclass(frozen=True)
class Answer:
    """The best schedule found.

    Attributes:
        timeline: of the schedule, by `schedules.simulate`.
        lower_bound: a makespan that no schedule of the question beats.
        method: what found it: `beam`, `exact`, or a family's name.
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
    assert best is not None  # a cap of 1 or more lets microbatches run one after another
    method, schedule, timeline = best
    validate(schedule, microbatches=question.microbatches)
    return Answer(question, schedule, timeline, bound, method, timeline.makespan <= bound + _NEAR)


def _candidates(question: Question, bound: float) -> Iterator[tuple[str, Schedule]]:
    for schedule in known_schedules(question):
        yield schedule.name, schedule
    shapes = [Shape(question, placement) for placement in question.placements]
    ticks = 3 * question.chunks * question.microbatches + 2 * question.stages
    width = max(4, math.ceil(question.seconds / 2 / (ticks * question.stages * _SECONDS_PER_CELL)))
    modes = (False, True) if question.timing == "lockstep" else (False,)
    first: list[tuple[float, int, Shape, bool]] = []
    for shape in shapes:
        for waits in modes:
            table = lockstep_beam(shape, math.ceil(width / 8), question.seed, waits=waits, goal=bound)
            if table is not None:
                first.append((table.makespan, len(first), shape, waits))
                yield "beam", _schedule(shape, table)
    if first:
        *_, shape, waits = min(first)
        table = lockstep_beam(shape, width, question.seed, waits=waits, goal=bound)
        if table is not None:
            yield "beam", _schedule(shape, table)


def _schedule(shape: Shape, table: Table) -> Schedule:
    """The table as lists of actions, with whatever runs later there than it could held back."""
    count = np.zeros((shape.Q, 3), int)
    stages = sorted(range(shape.Q), key=lambda stage: shape.column[stage])
    ticks: dict[Action, int] = {}
    rows: list[list[Action]] = [[] for _ in range(shape.P)]
    for tick, cells in enumerate(table.cells):
        for rank in np.flatnonzero(cells >= 0):
            chunk, kind = divmod(int(cells[rank]), 3)
            stage = stages[rank * shape.V + chunk]
            action = Action(stage, KINDS[kind], int(count[stage, kind]))
            count[stage, kind] += 1
            ticks[action] = tick
            rows[rank].append(action)
    schedule = Schedule("search", tuple(map(tuple, rows)), shape.placement)
    holds = []
    for row in rows:
        for before, action in zip((None, *row), row, strict=False):
            earlier = [ticks[need] for need in needs(action, schedule)]
            earlier += [] if before is None else [ticks[before]]
            if ticks[action] > 1 + max(earlier, default=-1):
                holds.append((action, ticks[action]))
    return replace(schedule, holds=tuple(holds))

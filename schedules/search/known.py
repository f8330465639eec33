"""The families that fit a question: no search does worse than they do."""

from __future__ import annotations

import math
from collections.abc import Iterator

from schedules import families
from schedules.actions import Action, Kind, Schedule, ScheduleError, split_backward
from schedules.search.question import Question

__all__ = ["known_schedules"]

_GROUPS = (2, 3, 4)


def known_schedules(question: Question) -> Iterator[Schedule]:
    """The families for these numbers, with I and W apart, whatever they hold; and one microbatch after another."""
    for name in families.names():
        options = families.describe(name).options
        costs = question.costs if "costs" in options else None
        cap = question.memory_cap if "memory_cap" in options and question.memory_cap < math.inf else None
        for group in _GROUPS if "group" in options else (None,):
            try:
                schedule = families.make(
                    name,
                    ranks=question.ranks,
                    microbatches=question.microbatches,
                    chunks=question.chunks,
                    group=group,
                    costs=costs,
                    memory_cap=cap,
                )
            except ScheduleError:
                continue  # not for these numbers
            if schedule.pipelines == 1:  # costs and memory of a second pipeline's stages are not in the question
                yield split_backward(schedule)
    yield _one_by_one(question)


def _one_by_one(question: Question) -> Schedule:
    """The least memory: a microbatch begins when the one before has ended."""
    placement = question.placements[0]
    rows: list[list[Action]] = [[] for _ in range(question.ranks)]
    for m in range(question.microbatches):
        for stage, rank in enumerate(placement):
            rows[rank].append(Action(stage, Kind.F, m))
        for stage, rank in reversed(list(enumerate(placement))):
            rows[rank] += [Action(stage, Kind.I, m), Action(stage, Kind.W, m)]
    return Schedule("one_by_one", tuple(map(tuple, rows)), placement)

"""The families that fit a question: no search does worse than they do."""

from __future__ import annotations

from collections.abc import Iterator

from schedules import families
from schedules.actions import Action, Kind, Schedule, ScheduleError, split_backward
from schedules.search.question import Question

__all__ = ["known_schedules"]

# Those that compute a plain gradient in one pipeline.
_NAMES = (
    "gpipe", "looped_bfs", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "v_half", "v_min",
    "dualpipe_v", "kfkb", "cross_region", "ud", "wave",
)  # fmt: skip

_GROUPS = (2, 3, 4)


def known_schedules(question: Question) -> Iterator[Schedule]:
    """The families for these numbers, with I and W apart, whatever they hold; and one microbatch after another."""
    for name in families.names():
        if name not in _NAMES:
            continue
        options = families.describe(name).options
        costs = question.costs if "costs" in options else None
        for group in _GROUPS if "group" in options else (None,):
            try:
                schedule = families.make(
                    name,
                    ranks=question.ranks,
                    microbatches=question.microbatches,
                    chunks=question.chunks,
                    group=group,
                    costs=costs,
                )
            except ScheduleError:
                continue  # not for these numbers
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

"""The families that fit a question: no search does worse than they do."""

from __future__ import annotations

from collections.abc import Iterator

from schedules import families
from schedules.actions import Schedule, ScheduleError, split_backward
from schedules.search.question import Question

__all__ = ["known_schedules"]

# Those that compute a plain gradient in one pipeline.
_NAMES = (
    "gpipe", "looped_bfs", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "v_half", "v_min",
    "dualpipe_v", "kfkb", "cross_region",
)  # fmt: skip


def known_schedules(question: Question) -> Iterator[Schedule]:
    """The families for these ranks, microbatches and chunks, with I and W apart, whatever they hold."""
    for name in families.names():
        if name not in _NAMES:
            continue
        try:
            schedule = families.make(
                name, ranks=question.ranks, microbatches=question.microbatches, chunks=question.chunks
            )
        except ScheduleError:
            continue  # not for these numbers
        yield split_backward(schedule)

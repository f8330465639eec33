"""Interleaved 1F1B: several chunks a rank, in a loop (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)."""

from __future__ import annotations

from itertools import pairwise

from schedules.actions import Action, Kind, Schedule
from schedules.families.one_f_one_b import one_f_one_b

__all__ = ["interleaved_1f1b"]


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Megatron-LM's order for any number of microbatches; stage s is on rank `s % ranks`.

    Microbatches go through a rank's chunks in groups of at least `ranks`: chunk 0 of the whole group,
    then chunk 1, and so on, so that a group is back at rank 0 when its next chunk begins. With one
    chunk this is `1f1b`.
    """
    if chunks == 1:
        return one_f_one_b(ranks, microbatches)
    groups = _groups(ranks, microbatches)
    forwards = [(chunk, m) for group in groups for chunk in range(chunks) for m in group]
    backwards = [(chunk, m) for group in groups for chunk in reversed(range(chunks)) for m in group]
    rows = []
    for rank in range(ranks):
        # The first group goes through all chunks but the last; the last chunk's first forward then travels
        # `ranks - 1 - rank` ticks to the last rank and its backward as many back.
        ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * len(groups[0]), len(forwards))
        order = [(Kind.F, *forwards[k]) for k in range(ahead)]
        for k, backward in enumerate(backwards):
            if k + ahead < len(forwards):
                order.append((Kind.F, *forwards[k + ahead]))
            order.append((Kind.B, *backward))
        rows.append(tuple(Action(chunk * ranks + rank, kind, m) for kind, chunk, m in order if m < microbatches))
    return Schedule("interleaved_1f1b", tuple(rows), tuple(stage % ranks for stage in range(ranks * chunks)))


def _groups(ranks: int, microbatches: int) -> list[range]:
    """Groups of at least `ranks` microbatches, the larger ones first; indices may pass `microbatches`.

    A group shorter than `ranks` stalls every rank at each chunk. A small remainder is therefore spread over
    the groups (a few more activations); a large one is filled up with microbatches that the caller drops.
    """
    count, rest = divmod(microbatches, ranks)
    if count == 0 or 2 * rest >= ranks:
        return [range(first, first + ranks) for first in range(0, microbatches, ranks)]
    base, longer = divmod(microbatches, count)
    starts = [group * base + min(group, longer) for group in range(count + 1)]
    return [range(first, end) for first, end in pairwise(starts)]

"""1F1B and its relatives: forwards ahead, then forwards and backwards in turn, one stage a rank."""

from __future__ import annotations

from itertools import pairwise

from schedules.actions import Action, Kind, Schedule

__all__ = ["eager_1f1b", "kfkb", "one_f_one_b"]


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B, also PipeDream-Flush (Narayanan et al. 2021, arXiv:2006.09503).

    Rank r runs `ranks - 1 - r` forwards ahead, then one forward and one backward in turn, and holds at most
    `min(ranks - r, microbatches)` activations.
    """
    return _in_turn("1f1b", [ranks - 1 - rank for rank in range(ranks)], _groups(microbatches, 1))


def eager_1f1b(ranks: int, microbatches: int) -> Schedule:
    """Eager 1F1B (Zhuang et al. 2022, arXiv:2211.05322): twice as many forwards ahead.

    Rank r runs `2 (ranks - 1 - r)` forwards ahead and holds at most `2 (ranks - r) - 1` activations: what
    1F1B lacks to have a transfer as long as a forward under way beside every action.
    """
    return _in_turn("eager_1f1b", [2 * (ranks - 1 - rank) for rank in range(ranks)], _groups(microbatches, 1))


def kfkb(ranks: int, microbatches: int, group: int) -> Schedule:
    """kFkB (Wang et al. 2023, Ada-Grouper, arXiv:2303.01675): 1F1B of groups of at most `group` microbatches.

    A rank runs a group's forwards, then a group's backwards, so that a transfer has the time of a whole
    group instead of one action; it holds as many times the activations. Groups differ in size by one at most.
    """
    return _in_turn("kfkb", [ranks - 1 - rank for rank in range(ranks)], _groups(microbatches, group))


def _in_turn(name: str, ahead: list[int], groups: list[range]) -> Schedule:
    """Rank r runs `ahead[r]` groups of forwards, then a group of forwards and a group of backwards in turn."""
    rows = []
    for rank, count in enumerate(ahead):
        order = [(Kind.F, group) for group in groups[:count]]
        for k, group in enumerate(groups):
            order += [(Kind.F, forward) for forward in groups[k + count : k + count + 1]]
            order.append((Kind.B, group))
        rows.append(tuple(Action(rank, kind, m) for kind, group in order for m in group))
    return Schedule(name, tuple(rows), tuple(range(len(ahead))))


def _groups(microbatches: int, most: int) -> list[range]:
    """As few groups of at most `most` as it takes, the larger ones first."""
    count = -(-microbatches // most)
    size, longer = divmod(microbatches, count)
    starts = [group * size + min(group, longer) for group in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]

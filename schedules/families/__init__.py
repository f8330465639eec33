"""The schedule families by name.

`gpipe`, `1f1b` and `interleaved_1f1b` are written with full backwards `B`, as in their papers;
`schedules.actions.split_backward` cuts them. `zb_h1` exists only with I and W apart.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field

from schedules.actions import Schedule, ScheduleError
from schedules.families.gpipe import gpipe
from schedules.families.interleaved import interleaved_1f1b
from schedules.families.one_f_one_b import one_f_one_b
from schedules.families.zero_bubble import zb_h1

__all__ = ["Family", "describe", "make", "names"]


@dataclass(frozen=True)
class Family:
    """What is known of a family before it is built.

    Attributes:
        name: what the user writes.
        summary: one line.
        source: the paper.
        build: `build(ranks, microbatches)`, with a third argument `chunks` where the family takes chunks.
        chunks: the number of chunks a rank if the user names none.
        min_chunks: the fewest.
        max_chunks: the most; None for no limit.
    """

    name: str
    summary: str
    source: str
    build: Callable[..., Schedule] = field(repr=False)
    chunks: int = 1
    min_chunks: int = 1
    max_chunks: int | None = 1


# Far above any pipeline; they keep a slip of the finger from filling the memory.
_MOST_STAGES = 1 << 10
_MOST_FORWARDS = 1 << 18

_FAMILIES = {
    family.name: family
    for family in (
        Family(
            "gpipe",
            "all forwards, then all backwards; holds every microbatch's activations",
            "Huang et al. 2019, GPipe, arXiv:1811.06965",
            gpipe,
        ),
        Family(
            "1f1b",
            "one forward, one backward in turn; rank r holds at most P - r microbatches",
            "Narayanan et al. 2021, PipeDream-2BW (its flush schedule), arXiv:2006.09503",
            one_f_one_b,
        ),
        Family(
            "interleaved_1f1b",
            "1f1b over several chunks a rank; shorter fill and drain for more activations and messages",
            "Narayanan et al. 2021, Megatron-LM, arXiv:2104.04473",
            interleaved_1f1b,
            chunks=2,
            max_chunks=None,
        ),
        Family(
            "zb_h1",
            "1f1b whose weight gradients fill the drain; 1f1b's peak of activations",
            "Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241",
            zb_h1,
        ),
    )
}


def names() -> tuple[str, ...]:
    """The families' names, the simplest first."""
    return tuple(_FAMILIES)


def describe(name: str) -> Family:
    """The family of that name.

    Raises:
        ScheduleError: no such family; names the nearest one.
    """
    if name in _FAMILIES:
        return _FAMILIES[name]
    near = difflib.get_close_matches(name, _FAMILIES, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ScheduleError(f"schedule {name!r} is unknown; {hint}use one of {', '.join(_FAMILIES)}")


def make(name: str, *, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Builds a family's schedule.

    Args:
        ranks: size of the `pipe` axis.
        microbatches: any number from 1; it need not be a multiple of `ranks`.
        chunks: stages a rank; None for the family's own number.

    Raises:
        ScheduleError: an unknown name, or a number that the family cannot have.
    """
    family = describe(name)
    chunks = family.chunks if chunks is None else chunks
    for option, value, least in (
        ("ranks", ranks, 1),
        ("microbatches", microbatches, 1),
        ("chunks", chunks, family.min_chunks),
    ):
        if value < least:
            raise ScheduleError(f"{option}={value} is too small for {name}; use {least} or more")
    if family.max_chunks is not None and chunks > family.max_chunks:
        several = ", ".join(other.name for other in _FAMILIES.values() if other.max_chunks is None)
        raise ScheduleError(
            f"chunks={chunks}: {name} has one stage a rank; set chunks=1 or use a schedule with chunks: {several}"
        )
    for option, value, size, most in (
        ("ranks", ranks, ranks, _MOST_STAGES),
        ("chunks", chunks, ranks * chunks, _MOST_STAGES),
        ("microbatches", microbatches, ranks * chunks * microbatches, _MOST_FORWARDS),
    ):
        if size > most:
            raise ScheduleError(f"{option}={value} is too large for {name}; use {most // (size // value)} or less")
    return family.build(ranks, microbatches) if family.max_chunks == 1 else family.build(ranks, microbatches, chunks)

"""The schedule families by name.

Families whose papers have full backwards `B` are written with them, and `schedules.actions.split_backward` cuts
them; zero bubble and V-shaped families have I and W apart.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from schedules.actions import Schedule, ScheduleError
from schedules.costs import Costs
from schedules.families.breadth_first import looped_bfs
from schedules.families.chimera import chimera
from schedules.families.cross_region import cross_region, cross_region_wave
from schedules.families.dual_pipe import dualpipe_v
from schedules.families.gpipe import gpipe
from schedules.families.interleaved import interleaved_1f1b
from schedules.families.no_flush import nf1b, pipedream_2bw
from schedules.families.one_f_one_b import eager_1f1b, kfkb, one_f_one_b
from schedules.families.v_memory import v_half, v_min
from schedules.families.zbv import zbv
from schedules.families.zero_bubble import zb_h1, zb_h2

__all__ = ["Family", "describe", "make", "names"]


@dataclass(frozen=True)
class Family:
    """What is known of a family before it is built.

    Attributes:
        name: what the user writes.
        summary: one line.
        source: the paper.
        build: `build(ranks, microbatches)`, with what `options` names as further arguments by name.
        placement: how stages lie on the ranks. `line`: one a rank; `loop`: s on `s % ranks`; `v`: down the ranks
            and back up; `both`: two pipelines, one down and one up.
        chunks: the number of chunks a rank if the user names none.
        min_chunks: the fewest.
        max_chunks: the most; None for no limit.
        group: microbatches in a group if the user names none; None for a family without groups.
        takes_costs: whether the order depends on the costs.
        takes_cap: whether the order depends on a memory cap.
        flush: whether a step ends with all its gradients; without, they come one step later.
    """

    name: str
    summary: str
    source: str
    build: Callable[..., Schedule] = field(repr=False)
    placement: Literal["line", "loop", "v", "both"] = "line"
    chunks: int = 1
    min_chunks: int = 1
    max_chunks: int | None = 1
    group: int | None = None
    takes_costs: bool = False
    takes_cap: bool = False
    flush: bool = True

    @property
    def options(self) -> tuple[str, ...]:
        """Which of `chunks`, `group`, `costs` and `memory_cap` there is a choice of."""
        takes = {
            "chunks": self.min_chunks != self.max_chunks,
            "group": self.group is not None,
            "costs": self.takes_costs,
            "memory_cap": self.takes_cap,
        }
        return tuple(option for option, taken in takes.items() if taken)


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
            "looped_bfs",
            "gpipe over several chunks a rank, chunk after chunk; shorter fill and drain",
            "Lamy-Poirier 2022, Breadth-First Pipeline Parallelism, arXiv:2211.05953",
            looped_bfs,
            placement="loop",
            chunks=2,
            max_chunks=None,
        ),
        Family(
            "1f1b",
            "one forward, one backward in turn; rank r holds at most P - r microbatches",
            "Narayanan et al. 2021, PipeDream-2BW (its flush schedule), arXiv:2006.09503",
            one_f_one_b,
        ),
        Family(
            "eager_1f1b",
            "1f1b with twice the forwards ahead, which leaves each transfer the time of an action",
            "Zhuang et al. 2022, On Optimizing the Communication of Model Parallelism, arXiv:2211.05322",
            eager_1f1b,
        ),
        Family(
            "kfkb",
            "1f1b of groups of microbatches (option group), which leaves each transfer the time of a group",
            "Wang et al. 2023, Ada-Grouper, arXiv:2303.01675",
            kfkb,
            group=2,
        ),
        Family(
            "interleaved_1f1b",
            "1f1b over several chunks a rank; shorter fill and drain for more activations and messages",
            "Narayanan et al. 2021, Megatron-LM, arXiv:2104.04473",
            interleaved_1f1b,
            placement="loop",
            chunks=2,
            max_chunks=None,
        ),
        Family(
            "zb_h1",
            "1f1b whose weight gradients fill the drain; 1f1b's peak of activations",
            "Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241",
            zb_h1,
        ),
        Family(
            "zb_h2",
            "zb_h1 with more forwards in the fill; the last rank never waits, for twice the activations",
            "Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241",
            zb_h2,
        ),
        Family(
            "zbv",
            "zero bubble on a V, two chunks a rank; hardly a bubble, with 1f1b's activations",
            "Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv:2405.15362",
            zbv,
            placement="v",
            chunks=2,
            min_chunks=2,
            max_chunks=2,
        ),
        Family(
            "v_half",
            "zbv with half of 1f1b's activations and a longer fill and drain",
            "Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv:2405.15362",
            v_half,
            placement="v",
            chunks=2,
            min_chunks=2,
            max_chunks=2,
        ),
        Family(
            "v_min",
            "zbv with a third of 1f1b's activations, and a little; the longest fill and drain of the three",
            "Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv:2405.15362",
            v_min,
            placement="v",
            chunks=2,
            min_chunks=2,
            max_chunks=2,
        ),
        Family(
            "dualpipe_v",
            "a V, two chunks a rank; forwards of one paired with backwards of the other",
            "DeepSeek-AI 2024, DeepSeek-V3, arXiv:2412.19437, and its DualPipe software",
            dualpipe_v,
            placement="v",
            chunks=2,
            min_chunks=2,
            max_chunks=2,
        ),
        Family(
            "chimera",
            "two pipelines in opposite directions, each with its copy of the weights; half of 1f1b's bubble",
            "Li and Hoefler 2021, Chimera, arXiv:2107.06925",
            chimera,
            placement="both",
            chunks=2,
            min_chunks=2,
            max_chunks=2,
        ),
        Family(
            "cross_region",
            "made for slow links by playing it forward; at 1f1b's peak of activations, zb_h1 where links take no time",
            "Chen et al. 2025, CrossPipe (its UD and UDSub), arXiv:2507.00217",
            cross_region,
            max_chunks=None,
            takes_costs=True,
            takes_cap=True,
        ),
        Family(
            "cross_region_wave",
            "the same on a V, half of the chunks at each visit; shorter fill and drain for twice the messages",
            "Chen et al. 2025, CrossPipe (its Wave), arXiv:2507.00217",
            cross_region_wave,
            placement="v",
            chunks=2,
            min_chunks=2,
            max_chunks=None,
            takes_costs=True,
            takes_cap=True,
        ),
        Family(
            "pipedream_2bw",
            "no flush and no bubbles; two versions of the weights, gradients come one step late",
            "Narayanan et al. 2021, PipeDream-2BW, arXiv:2006.09503",
            pipedream_2bw,
            flush=False,
        ),
        Family(
            "nf1b",
            "no flush and no bubbles; one version of the weights, which changes under what is in flight",
            "Dutta et al. 2024, TiMePReSt, arXiv:2410.14312",
            nf1b,
            group=1,
            flush=False,
        ),
    )
}


def names(*, flush: bool = True) -> tuple[str, ...]:
    """The families with a flush, or those without, the simplest first."""
    return tuple(family.name for family in _FAMILIES.values() if family.flush is flush)


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


def make(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    group: int | None = None,
    costs: Costs | None = None,
    memory_cap: float | None = None,
) -> Schedule:
    """Builds a family's schedule.

    Args:
        ranks: size of the `pipe` axis.
        microbatches: any number from 1; it need not be a multiple of `ranks`.
        chunks: stages a rank; None for the family's own number.
        group: microbatches in a group; None for the family's own number.
        costs: what the order is made for; None for F, I and W of one unit each.
        memory_cap: the most microbatches' activations of 1/P of the model on a rank; None for the family's own.

    Raises:
        ScheduleError: an unknown name, a number that the family cannot have, or an option that it does not take.
    """
    family = describe(name)
    _check_taken(family, "group", group)
    _check_taken(family, "costs", costs)
    _check_taken(family, "memory_cap", memory_cap)
    chunks = family.chunks if chunks is None else chunks
    group = family.group if group is None else group
    for option, value, least in (
        ("ranks", ranks, 1),
        ("microbatches", microbatches, 1),
        ("chunks", chunks, 1 if family.max_chunks == family.min_chunks else family.min_chunks),
        ("group", group, 1),
    ):
        if value is not None and value < least:
            raise ScheduleError(f"{option}={value} is too small for {name}; use {least} or more")
    if "chunks" not in family.options and chunks != family.chunks:
        has = "one stage" if family.chunks == 1 else f"{family.chunks} stages"
        raise ScheduleError(
            f"chunks={chunks}: {name} has {has} a rank; set chunks={family.chunks} or use a schedule with chunks: "
            + ", ".join(_taking("chunks"))
        )
    for option, value, size, most in (
        ("ranks", ranks, ranks, _MOST_STAGES),
        ("chunks", chunks, ranks * chunks, _MOST_STAGES),
        ("microbatches", microbatches, ranks * chunks * microbatches, _MOST_FORWARDS),
    ):
        if size > most:
            raise ScheduleError(f"{option}={value} is too large for {name}; use {most // (size // value)} or less")
    values = {"chunks": chunks, "group": group, "costs": costs or Costs(), "memory_cap": memory_cap}
    return family.build(ranks, microbatches, **{option: values[option] for option in family.options})


def _check_taken(family: Family, option: str, value: object) -> None:
    if value is None or option in family.options:
        return
    takers = _taking(option)
    instead = f"or use {', '.join(takers)}" if takers else "it has no effect"
    raise ScheduleError(f"{option}={value}: {family.name} takes no {option}; leave it out, {instead}")


def _taking(option: str) -> list[str]:
    return [family.name for family in _FAMILIES.values() if option in family.options]

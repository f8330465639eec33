"""The schedule as data: what each rank of the `pipe` axis does, in which order.

A `Schedule` is one list of `Action`s a rank plus the placement of stages on ranks. It holds no
times: `schedules.ticks` says when each action runs in the lock-step program, and
`schedules.simulate` how long that takes for given costs.

The CSV form is PyTorch's compute-only format (`torch.distributed.pipelining`): one row a rank,
cells such as `0F0` (stage 0, forward, microbatch 0), `1B2`, `1I2`, `1W2`; an empty cell is a bubble;
`(0F3;3B1)OVERLAP_F_B` is a pair which the writer ran at once, and which runs here in that order.
One cell is ours alone: `-` is a bubble on purpose, and holds the next action back until the tick of its column.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

__all__ = ["Action", "Kind", "Schedule", "ScheduleError", "forward_only", "from_csv", "split_backward", "to_csv"]


class ScheduleError(ValueError):
    """A schedule that cannot run; the message names rank, action and reason."""


class Kind(StrEnum):
    """What an action computes for one stage and one microbatch."""

    F = "F"  # forward
    B = "B"  # full backward, I and W at once
    I = "I"  # input gradient  # noqa: E741 (the field's own letter)
    W = "W"  # weight gradient
    R = "R"  # recompute

    __hash__ = str.__hash__  # Enum's own is Python code, and every look-up of an Action would run it


class Action(NamedTuple):  # tuples are made, compared and hashed in C; a long schedule has 100,000 of them
    """One stage's work on one microbatch; prints as `0F3`."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """Per-rank action lists and the rank of each stage.

    Attributes:
        name: the family's name, or the file that it came from.
        actions: `actions[rank]` is the rank's list, in execution order, without bubbles.
        placement: `placement[stage]` is the stage's rank.
        pipelines: how many pipelines through the same model share the ranks. Stages 0 to `depth - 1` are the first
            one's, in model order, the next `depth` the second one's, and so on; stages that are `depth` apart hold
            the same layers. A microbatch runs in one pipeline.
        holds: actions and ticks: in lock step the action runs in that tick or later, though it could run earlier, so
            that it meets its like and makes no other tick longer. Ranks that run freely take no notice.
        period: 0 for a schedule that ends with a flush. Otherwise the microbatches of a step, and the lists are one
            step of an endless stream: microbatches from `period` on are this step's, those below are the step before's,
            which had them as `period` more. What an action needs and the lists do not have ran in the step before.
        versions: of the weights, without a flush: 2 where every microbatch keeps to the newest weights of when its step
            began, 1 where every action uses the newest.
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    pipelines: int = 1
    holds: tuple[tuple[Action, int], ...] = ()
    period: int = 0
    versions: int = 1

    @property
    def ranks(self) -> int:
        """Size of the `pipe` axis."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def depth(self) -> int:
        """Stages that a microbatch goes through."""
        return len(self.placement) // self.pipelines

    @cached_property
    def chunks(self) -> int:
        """The most stages that one rank holds."""
        return max(len(self.stages_of(rank)) for rank in range(self.ranks))

    @cached_property
    def microbatches(self) -> int:
        return self.period or 1 + max((action.microbatch for action in self), default=-1)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on a rank, in model order: chunk c of the rank is `stages_of(rank)[c]`."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    @cached_property
    def members(self) -> frozenset[Action]:
        """All actions."""
        return frozenset(self)

    def __iter__(self) -> Iterator[Action]:
        """All actions, rank by rank."""
        for row in self.actions:
            yield from row


def split_backward(schedule: Schedule) -> Schedule:
    """Replaces every full backward `B` by `I` and then `W`.

    In lock step a tick lasts as long as its slowest rank, so a fused backward makes every rank that
    only runs a forward wait for it.
    """
    rows = tuple(
        tuple(
            part
            for action in row
            for part in (
                (Action(action.stage, Kind.I, action.microbatch), Action(action.stage, Kind.W, action.microbatch))
                if action.kind is Kind.B
                else (action,)
            )
        )
        for row in schedule.actions
    )
    fused = {action for action in schedule if action.kind is Kind.B}
    holds = tuple((held._replace(kind=Kind.I) if held in fused else held, tick) for held, tick in schedule.holds)
    return replace(schedule, actions=rows, holds=holds)


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule that ends with a flush, in its order and on its ranks, without the backwards."""
    rows = tuple(tuple(action for action in row if action.kind is Kind.F) for row in schedule.actions)
    return replace(schedule, actions=rows, holds=())


_CELL = re.compile(r"([0-9]{1,6})\s*([A-Z_]+?)\s*([0-9]{1,6})")
_PAIR = re.compile(r"\(\s*(.+?)\s*;\s*(.+?)\s*\)\s*OVERLAP_F_B")
_HOLD = "-"
_PYTORCH_ONLY = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")


def from_csv(text: str, name: str = "csv") -> Schedule:
    """Reads a compute-only CSV; the placement is read off the rows, and so is the number of pipelines.

    Raises:
        ScheduleError: a cell that is no action, a stage on two ranks, or a gap in the stages.
    """
    rows: list[tuple[Action, ...]] = []
    holds: list[tuple[Action, int]] = []
    try:
        # Blank lines are no ranks; a line of commas is a rank of bubbles. Spreadsheets write a byte order mark.
        for cells in filter(None, csv.reader(io.StringIO(text.removeprefix("\ufeff")))):
            row = tuple(_parse_row(cells, len(rows)))
            rows.append(tuple(action for action, _ in row))
            holds += ((action, tick) for action, tick in row if tick)
    except csv.Error as error:
        raise ScheduleError(f"rank {len(rows)}: {error}; write one row a rank, with cells such as 0F0") from None
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise ScheduleError("the file holds no action; write one row a rank, with cells such as 0F0, 0I0, 0W0")
    placement = _placement_of(rows)
    return Schedule(name, tuple(rows), placement, _pipelines_of(rows, len(placement)), tuple(holds))


def _parse_row(cells: list[str], rank: int) -> Iterator[tuple[Action, int]]:
    """The actions, each with the tick until which it is held back; 0 if it is not."""
    held = False
    for column, cell in enumerate(cells):
        cell = cell.strip()
        if cell in ("", _HOLD):
            held |= cell == _HOLD
            continue
        pair = _PAIR.fullmatch(cell)
        for part in pair.groups() if pair else (cell,):
            yield _parse_action(part, rank, column), column if held else 0
            held = False


def _parse_action(text: str, rank: int, column: int) -> Action:
    where = f"rank {rank}, cell {column + 1}: {text if len(text) <= 40 else text[:40] + '...'!r}"
    match = _CELL.fullmatch(text)
    if match and match[2] in Kind.__members__:
        return Action(int(match[1]), Kind(match[2]), int(match[3]))
    if any(word in text for word in _PYTORCH_ONLY):
        raise ScheduleError(
            f"{where} is communication; export the compute-only form (sends and receives follow from the placement)"
        )
    raise ScheduleError(f"{where} is not an action; write stage, one of F B I W, microbatch, as in 0F3")


def _placement_of(rows: Iterable[tuple[Action, ...]]) -> tuple[int, ...]:
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            first = owner.setdefault(action.stage, rank)
            if first != rank:
                raise ScheduleError(
                    f"rank {rank}, action {action}: stage {action.stage} is on rank {first} already; "
                    "a stage runs on one rank"
                )
    missing = next((stage for stage in range(len(owner)) if stage not in owner), None)
    if missing is not None:
        raise ScheduleError(f"stage {missing} is on no rank; stages are numbered 0, 1, 2, ... without gaps")
    return tuple(owner[stage] for stage in range(len(owner)))


def _pipelines_of(rows: Iterable[tuple[Action, ...]], stages: int) -> int:
    """More than one where the stages fall into blocks of equal size and every microbatch runs in one of them."""
    visited: dict[int, set[int]] = {}
    for row in rows:
        for action in row:
            visited.setdefault(action.microbatch, set()).add(action.stage)
    depth = len(next(iter(visited.values())))
    blocks = [set(range(first, first + depth)) for first in range(0, stages, depth)]
    return len(blocks) if all(some in blocks for some in visited.values()) else 1


def to_csv(schedule: Schedule, columns: Iterable[Iterable[Action | None]] | None = None) -> str:
    """Writes the compute-only CSV.

    Args:
        columns: per-rank cells with None for a bubble (a timeline); by default the bare lists, which hold nothing back.
    """
    held = {action for action, _ in schedule.holds}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in columns if columns is not None else schedule.actions:
        cells = list(row)
        bubbles = (_HOLD if after in held else "" for after in (*cells[1:], None))
        writer.writerow(bubble if cell is None else str(cell) for cell, bubble in zip(cells, bubbles, strict=True))
    return out.getvalue()

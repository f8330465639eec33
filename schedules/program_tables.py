"""A schedule as the integer tables that its program reads, and the branches that the tables choose from.

Shapes: T ticks, P ranks, V chunks a rank, J layers a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from schedules.actions import Schedule
from schedules.buffers import LIFETIMES, RECOMPUTE_LIFETIMES
from schedules.remat import Remat
from schedules.slots import Lifetime, build_table
from schedules.stages import StageKind, StageLayout
from schedules.validate import recomputing_stages

__all__ = ["Branch", "ProgramTables"]

Branch = tuple[int, tuple[StageKind, int, str]]
"""An action (an index of `TickTable.KINDS`), the stage's kind, its chunk, and the block that its layers are."""


class ProgramTables:
    """One schedule for one number of layers.

    Args:
        schedule: validated. A stage that has R for its microbatches recomputes there, otherwise in I or B.
        layers: number of layers of the model.
        remat: applied to every layer, or one for each stage. A buffer is as large on every rank as the busiest one
            needs, and each policy has its own.
        unroll: whether a stage's layers are separate code (faster, compiles longer) or a scan. By default
            they are unrolled up to 8 layers a rank.
        vocab_parallel: every rank runs its part of embedding and head for each microbatch, in the tick of the first
            stage's F and I and of the last stage's F. Otherwise the first stage runs the embedding and the last one
            the head.

    Attributes:
        layout: which layers are where.
        ways: how layers are treated, a remat policy and whether R is apart; by name, "layer", "layer1", ...
        block_of: `block_of[stage]` is the name of the stage's way.
        lifetimes: of what waits in slots, by `schedules.buffers.LifetimeKey`.
        table: the tick table.
        branches: of the switch, after the idle one.
        period, versions: the schedule's, where it has no flush.
        end_ranks: the rank of the first and of the last stage of each pipeline.
        ranks, chunks, places: P, V with the borrowed chunks, J.
    """

    def __init__(
        self,
        schedule: Schedule,
        layers: int,
        remat: Remat | Sequence[Remat],
        *,
        unroll: bool | None = None,
        vocab_parallel: bool = False,
    ):
        self.vocab_parallel = vocab_parallel
        self.period, self.versions = schedule.period, schedule.versions
        self.end_ranks = [
            (schedule.placement[first], schedule.placement[first + schedule.depth - 1])
            for first in range(0, schedule.stages, schedule.depth)
        ]
        self.layout = StageLayout.of(schedule, layers)
        self.ranks, self.chunks, self.places = self.layout.numbers.shape
        self.unroll = self.chunks * self.places <= 8 if unroll is None else unroll

        apart = recomputing_stages(schedule)
        remats = [remat] * schedule.stages if isinstance(remat, Remat) else remat
        ways = [(one, stage in apart) for stage, one in enumerate(remats)]
        self.ways = {f"layer{n or ''}": way for n, way in enumerate(dict.fromkeys(ways))}
        self.block_of = tuple(next(name for name, one in self.ways.items() if one == way) for way in ways)

        kinds = self.layout.kinds()
        if vocab_parallel:
            kinds = [(False, count, False) for _, count, _ in kinds]
        self.lifetimes = self._lifetimes(kinds)
        self.table = build_table(schedule, self.lifetimes.values(), ends=vocab_parallel)

        # A branch is an action for a kind of stage and, where code is specific to it, a chunk.
        chunks = self.layout.chunk_of if self.unroll else (0,) * len(kinds)
        variants = list(zip(kinds, chunks, self.block_of, strict=True))
        cells = [
            (int(action), variants[stage]) if action else None
            for action, stage in zip(self.table.kind.reshape(-1), self.table.stage.reshape(-1), strict=True)
        ]
        self.branches: list[Branch] = sorted({cell for cell in cells if cell})
        index = {branch: 1 + position for position, branch in enumerate(self.branches)}
        self._branch = np.array([index[cell] if cell else 0 for cell in cells], np.int32).reshape(self.table.kind.shape)

    def _lifetimes(self, kinds: Sequence[StageKind]) -> dict[Any, Lifetime]:
        stages = {
            "first": frozenset(stage for stage, (has_first, _, _) in enumerate(kinds) if has_first),
            **{
                name: frozenset(s for s, (_, count, _) in enumerate(kinds) if count and self.block_of[s] == name)
                for name in self.ways
            },
            "last": frozenset(stage for stage, (_, _, has_last) in enumerate(kinds) if has_last),
        }
        return {
            (block, start, end): Lifetime(having, start, end)
            for block, having in stages.items()
            for start, end in (*LIFETIMES, *(RECOMPUTE_LIFETIMES if self._apart(block) else ()))
        }

    def _apart(self, block: str) -> bool:
        return block in self.ways and self.ways[block][1]

    @property
    def branch_count(self) -> int:
        """Branches of the switch, the idle one included."""
        return 1 + len(self.branches)

    def rows(self) -> dict[str, Any]:
        """The tick table as the arrays that the program scans over, [T, P] each; an input of the program."""
        table = self.table
        return {
            "branch": self._branch,
            "microbatch": table.microbatch,
            "chunk": np.asarray(self.layout.chunk_of, np.int32)[table.stage],
            "read": table.read,
            "receive": list(table.receive),
            "slots": [table.slots[lifetime] for lifetime in self.lifetimes.values()],
            "ends": asdict(table.ends) if table.ends else {},
        }

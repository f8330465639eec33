"""A schedule as the integer tables that its program reads, and the branches that the tables choose from.

Shapes: T ticks, P ranks, V chunks a rank, J layers a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from schedules.actions import Kind, Schedule, ScheduleError
from schedules.buffers import LIFETIMES, RECOMPUTE_LIFETIMES
from schedules.remat import Remat
from schedules.slots import Lifetime, build_table
from schedules.stages import LayerRun, StageLayout
from schedules.validate import recomputing_stages

__all__ = ["Branch", "ProgramTables", "StageCode", "Way"]


class StageCode(NamedTuple):
    """What a stage runs.

    Attributes:
        first, last: whether it has the embedding, and the head.
        runs: its layers.
        chunk: its chunk where code is specific to it, otherwise 0.
    """

    first: bool
    runs: tuple[LayerRun, ...]
    last: bool
    chunk: int


Branch = tuple[int, StageCode]
"""An action (an index of `TickTable.KINDS`), and what its stage runs."""


class Way(NamedTuple):
    """How layers are treated.

    Attributes:
        remat: the policy.
        apart: whether R is an action of its own.
        parts: the parts of the layers' parameters that are not in every layer.
    """

    remat: Remat
    apart: bool
    parts: frozenset[str] = frozenset()


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
        holders: see `schedules.stages.StageLayout`.

    Attributes:
        layout: which layers are where.
        ways: how layers are treated; by name, "layer", "layer1", ...
        treatment: the remat policy of each stage, and whether it has R.
        runs: `runs[stage]` are the stage's layers, their code being named as their way.
        lifetimes: of what waits in slots, by `schedules.buffers.LifetimeKey`.
        table: the tick table.
        branches: of the switch, after the idle one.
        period, versions: the schedule's, where it has no flush.
        has_backward: whether the schedule has any; without, the program computes the loss alone.
        end_ranks: the rank of the first and of the last stage of each pipeline.
        ranks, chunks, places: P, V with the borrowed chunks, J.
        block_places: the most layers of a way that a stage has, by the way's name.
    """

    def __init__(
        self,
        schedule: Schedule,
        layers: int,
        remat: Remat | Sequence[Remat],
        *,
        unroll: bool | None = None,
        vocab_parallel: bool = False,
        holders: Mapping[str, tuple[int, ...]] | None = None,
    ):
        self.vocab_parallel = vocab_parallel
        self.period, self.versions = schedule.period, schedule.versions
        self.has_backward = any(action.kind is not Kind.F for action in schedule)
        if vocab_parallel and not self.has_backward:
            raise ScheduleError("without a backward, embedding and head run on the first and the last stage alone")
        self.end_ranks = [
            (schedule.placement[first], schedule.placement[first + schedule.depth - 1])
            for first in range(0, schedule.stages, schedule.depth)
        ]
        self.layout = StageLayout.of(schedule, layers, holders)
        self.ranks, self.chunks, self.places = self.layout.numbers.shape
        self.unroll = self.chunks * self.places <= 8 if unroll is None else unroll

        apart = recomputing_stages(schedule)
        remats = [remat] * schedule.stages if isinstance(remat, Remat) else remat
        self.treatment = tuple((one, stage in apart) for stage, one in enumerate(remats))
        signatures = list(dict.fromkeys(map(self.layout.signature, range(layers)))) or [frozenset()]
        of_stage = [{parts: Way(*treatment, parts) for parts in signatures} for treatment in self.treatment]
        names = dict.fromkeys(way for ways in of_stage for way in ways.values())
        named = {way: f"layer{number or ''}" for number, way in enumerate(names)}
        self.ways = {name: way for way, name in named.items()}
        self.runs = tuple(
            self.layout.runs(stage, {parts: named[way] for parts, way in ways.items()})
            for stage, ways in enumerate(of_stage)
        )
        self.block_places = {
            name: max(1, *(sum(run.count for run in runs if run.block == name) for runs in self.runs))
            for name in self.ways
        }

        # Code is specific to a chunk where layers are unrolled.
        chunks = self.layout.chunk_of if self.unroll else (0,) * schedule.stages
        ends = [(first and not vocab_parallel, last and not vocab_parallel) for first, _, last in self.layout.kinds()]
        codes = [
            StageCode(first, runs, last, chunk)
            for (first, last), runs, chunk in zip(ends, self.runs, chunks, strict=True)
        ]
        self.lifetimes = self._lifetimes(codes)
        self.table = build_table(schedule, self.lifetimes.values(), ends=vocab_parallel)

        cells = [
            (int(action), codes[stage]) if action else None
            for action, stage in zip(self.table.kind.reshape(-1), self.table.stage.reshape(-1), strict=True)
        ]
        self.branches: list[Branch] = sorted({cell for cell in cells if cell})
        index = {branch: 1 + position for position, branch in enumerate(self.branches)}
        self._branch = np.array([index[cell] if cell else 0 for cell in cells], np.int32).reshape(self.table.kind.shape)

    def _lifetimes(self, codes: Sequence[StageCode]) -> dict[Any, Lifetime]:
        stages = {
            "first": frozenset(stage for stage, code in enumerate(codes) if code.first),
            **{
                name: frozenset(s for s, code in enumerate(codes) if any(run.block == name for run in code.runs))
                for name in self.ways
            },
            "last": frozenset(stage for stage, code in enumerate(codes) if code.last),
        }
        if not self.has_backward:
            return {}
        return {
            (block, start, end): Lifetime(having, start, end)
            for block, having in stages.items()
            for start, end in (*LIFETIMES, *(RECOMPUTE_LIFETIMES if self._apart(block) else ()))
        }

    def _apart(self, block: str) -> bool:
        return block in self.ways and self.ways[block].apart

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

"""`pipeline.remat: auto`: what each stage keeps, recomputes, and where, for the least lock-step time within a cap.

A stage has a *way*: a remat policy, and whether what it recomputes has an action of its own, R, or is in I or B. Slots
are the program's own count: every way has its buffers, as large on every rank as the busiest one needs, so different
ways cost memory as well as save it. In lock step a tick lasts as long as its slowest rank: what one stage recomputes
beside a longer action of another costs nothing.

What is looked at does not depend on the cap, and the fastest that fits is taken: a larger cap is never slower. With few
stages it is every combination; otherwise one way for all stages, two ways with the stages that hold most
on one side, and then, from the best in time or memory, changes of one stage at a time, until nothing is better or
the effort is spent. The effort is counted, so the choice does not depend on the machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from meshsys.blocks import block_actions, cut_blocks, tensor_parts
from meshsys.errors import ConfigError
from models import SAVEABLE_NAMES, ModelConfig
from schedules.actions import Kind, Schedule
from schedules.backward import SplitBlock
from schedules.costs import Costs
from schedules.recompute import FARTHEST, insert_recompute
from schedules.remat import Remat
from schedules.simulate import simulate
from schedules.slots import TickTable, build_table, waits
from schedules.stages import StageLayout

__all__ = ["POLICIES", "Outcome", "RematChoice", "RematSpace", "Way", "choose_remat"]

POLICIES = (
    "none",
    "dots",
    "names:query_proj,key_proj,value_proj,context,mlpwi_0,mlpwi_1",
    "names:context,mlpwi_0,mlpwi_1",
    "names:query_proj,key_proj,value_proj,context",
    "full",
)
"""From everything kept to everything recomputed. `offload` is not among them: costs have no time for its transfers."""

_EVERY = 1000  # combinations that are all looked at, if there are no more
_MOST = 2000  # combinations otherwise
_EFFORT = 200_000  # actions of the schedules that are laid out to place R

Waits = Mapping[tuple[Kind, Kind], int]
"""Bytes that wait from one action to another, of one microbatch and block."""


@dataclass(frozen=True)
class Way:
    """How a stage's layers are treated.

    Attributes:
        remat: the policy.
        apart: R is an action of its own.
        waits: of one layer.
        again: FLOPs of matrix products that one layer recomputes.
    """

    remat: Remat
    apart: bool
    waits: Waits
    again: float


@dataclass(frozen=True)
class Outcome:
    """What one choice comes to.

    Attributes:
        bytes: of slots on each device: residuals, recomputed values, stash and inbox.
        makespan: in lock step, in the unit of the costs.
    """

    bytes: int
    makespan: float


@dataclass(frozen=True)
class RematChoice:
    """The choice, and what two policies for all stages would come to.

    Attributes:
        schedule: with R actions.
        remats: one for each stage of the schedule.
        costs: of its actions, with what they recompute: `pipeline.costs`, or forwards of one layer by FLOPs.
        cap: `pipeline.activation_memory` in bytes.
        keep_all: `pipeline.remat=none`.
        full: `pipeline.remat=full`.
    """

    schedule: Schedule
    remats: tuple[Remat, ...]
    costs: Costs
    cap: int
    outcome: Outcome
    keep_all: Outcome
    full: Outcome


@dataclass(frozen=True)
class _Found:
    """A combination of ways, one for each stage that a microbatch goes through, in an order of actions."""

    ways: tuple[int, ...]
    form: int
    ahead: int
    outcome: Outcome
    work: float

    @property
    def rank(self) -> tuple:
        """The fastest first; of equals what recomputes the least, then what takes the least memory."""
        place = self.form, self.ahead, self.ways
        # Not all that is recomputed is a product: the later in `POLICIES`, the more.
        return self.outcome.makespan, self.work, sum(self.ways), self.outcome.bytes, place


def choose_remat(space: RematSpace, cap: int, said: str | int | None = None) -> RematChoice:
    """The fastest of the space that fits.

    Args:
        said: the cap as the user wrote it.

    Raises:
        ConfigError: nothing does; names the least that would.
    """
    fits = [one for one in space.found if one.outcome.bytes <= cap]
    if not fits:
        least = min(one.outcome.bytes for one in space.found)
        raise ConfigError(
            f"pipeline.activation_memory={said or cap} is too small: at least {least} bytes wait in slots; set "
            f"pipeline.activation_memory={least} or more, more pipeline.microbatches, or a schedule that holds fewer"
        )
    best = min(fits, key=lambda one: one.rank)
    schedule = space.order(best.form, space.apart(best.ways), best.ahead).schedule
    ways = [space.ways[way] for way in best.ways] * schedule.pipelines
    return RematChoice(
        schedule,
        tuple(way.remat for way in ways),
        space.costs(best.ways),
        cap,
        best.outcome,
        *(space.outcome(space.uniform(way), form, 0) for way, form in ((0, 0), (space.full, -1))),
    )


class RematSpace:
    """Every choice for one model and schedule.

    Args:
        schedules: without R; the same order in one or two forms, with I and W and with full backwards.
        costs: times of the actions without remat, R being what `full` recomputes (0 for as long as F by FLOPs); None to
            take times by FLOPs of matrix products, one being a layer's forward.
        model, sequences, length: the model, and one device's share of a microbatch.
        tensor: devices that share each layer's matrices.
        spread: every rank has its part of embedding and head.
    """

    def __init__(
        self,
        schedules: Sequence[Schedule],
        costs: Costs | None,
        model: ModelConfig,
        sequences: int,
        length: int,
        *,
        tensor: int = 1,
        spread: bool = False,
    ):
        self._schedules, self._spread = schedules, spread
        self._depth = schedules[0].depth
        layout = StageLayout.of(schedules[0], model.layers)
        kinds = layout.kinds()[: self._depth]
        self._layers = [count for _, count, _ in kinds]
        self._places = layout.table.shape[2]
        size = model, sequences, length

        def waiting(block: SplitBlock) -> Waits:
            found: dict[tuple[Kind, Kind], int] = {}
            for start, values in ((Kind.F, block.residuals), (Kind.R, block.recomputed), (Kind.I, block.stash)):
                for value in values:
                    parts = tensor_parts(value.aval.shape, model, tensor)
                    found[start, value.until] = found.get((start, value.until), 0) + value.bytes // parts
            return found

        flops = {where: action.flops for where, action in block_actions(*size, Remat("none")).items()}
        self.ways: list[Way] = []
        for text in POLICIES:
            remat = Remat.parse(text, SAVEABLE_NAMES)
            again = block_actions(*size, remat)["layer", Kind.I].flops - flops["layer", Kind.I]
            for apart in (False, True) if again else (False,):
                self.ways.append(Way(remat, apart, waiting(cut_blocks(*size, remat, apart).layer), again))
        full = [number for number, way in enumerate(self.ways) if way.remat.kind == "full"]
        self.full, self.full_apart = full  # inside I or B, and in R

        blocks = cut_blocks(*size, Remat("none"))
        self._x = blocks.x.size * blocks.x.dtype.itemsize
        self._ends = [] if spread else [(waiting(blocks.first), 0), (waiting(blocks.last), self._depth - 1)]

        def of_stage(kind: Kind) -> list[float]:
            ends = [0.0 if spread else f * flops["first", kind] + e * flops["last", kind] for f, _, e in kinds]
            return [count * flops["layer", kind] + end for count, end in zip(self._layers, ends, strict=True)]

        unit = flops["layer", Kind.F]
        self._links = costs or Costs()
        if costs is None:
            forward, backward, weight = (
                tuple(flop / unit for flop in of_stage(kind)) for kind in (Kind.F, Kind.I, Kind.W)
            )
            costs = Costs(forward, backward, weight)
        self._times = {
            kind: np.array([costs.time(kind, stage) for stage in range(self._depth)])
            for kind in (Kind.F, Kind.I, Kind.W, Kind.B)
        }
        # The time of what a stage recomputes under each way, [ways, stages].
        by_forward = self._times[Kind.F] / np.maximum(of_stage(Kind.F), 1.0)
        given = np.array([costs.time(Kind.R, stage) for stage in range(self._depth)])
        rate = np.where(given > 0, given / (np.maximum(self._layers, 1) * self.ways[self.full].again), by_forward)
        self._again = np.array([way.again for way in self.ways])[:, None] * (np.array(self._layers) * rate)
        self._orders: dict[tuple[int, frozenset[int], int], _Order] = {}
        self._effort = 0

    # --- One combination ------------------------------------------------------------------------------------------

    def uniform(self, way: int) -> tuple[int, ...]:
        """One way for all stages that have layers; the others have nothing to recompute."""
        return tuple(way if count else 0 for count in self._layers)

    def apart(self, ways: Sequence[int]) -> frozenset[int]:
        """The stages with R, of all pipelines."""
        stages = range(self._schedules[0].stages)
        return frozenset(stage for stage in stages if self.ways[ways[stage % self._depth]].apart)

    def order(self, form: int, apart: frozenset[int], ahead: int) -> _Order:
        """A form of the schedule with R for these stages, `ahead` actions before their backward."""
        form %= len(self._schedules)
        key = form, apart, ahead
        if key not in self._orders:
            schedule = self._schedules[form]
            schedule = insert_recompute(schedule, apart, ahead) if apart else schedule
            self._orders[key] = _Order(schedule, self._spread, self._links)
            self._effort += self._orders[key].length
        return self._orders[key]

    def costs(self, ways: Sequence[int]) -> Costs:
        """Of the schedule's actions, with what they recompute."""
        times: dict[str, Any] = {kind: tuple(time.tolist()) for kind, time in self._with_recompute(ways).items()}
        return replace(self._links, stages=(), **times)

    def outcome(self, ways: Sequence[int], form: int, ahead: int) -> Outcome:
        """What a combination comes to."""
        order = self.order(form, self.apart(ways), ahead)
        size = (order.inbox + 1) * self._x
        for block, stage in self._ends:
            size += order.bytes(block, frozenset({stage}))
        for way in set(ways):
            having = frozenset(stage for stage, one in enumerate(ways) if one == way and self._layers[stage])
            size += self._places * order.bytes(self.ways[way].waits, having)
        return Outcome(size, order.makespan(self._with_recompute(ways)))

    def _with_recompute(self, ways: Sequence[int]) -> dict[Kind, np.ndarray]:
        again = self._again[list(ways), range(self._depth)]
        apart = np.array([self.ways[way].apart for way in ways])
        inside = np.where(apart, 0.0, again)
        more = {Kind.I: inside, Kind.B: inside}
        times = {kind: times + more.get(kind, 0.0) for kind, times in self._times.items()}
        return times | {Kind.R: np.where(apart, again, 0.0)}

    # --- All that are looked at -----------------------------------------------------------------------------------

    @cached_property
    def found(self) -> list[_Found]:
        """Every combination that was looked at."""
        found: dict[tuple[int, ...], list[_Found]] = {}
        used = [stage for stage, count in enumerate(self._layers) if count]
        ways = range(len(self.ways))
        if len(ways) ** len(used) <= _EVERY:
            self._look(found, (self._at(used, one) for one in itertools.product(ways, repeat=len(used))))
            return [one for each in found.values() for one in each]
        self._look(found, map(self.uniform, ways))
        self._look(found, self._two_ways(used))
        before = 0
        while before < len(found) < _MOST:
            before = len(found)
            self._look(found, self._changes(used, _front(one for each in found.values() for one in each)))
        return [one for each in found.values() for one in each]

    def _at(self, used: Sequence[int], ways: Sequence[int]) -> tuple[int, ...]:
        found = [0] * self._depth
        for stage, way in zip(used, ways, strict=True):
            found[stage] = way
        return tuple(found)

    def _two_ways(self, used: Sequence[int]) -> Iterable[tuple[int, ...]]:
        """One way for the stages that hold the most microbatches, another for the rest."""
        order = self.order(0, frozenset(), 0)
        held = sorted(used, key=lambda stage: (-order.slots(Kind.F, Kind.W, frozenset({stage})), stage))
        for most in range(1, len(held)):
            for one, other in itertools.permutations(range(len(self.ways)), 2):
                rest = [one if place < most else other for place in range(len(held))]
                yield self._at(held, rest)

    def _changes(self, used: Sequence[int], front: Iterable[_Found]) -> Iterable[tuple[int, ...]]:
        for one in front:
            for stage, way in itertools.product(used, range(len(self.ways))):
                yield (*one.ways[:stage], way, *one.ways[stage + 1 :])

    def _look(self, found: dict[tuple[int, ...], list[_Found]], combinations: Iterable[tuple[int, ...]]) -> None:
        for ways in combinations:
            if ways in found or len(found) >= _MOST:
                continue
            apart = self.apart(ways)
            work = float(self._again[list(ways), range(self._depth)].sum())
            each = found[ways] = []
            for form, ahead in itertools.product(range(len(self._schedules)), range(1 + FARTHEST if apart else 1)):
                if not apart or (form, apart, ahead) in self._orders or self._effort < _EFFORT:
                    each.append(_Found(ways, form, ahead, self.outcome(ways, form, ahead), work))


def _front(found: Iterable[_Found]) -> list[_Found]:
    """Those that nothing beats in both time and memory, the fastest first."""
    front: list[_Found] = []
    for one in sorted(found, key=lambda one: one.rank):
        if not front or one.outcome.bytes < front[-1].outcome.bytes:
            front.append(one)
    return front


class _Order:
    """A schedule in lock step: its length for given times, and slots for given stages (those of one pipeline)."""

    def __init__(self, schedule: Schedule, spread: bool, costs: Costs):
        table = build_table(schedule, ends=spread)
        self.schedule, self.inbox, self.length = schedule, table.inbox_slots, int((table.kind > 0).sum())
        self._kind, self._stage = table.kind, table.stage % schedule.depth
        self._sending = simulate(schedule, replace(costs, F=0.0, I=0.0, W=0.0, B=0.0, R=0.0)).makespan
        self._rank = np.array([[owner == rank for owner in schedule.placement] for rank in range(schedule.ranks)])
        self._waiting: dict[tuple[Kind, Kind], np.ndarray] = {}
        self._slots: dict[tuple[Kind, Kind, frozenset[int]], int] = {}

    def makespan(self, times: Mapping[Kind, np.ndarray]) -> float:
        """As `simulate` has it; `times[kind]` is [stages of one pipeline]."""
        idle = np.zeros(self.schedule.depth)
        of = np.stack([idle if kind is None else times[kind] for kind in TickTable.KINDS])
        return self._sending + float(of[self._kind, self._stage].max(1).sum())

    def bytes(self, block: Waits, stages: frozenset[int]) -> int:
        """All slots of a block on these stages."""
        return sum(size * self.slots(*span, stages) for span, size in block.items())

    def slots(self, start: Kind, end: Kind, stages: frozenset[int]) -> int:
        """What `build_table` counts, without the slots themselves: intervals need as many as overlap."""
        key = start, end, stages
        if key not in self._slots:
            depth = self.schedule.depth
            having = np.array([stage % depth in stages for stage in range(self.schedule.stages)])
            self._slots[key] = int(((self._rank & having).astype(np.int32) @ self._overlap(start, end)).max())
        return self._slots[key]

    def _overlap(self, start: Kind, end: Kind) -> np.ndarray:
        """How many microbatches of each stage wait in each tick, [stages, ticks]."""
        if (start, end) not in self._waiting:
            change = np.zeros((self.schedule.stages, len(self._kind) + 1), np.int32)
            for stage, first, last in waits(self.schedule, start, end):
                change[stage, first] += 1
                change[stage, last + 1] -= 1
            self._waiting[start, end] = change.cumsum(1)
        return self._waiting[start, end]

"""What is asked of a search, and its numbers as arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from schedules.actions import Kind, ScheduleError
from schedules.costs import Costs
from schedules.simulate import Timing

__all__ = ["KINDS", "Question", "Shape"]

KINDS = (Kind.F, Kind.I, Kind.W)

# Far above what a search is of use for; they keep a slip of the finger from filling the memory.
_MOST_STAGES = 1 << 8
_MOST_FORWARDS = 1 << 16


@dataclass(frozen=True)
class Question:
    """Which schedule is wanted.

    Attributes:
        ranks: size of the `pipe` axis.
        microbatches: in a step.
        costs: times of F, I and W, and of transfers.
        memory_cap: the most microbatch activations that a rank may hold. A (stage, microbatch) pair counts
            1 / chunks, from F to W; the first rank of 1f1b holds as many as there are ranks.
        timing: as in `schedules.simulate`.
        chunks: stages a rank; see `placements`.
        seconds: the effort. It is counted in operations, not in time, so that the answer does not depend on how
            busy the machine is; a slow machine takes longer.
        seed: of the random choices. The same question has the same answer.
    """

    ranks: int
    microbatches: int
    costs: Costs = field(default_factory=Costs)
    memory_cap: float = math.inf
    timing: Timing = "lockstep"
    chunks: int = 1
    seconds: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        for option in ("ranks", "microbatches", "chunks"):
            if getattr(self, option) < 1:
                raise ScheduleError(f"{option}={getattr(self, option)} is too small for a search; use 1 or more")
        stages = self.ranks * self.chunks
        for option, size, most in (
            ("ranks", stages, _MOST_STAGES),
            ("microbatches", stages * self.microbatches, _MOST_FORWARDS),
        ):
            if size > most:
                value = getattr(self, option)
                raise ScheduleError(f"{option}={value} is too large for a search; use {most * value // size} or less")
        if self.timing not in ("lockstep", "asynchronous"):
            raise ScheduleError(f"timing={self.timing!r} is unknown; use lockstep or asynchronous")
        if not self.memory_cap >= 1:
            raise ScheduleError(
                f"memory_cap={self.memory_cap:g} is below the activations of one microbatch; use 1 or more "
                f"(1f1b holds {self.ranks})"
            )
        if not 0 < self.seconds < math.inf:
            raise ScheduleError(f"seconds={self.seconds:g} is no effort; use a number above 0")
        self.costs.check(stages, self.ranks)

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def placements(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of the stages, as may be chosen: in waves (down the ranks, up, down, ...), or always down."""
        there = range(self.ranks)
        loop = tuple(rank for _ in range(self.chunks) for rank in there)
        wave = tuple(rank for chunk in range(self.chunks) for rank in (reversed(there) if chunk % 2 else there))
        return (wave,) if wave == loop else (wave, loop)


class Shape:
    """A question and a placement as arrays over the Q = ranks x chunks stages, here ordered by rank, then by chunk.

    Attributes:
        placement: the rank of each stage.
        P, V, Q, M: ranks, chunks, stages, microbatches.
        column: the column of each stage in model order.
        before, after: [Q] columns of the previous and of the next stage; Q where there is none.
        times: [Q, 3] of F, I and W.
        delay_before, delay_after: [Q] from the end of the previous stage's F, or of the next stage's I, to its
            arrival here; in lock step 0, as there every tick includes a transfer.
        pairs: the most (stage, microbatch) pairs that a rank may hold.
        room: [Q] a forward may start where the rank holds fewer pairs than this. The later chunks' forwards keep
            some to themselves: early ones could otherwise take all, and none would ever come to its backward.
    """

    def __init__(self, question: Question, placement: tuple[int, ...]) -> None:
        costs = question.costs
        self.placement = placement
        self.P, self.V, self.Q, self.M = question.ranks, question.chunks, question.stages, question.microbatches
        by_rank = sorted(range(self.Q), key=lambda stage: (placement[stage], stage))
        self.column = np.argsort(by_rank)
        self.before = np.full(self.Q, self.Q)
        self.after = np.full(self.Q, self.Q)
        for early, late in zip(self.column, self.column[1:], strict=False):
            self.before[late], self.after[early] = early, late
        self.times = np.array([[costs.time(kind, stage) for kind in KINDS] for stage in by_rank])
        self.delay_before, self.delay_after = np.zeros(self.Q), np.zeros(self.Q)
        hops = [(stage, stage + 1) for stage in range(self.Q - 1) if placement[stage] != placement[stage + 1]]
        there = {hop: costs.link(placement[hop[0]], placement[hop[1]]).delay for hop in hops}
        back = {hop: costs.link(placement[hop[1]], placement[hop[0]]).delay for hop in hops}
        if question.timing == "lockstep":
            self.times += max([*there.values(), *back.values()], default=0.0)
        else:
            for (early, late), delay in there.items():
                self.delay_before[self.column[late]] = delay
                self.delay_after[self.column[early]] = back[early, late]
        most = self.V * self.M
        self.pairs = most if question.memory_cap * self.V >= most else math.floor(question.memory_cap * self.V)
        self.room = np.tile(self.pairs - (self.V - 1 - np.arange(self.V)), self.P)

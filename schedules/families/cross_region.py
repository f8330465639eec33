"""Schedules for slow links: CrossPipe's greedy (Chen et al. 2025, arXiv:2507.00217, algorithm 1).

The greedy plays the schedule forward in time for given costs: whenever a rank is free, it takes the best action whose
input has arrived, where messages queue on their links. Where the paper has one rule for what is best, several are
played here, and the schedule with the least makespan is kept.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import product

from schedules.actions import Action, Kind, Schedule, ScheduleError
from schedules.costs import Costs, Link

__all__ = ["cross_region", "cross_region_wave"]


def cross_region(
    ranks: int, microbatches: int, chunks: int = 1, costs: Costs | None = None, *, memory_cap: float | None = None
) -> Schedule:
    """UD: a microbatch goes through the ranks once; the `chunks` of a rank are successive stages (the paper's UDSub).

    Two messages of each microbatch cross a link, which is the fewest, so this is the form for the slowest links. With
    more chunks the weight gradients come in smaller parts, which fit into smaller gaps and free memory sooner.

    Args:
        costs: times of each stage and link; by default those of `Costs()`, where links take no time.
        memory_cap: the most microbatches' activations of 1/P of the model on any rank; by default `ranks`, which
            is what the first rank of 1f1b holds.

    Raises:
        ScheduleError: a memory_cap below 1, or costs of other stages or ranks.
    """
    placement = tuple(stage // chunks for stage in range(ranks * chunks))
    return _best(
        "cross_region", ranks, microbatches, placement, costs or Costs(), ranks if memory_cap is None else memory_cap
    )


def cross_region_wave(
    ranks: int, microbatches: int, chunks: int = 2, costs: Costs | None = None, *, memory_cap: float | None = None
) -> Schedule:
    """Wave: a microbatch goes through the ranks and back (V placement), through `chunks / 2` stages at each visit.

    Fill and drain are shorter than UD's, but four messages of each microbatch cross a link: the form for
    links whose bandwidth is not the limit. Arguments and errors are those of `cross_region`.
    """
    if chunks % 2:
        raise ScheduleError(
            f"chunks={chunks} is odd, and cross_region_wave visits a rank twice; use {chunks + 1}, or cross_region"
        )
    there = tuple(stage // (chunks // 2) for stage in range(ranks * chunks // 2))
    placement = there + there[::-1]
    return _best(
        "cross_region_wave",
        ranks,
        microbatches,
        placement,
        costs or Costs(),
        ranks if memory_cap is None else memory_cap,
    )


@dataclass(frozen=True)
class _Rule:
    """What a rank does where several things can be done.

    Attributes:
        prefer: F or I, or None to alternate.
        deepest: take the F of the latest stage and the I of the latest stage, else those of the earliest.
        room: how many later visits' F must still fit into memory when an early visit's F begins; at least 1,
            or the early visits could fill the memory and nothing would ever finish.
    """

    prefer: Kind | None = None
    deepest: bool = True
    room: int = 1


_ONE_VISIT = tuple(_Rule(prefer) for prefer in (None, Kind.F, Kind.I))
_TWO_VISITS = tuple(
    _Rule(prefer, deepest, room) for room, deepest, prefer in product((1, 3, 2), (True, False), (None, Kind.F, Kind.I))
)
_MOST_ACTIONS = 100_000  # to play over all rules, which bounds the time to some seconds


def _best(name: str, ranks: int, microbatches: int, placement: tuple[int, ...], costs: Costs, cap: float) -> Schedule:
    if not cap >= 1:
        raise ScheduleError(f"memory_cap={cap} is below one microbatch's activations; use 1 or more")
    costs.check(len(placement), ranks)
    rules = _ONE_VISIT if placement[-1] == ranks - 1 else _TWO_VISITS
    # A greedy may waste memory that it is given; what it does with less is then the better schedule.
    caps = (cap, ranks) if cap > ranks else (cap,)
    plays = list(product(caps, rules))[: max(1, _MOST_ACTIONS // (3 * len(placement) * microbatches))]
    games = [_Game(ranks, microbatches, placement, costs, limit, rule) for limit, rule in plays]
    best = min(games, key=lambda game: max(game.free_at))
    return Schedule(name, tuple(map(tuple, best.rows)), placement)


class _Game:
    """One play of the greedy.

    A *visit* is a run of successive stages on one rank; an F or I that has begun a visit goes through all of it.

    Attributes:
        rows: the actions of each rank.
        free_at: when each rank has done the last of them.
    """

    def __init__(
        self, ranks: int, microbatches: int, placement: tuple[int, ...], costs: Costs, cap: float, rule: _Rule
    ):
        stages = len(placement)
        self.placement, self.costs, self.rule = placement, costs, rule
        self.times = {(stage, kind): costs.time(kind, stage) for stage in range(stages) for kind in _KINDS}
        self.stages_of = [[stage for stage in range(stages) if placement[stage] == rank] for rank in range(ranks)]
        self.links: dict[tuple[int, int], Link] = {}
        self.link_free: defaultdict[Link, float] = defaultdict(float)
        # In pairs of a stage and a microbatch, of which `stages / ranks` are one microbatch's on 1/P of the model.
        self.free_pairs = [int(cap * stages / ranks + 1e-9)] * ranks
        self.pairs_to_begin = self._pairs_to_begin(self.free_pairs[0])
        # When the inputs of a stage's next F or I arrive, in the order of microbatches; and what waits for W.
        self.inbox = {(stage, kind): deque[float]() for stage in range(stages) for kind in (Kind.F, Kind.I)}
        self.inbox[0, Kind.F].extend([0.0] * microbatches)
        self.next_microbatch = dict.fromkeys(self.times, 0)
        self.pending_w: list[deque[int]] = [deque() for _ in range(ranks)]
        self.going_on: list[tuple[int, Kind] | None] = [None] * ranks
        self.last = [Kind.I] * ranks
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.free_at = [0.0] * ranks
        self.events = [(0.0, rank) for rank in range(ranks)]
        while self.events:
            now, rank = heapq.heappop(self.events)
            if now >= self.free_at[rank]:
                self._move(rank, now)

    def _pairs_to_begin(self, cap: int) -> list[int]:
        """For each stage, how many pairs must be free on its rank for its F to begin."""
        needed = []
        for stage, rank in enumerate(self.placement):
            rest = [later for later in self.stages_of[rank] if later >= stage]
            visit = next((n for n, later in enumerate(rest) if later != stage + n), len(rest))
            needed.append(min(visit + self.rule.room * (len(rest) - visit), cap))
        return needed

    def _move(self, rank: int, now: float) -> None:
        """Begins an action, or arranges to look again when something arrives."""
        open_now, later = [], []
        for stage in self.stages_of[rank]:
            for kind in (Kind.F, Kind.I):
                queue = self.inbox[stage, kind]
                if queue and (kind is Kind.I or self.free_pairs[rank] >= self.pairs_to_begin[stage]):
                    if queue[0] <= now:
                        open_now.append((stage, kind))
                    else:
                        later.append(queue[0])
        choice = self._choose(rank, open_now)
        if choice is not None:
            self._run(rank, now, *choice)
        elif self.pending_w[rank]:
            self._run(rank, now, self.pending_w[rank].popleft(), Kind.W)
        elif later:
            heapq.heappush(self.events, (min(later), rank))

    def _choose(self, rank: int, choices: list[tuple[int, Kind]]) -> tuple[int, Kind] | None:
        if self.going_on[rank] is not None:
            return self.going_on[rank]
        prefer = self.rule.prefer or (Kind.I if self.last[rank] is Kind.F else Kind.F)
        if any(kind is prefer for _, kind in choices):
            choices = [choice for choice in choices if choice[1] is prefer]
        return (max if self.rule.deepest else min)(choices, default=None)

    def _run(self, rank: int, now: float, stage: int, kind: Kind) -> None:
        m = self.next_microbatch[stage, kind]
        self.next_microbatch[stage, kind] += 1
        self.rows[rank].append(Action(stage, kind, m))
        self.free_at[rank] = end = now + self.times[stage, kind]
        heapq.heappush(self.events, (end, rank))
        if kind is Kind.W:
            self.free_pairs[rank] += 1
            return
        self.inbox[stage, kind].popleft()
        self.last[rank] = kind
        if kind is Kind.F:
            self.free_pairs[rank] -= 1
            if stage == len(self.placement) - 1:
                self.inbox[stage, Kind.I].append(end)
        else:
            self.pending_w[rank].append(stage)
        self._pass_on(rank, end, stage + 1 if kind is Kind.F else stage - 1, kind)

    def _pass_on(self, rank: int, end: float, stage: int, kind: Kind) -> None:
        """Hands a result to the next stage, over a link if that is on another rank."""
        self.going_on[rank] = None
        if not 0 <= stage < len(self.placement):
            return
        receiver = self.placement[stage]
        if receiver == rank:
            self.inbox[stage, kind].append(end)
            self.going_on[rank] = stage, kind
            return
        link = self.links.get((rank, receiver))
        if link is None:
            link = self.links[rank, receiver] = self.costs.link(rank, receiver)
        self.link_free[link] = max(end, self.link_free[link]) + link.transfer
        arrival = self.link_free[link] + link.latency
        self.inbox[stage, kind].append(arrival)
        heapq.heappush(self.events, (max(arrival, self.free_at[receiver]), receiver))


_KINDS = (Kind.F, Kind.I, Kind.W)

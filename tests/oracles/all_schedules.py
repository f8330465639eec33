"""Every schedule there is, for a handful of actions."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator

from schedules.actions import Action, Kind, Schedule, ScheduleError
from schedules.costs import Costs
from schedules.simulate import Timing, simulate

__all__ = ["all_schedules", "shortest", "shortest_table"]


def all_schedules(ranks: int, microbatches: int) -> Iterator[Schedule]:
    """All orders of F, I and W with one stage a rank, each rank running microbatches in order."""
    words = [
        word
        for word in set(itertools.permutations("FIW" * microbatches))
        if all(word[:n].count("F") >= word[:n].count("I") >= word[:n].count("W") for n in range(len(word)))
    ]
    for chosen in itertools.product(words, repeat=ranks):
        rows = tuple(
            tuple(Action(rank, Kind(kind), word[:place].count(kind)) for place, kind in enumerate(word))
            for rank, word in enumerate(chosen)
        )
        yield Schedule("any", rows, tuple(range(ranks)))


def shortest(ranks: int, microbatches: int, costs: Costs, timing: Timing, memory_cap: float) -> float:
    """The least makespan within the cap."""
    least = math.inf
    for schedule in all_schedules(ranks, microbatches):
        try:
            timeline = simulate(schedule, costs, timing)
        except ScheduleError:
            continue  # each rank's order is possible, and together they wait for one another
        if max(timeline.peak_activations) <= memory_cap:
            least = min(least, timeline.makespan)
    return least


def shortest_table(ranks: int, microbatches: int, costs: Costs, memory_cap: float, send: float = 0.0) -> float:
    """The least lock-step makespan within the cap if ranks may wait at will: Dijkstra over what each rank has done."""
    F, I, W = range(3)  # noqa: E741
    start = ((0, 0, 0),) * ranks
    least = {start: 0.0}
    queue = [(0.0, start)]
    while queue:
        elapsed, state = heapq.heappop(queue)
        if elapsed > least[state]:
            continue
        if all(done[W] == microbatches for done in state):
            return elapsed
        options = []
        for rank, done in enumerate(state):
            can: list[int | None] = [None]
            if done[F] < microbatches and done[F] - done[W] < memory_cap and (not rank or state[rank - 1][F] > done[F]):
                can.append(F)
            if done[I] < done[F] and (rank + 1 == ranks or state[rank + 1][I] > done[I]):
                can.append(I)
            if done[W] < done[I]:
                can.append(W)
            options.append(can)
        for tick in itertools.product(*options):
            length = max((costs.time(Kind("FIW"[k]), r) for r, k in enumerate(tick) if k is not None), default=None)
            if length is None:
                continue
            after = tuple(
                tuple(count + (kind == place) for place, count in enumerate(done))
                for done, kind in zip(state, tick, strict=True)
            )
            length += send  # every tick ends with a transfer
            if elapsed + length < least.get(after, math.inf):
                least[after] = elapsed + length
                heapq.heappush(queue, (elapsed + length, after))
    return math.inf

"""Every schedule there is, for a handful of actions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from schedules.actions import Action, Kind, Schedule, ScheduleError
from schedules.costs import Costs
from schedules.simulate import Timing, simulate

__all__ = ["all_schedules", "shortest"]


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

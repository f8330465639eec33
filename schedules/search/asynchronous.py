"""Free-running ranks: greedy orders of many temperaments.

A rank that is free runs an input gradient if there is one, else a forward, else a weight gradient: that fills the time
until the next message. How long a wait must be for it to be worth a weight gradient, and how many forwards a rank
may be ahead of its input gradients, makes the temperament; a grid of them is tried, and some by chance.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from schedules.search.question import Shape

__all__ = ["Temper", "greedy", "tempers"]

_PATIENCE = (0.5, 1.0, 0.0, 0.9)
_SLOPES = (1.0, 0.0, 2.0)


@dataclass(frozen=True)
class Temper:
    """What a greedy order does where it has a choice.

    Attributes:
        patience: a weight gradient runs if the next message is at least this part of its time away.
        ahead: for each rank, how many pairs may be between F and I.
    """

    patience: float
    ahead: tuple[int, ...]


def tempers(shape: Shape, seed: int) -> Iterator[Temper]:
    """The grid, and then others by chance, without end."""
    P, V, pairs = shape.P, shape.V, shape.pairs

    def line(most: float, slope: float) -> tuple[int, ...]:
        return tuple(max(V, math.ceil(min(pairs, most - slope * rank))) for rank in range(P))

    tops = sorted({min(pairs, V * top) for top in (P, 2 * P - 1, pairs)})
    grid = (Temper(patience, line(top, slope * V)) for patience in _PATIENCE for slope in _SLOPES for top in tops)
    yield from dict.fromkeys(grid)
    random = np.random.default_rng(seed)
    while True:
        steps = np.cumsum(random.random(P) * random.choice([0.5, 1, 2, 4]) * V)
        ahead = np.clip(np.ceil(random.uniform(V, pairs + 1) - steps + random.integers(0, 3)), V, pairs)
        yield Temper(float(random.uniform(0, 1.2)), tuple(int(count) for count in ahead))


def greedy(shape: Shape, temper: Temper) -> tuple[float, np.ndarray]:
    """The order of that temperament, [P, N] of 3 x chunk + (0, 1, 2 for F, I, W), after its makespan.

    The makespan is without queues on links, and infinite where all ranks wait for one another.
    """
    P, V, Q, M = shape.P, shape.V, shape.Q, shape.M
    times, room = shape.times.tolist(), shape.room.tolist()
    after, before = shape.after.tolist(), shape.before.tolist()
    delays = shape.delay_before.tolist(), shape.delay_after.tolist()
    done = [[0, 0, 0] for _ in range(Q)]
    # When the inputs of F and I arrive.
    sent: list[tuple[list[float], list[float]]] = [([], []) for _ in range(Q)]
    sent[shape.column[0]] = ([0.0] * M, [])
    sent[shape.column[-1]] = (sent[shape.column[-1]][0], [0.0] * M)
    clock, held, open_ = [0.0] * P, [0] * P, [0] * P
    words: list[list[int]] = [[] for _ in range(P)]
    events = [(0.0, rank) for rank in range(P)]
    while events:
        now, rank = heapq.heappop(events)
        if clock[rank] > now:
            continue
        chosen, message = None, math.inf
        for kind in (1, 0):
            for q in range(rank * V, rank * V + V) if kind else range(rank * V + V - 1, rank * V - 1, -1):
                m = done[q][kind]
                blocked = m >= done[q][0] if kind else (held[rank] >= room[q] or open_[rank] >= temper.ahead[rank])
                if m == M or blocked or m >= len(sent[q][kind]):
                    continue
                if sent[q][kind][m] > now:
                    message = min(message, sent[q][kind][m])
                elif chosen is None:
                    chosen = q, kind
        if chosen is None:
            for q in range(rank * V, rank * V + V):
                waits = message - now < temper.patience * times[q][2] and held[rank] < shape.pairs
                if done[q][2] < done[q][1] and not waits:
                    chosen = q, 2
                    break
        if chosen is None:
            if message < math.inf:
                heapq.heappush(events, (message, rank))
            continue
        q, kind = chosen
        done[q][kind] += 1
        held[rank] += (kind == 0) - (kind == 2)
        open_[rank] += (kind == 0) - (kind == 1)
        words[rank].append(3 * (q - rank * V) + kind)
        clock[rank] = end = now + times[q][kind]
        heapq.heappush(events, (end, rank))
        receiver = (after[q], before[q], Q)[kind]
        if receiver < Q:
            arrival = end + delays[kind][receiver]
            sent[receiver][kind].append(arrival)
            heapq.heappush(events, (arrival, receiver // V))
    if any(len(word) < 3 * V * M for word in words):
        return math.inf, np.zeros((P, 0), int)
    return max(clock), np.array(words)

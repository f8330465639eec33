"""Shortest plans for a rack, by A* (Hart, Nilsson and Raphael 1968)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from meshsys.rl.environments.rack.puzzle import Move, Rack

__all__ = ["least_moves", "solve"]


def solve(rack: Rack, start: bytes, most_states: int = 200_000) -> list[Move] | None:
    """A shortest plan; None where more states than that would have to be looked at, or none leads to order.

    Only the deepest cell that can be reached in a column is tried: a plan from a state with the tube further to the
    front is one from there too, as nothing but the order of tubes in a column and its empty cells matter.
    """
    came: dict[bytes, tuple[bytes, Move] | None] = {start: None}
    cost = {start: 0}
    open_states = [(least_moves(rack, start), 0, start)]
    done: set[bytes] = set()
    while open_states and len(done) < most_states:
        _, _, state = heapq.heappop(open_states)
        if state in done:
            continue
        if not rack.misplaced(state):
            return _plan(came, state)
        done.add(state)
        for move in _deepest(rack, state):
            following = rack.moved(state, move)
            if cost[state] + 1 < cost.get(following, 1 << 30):
                cost[following] = cost[state] + 1
                came[following] = (state, move)
                estimate = cost[following] + least_moves(rack, following)
                heapq.heappush(open_states, (estimate, -cost[following], following))
    return None


def least_moves(rack: Rack, state: bytes) -> int:
    """A number of moves that no plan is below, and that no move lowers by more than one.

    Every misplaced tube moves once at least. A tube in its place that stands before a misplaced one in its column has
    to leave the column, and to come back unless its class has another.
    """
    total = 0
    for column, owner in enumerate(rack.owners):
        misplaced = False
        for row in reversed(range(rack.rows)):
            tube = state[row * rack.columns + column]
            if tube and tube != owner:
                misplaced = True
                total += 1
            elif tube and misplaced:
                total += 2 if rack.owners.count(owner) == 1 else 1
    return total


def _deepest(rack: Rack, state: bytes) -> Iterator[Move]:
    depths = [rack.depth(state, column) for column in range(rack.columns)]
    for column, row in enumerate(depths):
        if row == rack.rows:
            continue
        for to_column, depth in enumerate(depths):
            if to_column == column:
                below = (r for r in range(row + 1, rack.rows) if state[r * rack.columns + column])
                depth = next(below, rack.rows)
                if depth - 1 == row:
                    continue
            if depth:
                yield Move((row, column), (depth - 1, to_column))


def _plan(came: dict[bytes, tuple[bytes, Move] | None], state: bytes) -> list[Move]:
    plan = []
    while (before := came[state]) is not None:
        state, move = before
        plan.append(move)
    return plan[::-1]

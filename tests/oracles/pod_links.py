"""Whether a grant's logical neighbours are linked, asked pair by pair from coordinates alone."""

from __future__ import annotations

import itertools

from meshsys.cluster.grant import Grant
from meshsys.cluster.pod import Pod


def pairs(grant: Grant, wrap: tuple[bool, ...]) -> list[tuple[int, int]]:
    """Chips of logical neighbours; the ends of a dimension where it is to be a ring."""
    found = []
    for position in itertools.product(*map(range, grant.shape)):
        for dim, side in enumerate(grant.shape):
            after = position[dim] + 1
            if after < side or (wrap[dim] and side > 2):
                other = (*position[:dim], after % side, *position[dim + 1 :])
                found.append((int(grant.nodes[position]), int(grant.nodes[other])))
    return found


def unlinked(pod: Pod, grant: Grant, wrap: tuple[bool, ...]) -> int:
    """Pairs without a link or a pair of opposite ports of their own, as same-position switches join them."""
    missing = 0
    ports: set[tuple[int, int, str]] = set()
    for a, b in pairs(grant, wrap):
        one, other = (tuple(int(place) for place in pod.coords[chip]) for chip in (a, b))
        if pod.cube is None:
            missing += pod.topology.distance(one, other) != 1
            continue
        side = pod.cube
        same_cube = all(x // side == y // side for x, y in zip(one, other, strict=True))
        local = [(x % side, y % side) for x, y in zip(one, other, strict=True)]
        differ = [dim for dim, (x, y) in enumerate(local) if x != y]
        if same_cube and len(differ) == 1 and abs(local[differ[0]][0] - local[differ[0]][1]) == 1:
            continue
        joined = False
        for dim in range(pod.ndim):
            for up, down, (x, y) in ((a, b, local[dim]), (b, a, local[dim][::-1])):
                pair = {(up, dim, "+"), (down, dim, "-")}
                if x == side - 1 and y == 0 and differ in ([dim], []) and not joined and not pair & ports:
                    ports |= pair
                    joined = True
        missing += not joined
    return missing

"""From chips in a logical order to a grant: which links its traffic needs, and whether switches can join them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster.grant import Grant
from meshsys.cluster.pod import Pod

__all__ = ["grant"]

Ints = NDArray[np.int64]


def grant(
    pod: Pod,
    nodes: Ints,
    wrap: Sequence[bool] | None,
    fold: str,
    rotation: tuple[int, ...] = (),
    *,
    detours: bool = True,
) -> Grant:
    """The grant of chips `nodes`, int64 [*shape], to logical neighbours of a mesh.

    Neighbours along a dimension get a link each. The ends of a dimension are neighbours where `wrap` asks for it, and
    they are a ring, asked for or not, where a link for every such pair is there anyhow.

    Neighbours that are farther apart send over the links between, dimension by dimension, if they are on a torus or in
    one cube. In different cubes they cannot be wired, as each switch that could carry them joins one pair of ports.

    Args:
        detours: whether a cube's own links may carry what is not next to each other; without, it is not wireable.
    """
    asked = tuple(wrap) if wrap is not None else (False,) * nodes.ndim
    lines = [_pairs(nodes, dim) for dim in range(nodes.ndim)]
    a, b = (np.concatenate([line[side] for line in lines] or [nodes[:0]]) for side in (0, 1))
    wiring = _Cubes(pod, detours) if pod.cube else _Torus(pod)
    links, wireable, dilation = wiring.join(a, b)
    used = [links]
    closed = []
    for dim, side in enumerate(nodes.shape):
        if side <= 2:
            closed.append(False)
            continue
        ends = (np.take(nodes, side - 1, dim).ravel(), np.take(nodes, 0, dim).ravel())
        links, joined, hops = wiring.join(*ends)
        closed.append(joined and hops == 1)
        if closed[-1] or asked[dim]:
            used.append(links)
            wireable, dilation = wireable and joined, max(dilation, hops)
    return Grant(
        shape=nodes.shape,
        nodes=nodes,
        fold=fold,
        rotation=rotation,
        cubes=tuple(np.unique(pod.cube_of[nodes]).tolist()) if pod.cubes else (),
        links=np.unique(np.concatenate(used)),
        wrap=tuple(closed),
        wireable=wireable,
        dilation=max(dilation, 1),
    )


def _pairs(nodes: Ints, dim: int) -> tuple[Ints, Ints]:
    line = np.moveaxis(nodes, dim, 0)
    return line[:-1].ravel(), line[1:].ravel()


class _Torus:
    def __init__(self, pod: Pod) -> None:
        self._pod = pod

    def join(self, a: Ints, b: Ints) -> tuple[Ints, bool, int]:
        """Links between chips a[i] and b[i], whether they are there, and the most hops."""
        links, hops = _ways(self._pod, a, b, self._pod.wrap)
        return links, True, hops


def _ways(pod: Pod, a: Ints, b: Ints, wrap: Sequence[bool]) -> tuple[Ints, int]:
    """The links of shortest ways, dimension by dimension, and the most hops."""
    at, to = pod.coords[a], pod.coords[b]
    used, hops = [np.empty(0, np.int64)], np.zeros(len(a), np.int64)
    for dim, (size, wraps) in enumerate(zip(pod.dims, wrap, strict=True)):
        step = to[:, dim] - at[:, dim]
        if wraps:
            step = (step + (size - 1) // 2) % size - (size - 1) // 2
        hops += abs(step)
        for hop in range(int(abs(step).max(initial=0))):
            on = at[abs(step) > hop]
            sign = np.sign(step[abs(step) > hop])
            on[:, dim] = (on[:, dim] + sign * hop - (sign < 0)) % size
            used.append(np.ravel_multi_index(tuple(on.T), pod.dims) * pod.ndim + dim)
        at[:, dim] = to[:, dim]
    return np.concatenate(used), int(hops.max(initial=0))


class _Cubes:
    """Ports that a grant has used up are remembered: each joins one pair."""

    def __init__(self, pod: Pod, detours: bool) -> None:
        self._pod, self._detours = pod, detours
        self._joined: set[int] = set()

    def join(self, a: Ints, b: Ints) -> tuple[Ints, bool, int]:
        pod = self._pod
        assert pod.cube is not None
        at, to = pod.coords[a] % pod.cube, pod.coords[b] % pod.cube
        step = to - at
        same = pod.cube_of[a] == pod.cube_of[b]
        near = same & (abs(step).sum(1) == 1)
        used = [np.minimum(a, b)[near] * pod.ndim + abs(step[near]).argmax(1)]
        a, b, at, to, step = a[~near], b[~near], at[~near], to[~near], step[~near]
        if not len(a):
            return used[0], True, int(len(used[0]) > 0)
        if pod.wiring == "any":
            links, left = self._any(a, b, at, to)
        else:
            links, left = self._opposite(a, b, at, to, step)
        hops = 1
        if len(left):
            a, b, same = a[left], b[left], same[~near][left]
            hops = int(self._detour(at[left], to[left], same).max())
            if self._detours:
                inside, _ = _ways(pod, a[same], b[same], (False,) * pod.ndim)
                return np.concatenate([*used, links, inside]), bool(same.all()), hops
        return np.concatenate([*used, links]), not len(left), hops

    def _opposite(self, a: Ints, b: Ints, at: Ints, to: Ints, step: Ints) -> tuple[Ints, Ints]:
        """Ports at the same place of opposite faces: the pair of chips leaves one choice."""
        pod = self._pod
        assert pod.cube is not None
        dim = abs(step).argmax(1)
        row = np.arange(len(a))
        facing = (abs(step).sum(1) == pod.cube - 1) & (abs(step[row, dim]) == pod.cube - 1)
        upper = np.where(step[row, dim] < 0, a, b)  # the one at the upper end of its cube, so it goes up from there
        lower = np.where(step[row, dim] < 0, b, a)
        up, down = upper * pod.ndim + dim, (pod.size + lower) * pod.ndim + dim
        ports = zip(up.tolist(), down.tolist(), strict=True)
        joined = np.fromiter((ok and self._claim(pair) for ok, pair in zip(facing.tolist(), ports, strict=True)), bool)
        return np.concatenate([up[joined], down[joined]]), np.flatnonzero(~joined)

    def _any(self, a: Ints, b: Ints, at: Ints, to: Ints) -> tuple[Ints, Ints]:
        """Any free port of either chip."""
        links: list[int] = []
        left = []
        for i, (one, other) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
            ports = [self._port(one, at[i]), self._port(other, to[i])]
            if None in ports or not self._claim(tuple(port for port in ports if port is not None)):
                left.append(i)
            else:
                links += [port for port in ports if port is not None]
        return np.asarray(links, np.int64), np.asarray(left, np.int64)

    def _port(self, chip: int, place: Ints) -> int | None:
        pod = self._pod
        assert pod.cube is not None
        for dim in range(pod.ndim):
            port = (pod.size * (place[dim] == 0) + chip) * pod.ndim + dim
            if place[dim] in (0, pod.cube - 1) and int(port) not in self._joined:
                return int(port)
        return None

    def _claim(self, ports: tuple[int, ...]) -> bool:
        if not self._joined.isdisjoint(ports):
            return False
        self._joined.update(ports)
        return True

    def _detour(self, at: Ints, to: Ints, same: NDArray[np.bool_]) -> Ints:
        """Hops within a cube; else to the nearest pair of ports that could be joined, over it, and on."""
        cube = self._pod.cube
        assert cube is not None
        step = abs(to - at)
        total = step.sum(1)
        over = [
            cube - one[:, dim] + other[:, dim] + total - step[:, dim]
            for dim in range(self._pod.ndim)
            for one, other in ((at, to), (to, at))
        ]
        return np.where(same, total, np.min(over, 0))

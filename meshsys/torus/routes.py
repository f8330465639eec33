"""Messages on the links of a torus: along each dimension in turn, by the shorter way."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshsys.torus.topology import Topology

__all__ = ["busiest"]


def busiest(topology: Topology, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> float:
    """The most messages over one link, one way, if each source [..., ndim] sends one to its target [..., ndim].

    A message between opposite places of a ring goes both ways by halves. On faster links a message counts less.
    """
    at, goal = sources.reshape(-1, topology.ndim), targets.reshape(-1, topology.ndim)
    most = 0.0
    for dim, (room, wrap, speed) in enumerate(zip(topology.dims, topology.wrap, topology.speeds, strict=True)):
        # Dimensions before this one are done, those after it are not.
        nodes = np.concatenate([goal[:, :dim], at[:, dim:]], 1)
        step = goal[:, dim] - at[:, dim]
        for direction in (1, -1):
            ahead = (direction * step) % room if wrap else np.maximum(direction * step, 0)
            back = room - ahead if wrap else np.full_like(ahead, room)
            weight = np.where(ahead < back, 1.0, np.where(ahead == back, 0.5, 0.0))
            load = np.zeros(topology.size)
            for hop in range(int(ahead[weight > 0].max(initial=0))):
                going = (ahead > hop) & (weight > 0)
                here = nodes[going]
                here[:, dim] = (here[:, dim] + direction * hop) % room
                places = np.ravel_multi_index(tuple(here.T), topology.dims)
                load += np.bincount(places, weight[going], topology.size)
            most = max(most, float(load.max()) / speed)
    return most

"""Seconds from a chip's peak numbers: compute and memory traffic overlap, collectives of a part follow one another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshsys.planner.counts import Collective, Part
from meshsys.torus import AXES, Placement
from meshsys.torus.collectives import all_gather, all_reduce, all_to_all, permute, reduce_scatter
from meshsys.torus.generations import Chip
from meshsys.torus.groups import span

__all__ = ["axes_of", "collective_seconds", "part_seconds"]

_FORMS = {
    "all-gather": all_gather,
    "all-reduce": all_reduce,
    "reduce-scatter": reduce_scatter,
    "all-to-all": all_to_all,
}


def part_seconds(part: Part, placement: Placement, chip: Chip) -> float:
    """One run of a part; asynchronous collectives overlap with compute and memory traffic, others with nothing."""
    waiting = running = 0.0
    for collective in part.collectives:
        seconds = collective.times * collective_seconds(collective, placement, chip)
        if collective.asynchronous:
            running += seconds
        else:
            waiting += seconds
    return max(part.flops / chip.flops, part.traffic / chip.hbm_bandwidth, running) + waiting


def collective_seconds(collective: Collective, placement: Placement, chip: Chip) -> float:
    """One run of a collective, by its closed form."""
    axes = axes_of(placement.shape, collective.group)
    if collective.kind == "permute":
        source, target = (np.unravel_index(place, placement.shape) for place in collective.group)
        hops = int(placement.topology.distance(placement.coords[source].tolist(), placement.coords[target].tolist()))
        return permute(collective.bytes, hops, chip)
    return _FORMS[collective.kind](collective.bytes, span(placement, axes, collective.kind), chip)


def axes_of(shape: Sequence[int], group: Sequence[int]) -> tuple[str, ...]:
    """The mesh axes along which a group of places in the mesh differs."""
    places = np.array(np.unravel_index(np.asarray(group), shape))
    return tuple(name for name, row in zip(AXES, places, strict=True) if len(set(row.tolist())) > 1)

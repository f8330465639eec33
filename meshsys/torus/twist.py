"""Twisted tori: k x k x 2k and k x 2k x 2k chips whose short dimensions close on another place of the long ones.

The k-th chip along a short dimension is linked to one that is k further along each long dimension. Links are as many as
without the twist, but every direction is now like every other: these are the face- and the body-centred cubic lattices
modulo k, so that an all-to-all loads all links alike, where in a plain torus the longest dimension has twice the load
of the shortest.

Sources: "TPU v4: An Optically Reconfigurable Supercomputer" (arXiv 2304.01433); Camarero, Martinez and
Beivide, "Lattice graphs for high-scale interconnection topologies" (IEEE TPDS 2015).
"""

from __future__ import annotations

from meshsys.torus.shapes import Shape

__all__ = ["twist_of"]


def twist_of(shape: Shape) -> tuple[Shape, ...] | None:
    """For each dimension how far a step over its end goes along each dimension; None for a shape without a twist."""
    short, long = min(shape), max(shape)
    if len(shape) != 3 or long != 2 * short or short < 2 or any(side not in (short, long) for side in shape):
        return None
    shift = tuple(short if side == long else 0 for side in shape)
    return tuple(shift if side == short else (0,) * len(shape) for side in shape)

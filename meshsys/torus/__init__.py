"""The torus: topologies of chips, and logical mesh axes on them. Nothing here knows JAX."""

from __future__ import annotations

from meshsys.torus.placement import Placement, place, placed
from meshsys.torus.reorder import order_cost, pair_costs, reorder
from meshsys.torus.topology import Topology, TopologyError
from meshsys.torus.traffic import AXES, Flow, Traffic

__all__ = [
    "AXES",
    "Flow",
    "Placement",
    "Topology",
    "TopologyError",
    "Traffic",
    "order_cost",
    "pair_costs",
    "place",
    "placed",
    "reorder",
]

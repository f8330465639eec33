"""The torus: topologies of chips, and logical mesh axes on them. Nothing here knows JAX."""

from __future__ import annotations

from meshsys.torus.axes import AXES
from meshsys.torus.placement import Placement, place
from meshsys.torus.topology import Topology, TopologyError

__all__ = ["AXES", "Placement", "Topology", "TopologyError", "place"]

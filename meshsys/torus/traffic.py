"""What a program sends along mesh axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshsys.torus.collectives import (
    KINDS,
    Span,
    all_gather,
    all_reduce,
    all_to_all,
    permute,
    reduce_scatter,
)
from meshsys.torus.generations import Chip

__all__ = ["AXES", "Flow", "Traffic", "flow_seconds", "relevant"]

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
"""The logical mesh axes, outermost first."""

_FORMS = {
    "all-gather": all_gather,
    "all-reduce": all_reduce,
    "reduce-scatter": reduce_scatter,
    "all-to-all": all_to_all,
}


@dataclass(frozen=True)
class Flow:
    """Collectives of one kind in a step.

    Attributes:
        kind: one of `meshsys.torus.collectives.KINDS`.
        axes: the mesh axes along which the devices of a group differ; one alone for permute and rotate.
        bytes: of the full array over a group; what a device sends, for permute and rotate.
        count: how many run, one after another; a fraction where some steps have one.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    count: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"flow kind={self.kind!r} is none of {', '.join(KINDS)}")
        if not self.axes or len(set(self.axes)) < len(self.axes) or not set(self.axes) <= set(AXES):
            raise ValueError(f"flow axes={self.axes!r} are not some of {', '.join(AXES)}")
        if self.kind in ("permute", "rotate") and len(self.axes) > 1:
            raise ValueError(f"flow kind={self.kind}: it goes along one axis, not {'+'.join(self.axes)}")
        if not (self.bytes >= 0 and self.count >= 0):
            raise ValueError(f"flow bytes={self.bytes}, count={self.count}: neither can be below 0")

    @property
    def shifts(self) -> bool:
        """Positions send to the next one along the axis."""
        return self.kind in ("permute", "rotate")


Traffic = tuple[Flow, ...]


def relevant(traffic: Iterable[Flow], sizes: Mapping[str, int]) -> Traffic:
    """The traffic without axes of size 1 and what runs along none."""
    found = []
    for flow in traffic:
        axes = tuple(name for name in AXES if name in flow.axes and sizes.get(name, 1) > 1)
        if axes and flow.bytes * flow.count > 0:
            found.append(Flow(flow.kind, axes, flow.bytes, flow.count))
    return tuple(found)


def flow_seconds(flow: Flow, where: Span | tuple[int, float], chip: Chip) -> float:
    """Seconds of all runs of a flow's collective.

    Args:
        where: its groups; for permute and rotate the most hops of a message and the most messages over one link.
    """
    if isinstance(where, Span):
        return flow.count * _FORMS[flow.kind](flow.bytes, where, chip)
    return flow.count * permute(flow.bytes, where[0], chip, where[1])

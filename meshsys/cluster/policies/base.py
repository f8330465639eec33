"""What a policy is, and what those here have in common."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

from meshsys.cluster.grant import Grant
from meshsys.cluster.pod import Pod
from meshsys.torus.shapes import Shape

__all__ = ["Cached", "Policy", "Shape", "Wrap"]

Wrap = tuple[bool, ...] | None


@runtime_checkable
class Policy(Protocol):
    """Chooses chips for jobs. It changes no pod: `Pod.take` does."""

    name: str

    def place(self, pod: Pod, shape: Shape, wrap: Wrap = None) -> Grant | None:
        """Chips for a job of this shape, whose marked dimensions should be rings; None if there are none now."""

    def possible(self, pod: Pod, shape: Shape) -> bool:
        """Whether the pod, empty and without failures, has chips for this shape."""


class Cached:
    """`possible` by trying on an empty pod, once a shape."""

    name = ""

    def __init__(self) -> None:
        self._empty: dict[tuple[object, ...], Pod] = {}
        self._possible: dict[tuple[object, ...], bool] = {}

    def place(self, pod: Pod, shape: Shape, wrap: Wrap = None) -> Grant | None:
        raise NotImplementedError

    def possible(self, pod: Pod, shape: Shape) -> bool:
        key = (pod.key, tuple(sorted(shape)))
        if key not in self._possible:
            if math.prod(shape) > pod.size:
                self._possible[key] = False
            else:
                empty = self._empty.setdefault(pod.key, pod.empty())
                self._possible[key] = self.place(empty, shape) is not None
        return self._possible[key]

"""Sizes along dimensions, as people read and write them: 4x4x8, along x, y and z; 4x4x8_twisted."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["TWISTED", "Shape", "dimension_names", "read_shape", "shape_text"]

Shape = tuple[int, ...]

TWISTED = "_twisted"
"""What follows the sizes of a twisted torus (`meshsys.torus.twist`)."""

_SHAPE = re.compile(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){0,5}")


def read_shape(text: str) -> Shape | None:
    """Up to six sizes of at least 1; None if the text is none."""
    return tuple(map(int, text.split("x"))) if _SHAPE.fullmatch(text) else None


def shape_text(shape: Sequence[int], twisted: bool = False) -> str:
    return "x".join(map(str, shape)) + TWISTED * twisted


def dimension_names(count: int) -> tuple[str, ...]:
    """x, y, z, then d3, d4, ..."""
    return tuple("xyz"[dim] if dim < 3 else f"d{dim}" for dim in range(count))

"""Sizes as products."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["factorisations"]


@lru_cache(1 << 14)
def factorisations(size: int, ndim: int) -> tuple[tuple[int, ...], ...]:
    """All ways to write a size as `ndim` factors, each ascending."""

    def go(left: int, count: int, least: int) -> list[tuple[int, ...]]:
        if count == 1:
            return [(left,)] if left >= least else []
        return [
            (factor, *rest)
            for factor in range(least, int(left ** (1 / count) + 1e-9) + 1)
            if left % factor == 0
            for rest in go(left // factor, count - 1, factor)
        ]

    return tuple(go(size, ndim, 1))

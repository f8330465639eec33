"""Which arrays of a bucket share their collectives, and how many are on their way at once."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from meshsys.reshard.leaf import LeafMove

__all__ = ["IN_FLIGHT", "batches", "transit_bytes"]

IN_FLIGHT = 3
"""Batches on their way at once: one is packed and one put in order while a third one's bytes cross. The others wait, so
that their buffers are those of batches that have come."""

_BATCH_BYTES = 1 << 20  # arrays that bring less share a collective, as every one costs a rendezvous


def batches(moves: Sequence[LeafMove]) -> list[list[int]]:
    """Numbers of the moves of each batch: small arrays whose exchanges are of the same kinds and groups, or one."""
    found: list[list[int]] = []
    small: dict[tuple, tuple[list[int], int]] = {}
    for leaf, move in enumerate(moves):
        exchanges = tuple((exchange.kind, exchange.groups) for exchange in move.route.exchanges)
        size = move.unit_bytes * sum(exchange.received for exchange in move.route.exchanges)
        if move.pieces > 1 or not exchanges:
            found.append([leaf])
            continue
        kind = exchanges, move.bits
        batch, filled = small.get(kind, ([], 0))
        if not batch or filled + size > _BATCH_BYTES:
            batch, filled = [], 0
            found.append(batch)
        batch.append(leaf)
        small[kind] = batch, filled + size
    return found


def transit_bytes(moves: Sequence[LeafMove]) -> int:
    """The most that is on its way on one device."""
    sizes = []
    for batch in batches(moves):
        size = sum(moves[leaf].transit_bytes for leaf in batch)
        sizes.append(size if len(batch) == 1 else 2 * size)  # put together and taken apart again
    return sum(heapq.nlargest(IN_FLIGHT, sizes))

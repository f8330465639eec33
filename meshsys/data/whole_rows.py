"""Conversations packed into rows whole.

A conversation of n tokens gives n - 1 pairs of an input and what follows it, as in `meshsys.data.packing`; but where
that cuts a document at the end of a row, here a reply would lose what it replies to. A batch takes conversations in
their order, each into the fullest row that has room for it (best fit), and ends before the first that fits in none.
What stays free is padding: segment 0, weight 0.

Shape suffixes: B rows of this host's share, S positions of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import grain
import numpy as np

from meshsys.data.conversations import Example
from meshsys.data.packing import Batch

__all__ = ["WholeRows", "best_fit", "rows_of"]


def best_fit(examples: Sequence[Example], first: int, rows: int, sequence_length: int) -> list[list[Example]]:
    """The rows of a batch that begins with example number `first`; they hold those from there on, as many as fit.

    Args:
        examples: of at most `sequence_length` + 1 tokens.
    """
    free = np.full(rows, sequence_length)
    placed: list[list[Example]] = [[] for _ in range(rows)]
    for number in range(first, len(examples)):
        example = examples[number]
        pairs = len(example.ids) - 1
        room = np.where(free >= pairs, free, sequence_length + 1)
        row = int(room.argmin())
        if room[row] > sequence_length:
            break
        free[row] -= pairs
        placed[row].append(example)
    return placed


def rows_of(placed: Sequence[Sequence[Example]], sequence_length: int, first_row: int = 0) -> Batch:
    """Rows as arrays; `first_row` is the number of the first in the global batch."""
    shape = (len(placed), sequence_length)
    tokens_BS, targets_BS, positions_BS, segment_ids_BS = np.zeros((4, *shape), np.int32)
    weights_BS = np.zeros(shape, np.float32)
    for row, examples in enumerate(placed):
        start = 0
        for segment, (ids, learned) in enumerate(examples, start=1):
            part = row, slice(start, start + len(ids) - 1)
            tokens_BS[part], targets_BS[part] = ids[:-1], ids[1:]
            positions_BS[part], segment_ids_BS[part] = np.arange(len(ids) - 1), segment
            weights_BS[part] = learned[1:]
            start += len(ids) - 1
    index_B = np.arange(first_row, first_row + len(placed), dtype=np.int32)
    return Batch(tokens_BS, targets_BS, positions_BS, segment_ids_BS, weights_BS, index_B)


class WholeRows(grain.IterDataset):
    """Endless `Batch`es from an endless `MapDataset` of `Example`s.

    Args:
        examples: of 2 to S + 1 tokens.
        sequence_length: S.
        batch_size: rows of the global batch.
        rows: the rows of it that this host keeps.

    The iterator's state is `{"document": int}`: the example that the next batch begins with.
    """

    def __init__(self, examples: grain.MapDataset, *, sequence_length: int, batch_size: int, rows: range) -> None:
        super().__init__(examples)
        self._examples = examples
        self._sequence_length = sequence_length
        self._batch_size = batch_size
        self._rows = rows

    def __iter__(self) -> grain.DatasetIterator:
        return _WholeRowsIterator(self._examples, self._sequence_length, self._batch_size, self._rows)


class _WholeRowsIterator(grain.DatasetIterator):
    def __init__(self, examples: grain.MapDataset, sequence_length: int, batch_size: int, rows: range) -> None:
        super().__init__()
        self._examples = examples
        self._sequence_length = sequence_length
        self._batch_size = batch_size
        self._rows = rows
        self._document = 0

    def get_state(self) -> dict[str, int]:
        return {"document": self._document}

    def set_state(self, state: dict[str, int]) -> None:
        self._document = state["document"]

    def __next__(self) -> Batch:
        placed = best_fit(self._examples, self._document, self._batch_size, self._sequence_length)
        self._document += sum(map(len, placed))
        return rows_of([placed[row] for row in self._rows], self._sequence_length, self._rows.start)

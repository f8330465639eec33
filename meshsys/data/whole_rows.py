"""Conversations packed into rows whole.

A conversation of n tokens gives n - 1 pairs of an input and what follows it, as in `meshsys.data.packing`; but where
that cuts a document at the end of a row, here a reply would lose what it replies to. A batch draws a few rows more than
it has, and places what it drew: the oldest conversation first, so that none waits for ever, and then the longest, each
into the fullest row that has room for it (best fit decreasing; Johnson 1973). The rest waits for the next batch. What
stays free is padding: segment 0, weight 0.

Shape suffixes: B rows of this host's share, S positions of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from meshsys.data.conversations import Example
from meshsys.data.packing import Batch

__all__ = ["Queue", "WholeRows", "best_fit", "rows_of"]


_SPARE = 4  # rows that a batch draws besides; with more, rows are hardly fuller


class Queue(NamedTuple):
    """What is still to be placed: the examples that wait, the oldest first, and then all from number `following` on."""

    waiting: tuple[int, ...] = ()
    following: int = 0


def best_fit(
    examples: Sequence[Example], queue: Queue, rows: int, sequence_length: int
) -> tuple[list[list[Example]], Queue]:
    """The rows of a batch, and the queue that is left.

    Args:
        examples: of at most `sequence_length` + 1 tokens.
    """
    waiting, following = {number: examples[number] for number in queue.waiting}, queue.following
    drawn = sum(map(_pairs, waiting.values()))
    while drawn < (rows + _SPARE) * sequence_length and following < len(examples):
        waiting[following] = examples[following]
        drawn += _pairs(waiting[following])
        following += 1
    oldest, *others = waiting
    free = np.full(rows, sequence_length)
    placed: list[list[Example]] = [[] for _ in range(rows)]
    for number in (oldest, *sorted(others, key=lambda number: -_pairs(waiting[number]))):
        pairs = _pairs(waiting[number])
        room = np.where(free >= pairs, free, sequence_length + 1)
        row = int(room.argmin())
        if room[row] <= sequence_length:
            free[row] -= pairs
            placed[row].append(waiting.pop(number))
    return placed, Queue(tuple(waiting), following)


def _pairs(example: Example) -> int:
    return len(example.ids) - 1


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
            start = part[1].stop
    index_B = np.arange(first_row, first_row + len(placed), dtype=np.int32)
    return Batch(tokens_BS, targets_BS, positions_BS, segment_ids_BS, weights_BS, index_B)


class WholeRows(grain.IterDataset):
    """Endless `Batch`es from an endless `MapDataset` of `Example`s.

    Args:
        examples: of 2 to S + 1 tokens.
        sequence_length: S.
        batch_size: rows of the global batch.
        rows: the rows of it that this host keeps.

    The iterator's state is `{"document": int, "waiting": [int, ...]}`: the numbers of the example that is drawn next,
    and of those that wait.
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
        self._queue = Queue()

    def get_state(self) -> dict[str, Any]:
        return {"document": self._queue.following, "waiting": list(self._queue.waiting)}

    def set_state(self, state: dict[str, Any]) -> None:
        self._queue = Queue(tuple(state["waiting"]), state["document"])

    def __next__(self) -> Batch:
        placed, self._queue = best_fit(self._examples, self._queue, self._batch_size, self._sequence_length)
        return rows_of([placed[row] for row in self._rows], self._sequence_length, self._rows.start)

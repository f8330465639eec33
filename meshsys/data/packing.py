"""Documents cut into full rows: concatenate, then split.

A document of tokens `d0 .. dn` is `start d0 .. dn eos`, and gives the n + 2 pairs
(start, d0), (d0, d1), .., (dn, eos) of an input and what follows it; `start` is the tokenizer's
`bos_id`, or `eos_id` where it has none. The stream is all pairs of all documents in order; a batch
takes the next B*S of them, and fills its rows one after the other.

Because pairs are packed, and not tokens, each one is used exactly once: where a row's end cuts a
document, the row's last target is the token that the next row begins with, and no target ever
belongs to another document. Rows have no padding, and all weights are 1. A document, or the part
of it that a row holds, is a segment: ids count from 1 in each row, positions from 0 in each segment.

Own code and not `grain.experimental.ConcatThenSplitIterDataset`, for its state: two numbers here,
and the document that they point at is all that a restored run reads again.

Shape suffixes: B rows of this host's share, S positions of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import grain
import numpy as np

__all__ = ["Batch", "PackedBatches"]


@dataclass(frozen=True)
class Batch:
    """One step's rows of one host.

    Attributes:
        tokens_BS: int32 inputs.
        targets_BS: int32; the token after each input, in the same document.
        positions_BS: int32, from 0 in each segment.
        segment_ids_BS: int32, from 1 in each row; 0 marks padding.
        weights_BS: float32 weight of each target in the loss; 0 on padding.
        index_B: int32, the row's number in the global batch.
    """

    tokens_BS: np.ndarray
    targets_BS: np.ndarray
    positions_BS: np.ndarray
    segment_ids_BS: np.ndarray
    weights_BS: np.ndarray
    index_B: np.ndarray


class PackedBatches(grain.IterDataset):
    """Endless `Batch`es from an endless `MapDataset` of documents.

    Args:
        documents: int32 ids, `start` and `eos` included, so at least two a document.
        sequence_length: S.
        batch_size: rows of the global batch.
        rows: the rows of it that this host keeps.

    The iterator's state is `{"document": int, "token": int}`: the document that the next batch
    begins in, and how many of its pairs are used.
    """

    def __init__(self, documents: grain.MapDataset, *, sequence_length: int, batch_size: int, rows: range) -> None:
        super().__init__(documents)
        self._documents = documents
        self._sequence_length = sequence_length
        self._batch_size = batch_size
        self._rows = rows

    def __iter__(self) -> grain.DatasetIterator:
        return _PackedIterator(self._documents, self._sequence_length, self._batch_size, self._rows)


class _PackedIterator(grain.DatasetIterator):
    def __init__(self, documents: grain.MapDataset, sequence_length: int, batch_size: int, rows: range) -> None:
        super().__init__()
        self._documents = documents
        self._sequence_length = sequence_length
        self._batch_size = batch_size
        self._rows = rows
        self._document = 0
        self._token = 0
        self._ids: np.ndarray | None = None  # of self._document, once read

    def get_state(self) -> dict[str, int]:
        return {"document": self._document, "token": self._token}

    def set_state(self, state: dict[str, int]) -> None:
        self._document, self._token, self._ids = state["document"], state["token"], None

    def __next__(self) -> Batch:
        size = self._batch_size * self._sequence_length
        tokens, targets = np.empty(size, np.int32), np.empty(size, np.int32)
        begins = np.zeros(size, np.bool_)
        filled = 0
        while filled < size:
            if self._ids is None:
                self._ids = self._documents[self._document]
            pairs = len(self._ids) - 1
            first, count = self._token, min(pairs - self._token, size - filled)
            tokens[filled : filled + count] = self._ids[first : first + count]
            targets[filled : filled + count] = self._ids[first + 1 : first + count + 1]
            begins[filled] = True
            filled, self._token = filled + count, first + count
            if self._token == pairs:
                self._document, self._token, self._ids = self._document + 1, 0, None
        return self._batch(tokens, targets, begins)

    def _batch(self, tokens: np.ndarray, targets: np.ndarray, begins: np.ndarray) -> Batch:
        shape = (self._batch_size, self._sequence_length)
        kept = slice(self._rows.start, self._rows.stop)
        begins_BS = begins.reshape(shape)[kept]
        begins_BS[:, 0] = True
        column_S = np.arange(self._sequence_length, dtype=np.int32)
        begin_BS = np.maximum.accumulate(np.where(begins_BS, column_S, 0), axis=1)  # column where its segment begins
        return Batch(
            tokens_BS=tokens.reshape(shape)[kept],
            targets_BS=targets.reshape(shape)[kept],
            positions_BS=(column_S - begin_BS).astype(np.int32),
            segment_ids_BS=np.cumsum(begins_BS, axis=1, dtype=np.int32),
            weights_BS=np.ones(begins_BS.shape, np.float32),
            index_B=np.arange(self._rows.start, self._rows.stop, dtype=np.int32),
        )

"""The training data of a run as an endless, exactly resumable iterator of batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Literal

import grain
import numpy as np

from meshsys.data.conversations import TooLong, open_conversations
from meshsys.data.packing import Batch, PackedBatches
from meshsys.data.sources import open_documents
from meshsys.data.tokenizers import Tokenizer
from meshsys.data.whole_rows import WholeRows
from meshsys.errors import ConfigError

__all__ = ["Batch", "Loader", "make_loader"]

_AHEAD = 2  # batches made while the consumer is busy


class Loader(Iterator[Batch]):
    """Batches without end; made by `make_loader`.

    A thread makes the next ones in advance; `state` is that of the batch last handed out. Not to be
    shared by threads. It needs no closing: the thread ends with the loader, or with the interpreter.

    Attributes:
        note: what was read and left out, in one line for the user; empty where all was read.
    """

    def __init__(
        self, batches: grain.IterDataset, options: dict[str, Any], identity: dict[str, Any], note: str = ""
    ) -> None:
        """`options`: the values, as the user wrote them, of all options that shape the stream; `identity`: what
        has to be equal for the stream to be, under the same keys and in JSON types."""
        self.note = note
        self._options = options
        self._identity = identity
        self._iterator = iter(batches)
        self._position = self._iterator.get_state()
        # An executor and not grain's thread prefetch: it is joined at exit, never stopped inside native code.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="meshsys-data")
        self._ahead: deque[Future[tuple[Batch, dict[str, int]]]] = deque()

    def __next__(self) -> Batch:
        while len(self._ahead) <= _AHEAD:
            self._ahead.append(self._thread.submit(_advance, self._iterator))
        batch, position = self._ahead[0].result()  # removed only then: an interrupt here must lose no batch
        self._ahead.popleft()
        self._position = position
        return batch

    def state(self) -> dict[str, Any]:
        """Where the stream stands, in JSON types: a few numbers and hashes, whatever the shard."""
        return {"position": dict(self._position), "identity": dict(self._identity)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state`, on any number of shards; reads again only the document that it points into.

        Raises:
            ConfigError: the state is of another stream; the message names the option that changed.
        """
        for option, value in self._identity.items():
            then = state["identity"].get(option)
            if then != value:
                was = f"with {then}" if isinstance(then, int) else "with other content"
                raise ConfigError(
                    f"{option}={self._options[option]} does not continue the checkpoint's data, which was made {was}; "
                    "set it back, or begin a new run under another run.name"
                )
        while self._ahead:
            wait([self._ahead.popleft()])
        self._position = dict(state["position"])
        self._iterator.set_state(self._position)


def _advance(iterator: grain.DatasetIterator) -> tuple[Batch, dict[str, int]]:
    return next(iterator), iterator.get_state()


def make_loader(
    *,
    source: str,
    tokenizer: Tokenizer,
    text_field: str,
    sequence_length: int,
    batch_size: int,
    seed: int,
    format: Literal["text", "chat"] = "text",
    too_long: TooLong = "truncate",
    shard: int = 0,
    shards: int = 1,
) -> Loader:
    """The batches of `source`, shuffled by document anew each epoch, without end.

    The global batch of a step does not depend on `shards`; shard i of n has rows i*B/n .. (i+1)*B/n
    of it. Every shard tokenizes the whole stream, as only that tells where a row begins: the price is
    that a host must tokenize as fast as all hosts train. A source smaller than a batch repeats in it.

    Args:
        source: `data.source`; see `meshsys.data.sources.open_documents`.
        tokenizer: of `load_tokenizer`.
        text_field: `data.text_field`, the key of the text in JSONL.
        sequence_length: tokens a row.
        batch_size: rows of the global batch, a multiple of `shards`.
        seed: of the order of documents.
        format: `data.format`: documents of text, or conversations.
        too_long: `data.too_long`, of conversations; see `meshsys.data.conversations.open_conversations`.
        shard, shards: this host, and the number of hosts.

    Raises:
        ConfigError: a source that cannot be read, or sizes that do not fit; the message names the option.
    """
    for option, value in (("data.sequence_length", sequence_length), ("data.batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"{option}={value} is less than 1; use 1 or more")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"run.seed={seed} is not a 32-bit seed; use 0 to {2**32 - 1}")
    if not 0 <= shard < shards:
        raise ValueError(f"shard {shard} is not one of {shards} shards")
    if batch_size % shards:
        above = batch_size + -batch_size % shards
        raise ConfigError(f"data.batch_size={batch_size} cannot be shared by {shards} hosts; use a multiple: {above}")

    local = batch_size // shards
    kept = range(shard * local, (shard + 1) * local)
    options: dict[str, Any] = {
        "data.source": source,
        "data.tokenizer": tokenizer.name,
        "data.sequence_length": sequence_length,
        "data.batch_size": batch_size,
        "run.seed": seed,
    }
    identity = options | {"data.tokenizer": tokenizer.fingerprint}
    note = ""
    batches: grain.IterDataset
    if format == "chat":
        conversations = open_conversations(source, tokenizer, sequence_length, too_long)
        assert tokenizer.chat is not None
        options |= {"data.too_long": too_long, "data.chat_template": tokenizer.chat.origin}
        identity |= {"data.too_long": too_long, "data.chat_template": tokenizer.chat.fingerprint}
        identity["data.source"], note = conversations.digest, conversations.note
        batches = WholeRows(
            grain.MapDataset.source(conversations).seed(seed).shuffle().repeat(),
            sequence_length=sequence_length,
            batch_size=batch_size,
            rows=kept,
        )
    else:
        documents = open_documents(source, text_field)
        identity["data.source"] = documents.digest
        batches = PackedBatches(
            grain.MapDataset.source(documents).seed(seed).shuffle().repeat().map(partial(_document, tokenizer)),
            sequence_length=sequence_length,
            batch_size=batch_size,
            rows=kept,
        )
    return Loader(batches, options, identity, note)


def _document(tokenizer: Tokenizer, text: str) -> np.ndarray:
    start = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    return np.concatenate(([start], tokenizer.encode(text), [tokenizer.eos_id]), dtype=np.int32)

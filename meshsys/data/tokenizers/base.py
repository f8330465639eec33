"""What a tokenizer is to the rest of the system."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from meshsys.data.tokenizers.chat import ChatTemplate
from meshsys.errors import ConfigError

__all__ = ["Bytes", "Encoding", "FromFile", "Origin", "Tokenizer", "fingerprint"]


class Encoding(NamedTuple):
    """Ids of a text, and where in it each begins.

    Attributes:
        ids: int32 [n].
        starts: int32 [n], characters of the text before the token; never falling.
    """

    ids: np.ndarray
    starts: np.ndarray


class Tokenizer(Protocol):
    """What the data pipeline and the sampler need of a tokenizer.

    Attributes:
        name: the value of `data.tokenizer`.
        fingerprint: equal for equal tokenizers, wherever their files lie.
        vocab_size: ids are below it; the least number of rows of an embedding.
        bos_id: the id that begins a document, if the tokenizer has one.
        eos_id: the id that ends a document; begins it too where `bos_id` is None.
        stop_ids: ids that end what a model writes: of a document, and of a turn in a chat.
        prompt_ids: ids that the file wants before a text which a model is to continue; of chats, the template writes
            them.
        specials: special tokens by the names that chat templates use, as `bos_token`.
        chat: how messages become one text; None where the tokenizer's files do not say.
        to_json: makes the text of a tokenizer.json; None where there is none for it.
    """

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def stop_ids(self) -> frozenset[int]: ...

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    @property
    def specials(self) -> Mapping[str, str]: ...

    @property
    def chat(self) -> ChatTemplate | None: ...

    @property
    def to_json(self) -> Callable[[], str] | None: ...

    def encode(self, text: str) -> np.ndarray:
        """int32 ids [n] of `text` alone: no id is added at its ends, and nothing is cut off."""

    def locate(self, text: str) -> Encoding:
        """The same ids, and where they begin."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; beginnings, ends and ids that are no token (padded vocabularies) are left out."""


@dataclass(frozen=True)
class Bytes:
    """UTF-8 bytes, and 256 for the end of a document; 264 ids, for a vocabulary that 8 devices can share."""

    name: str = "bytes"
    fingerprint: str = "bytes"
    vocab_size: int = 264
    bos_id: None = None
    eos_id: int = 256
    stop_ids: frozenset[int] = frozenset({256})
    prompt_ids: tuple[int, ...] = ()
    specials: Mapping[str, str] = field(default_factory=dict)
    chat: ChatTemplate | None = None
    to_json: None = None

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def locate(self, text: str) -> Encoding:
        lengths = [len(character.encode()) for character in text]
        return Encoding(self.encode(text), np.repeat(np.arange(len(text), dtype=np.int32), lengths))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


@dataclass(frozen=True)
class FromFile:
    """A library's tokenizer behind functions.

    `to_located` gives ids and where each begins; `to_json` a tokenizer.json, where the library is Hugging Face's.
    """

    name: str
    fingerprint: str
    vocab_size: int
    bos_id: int | None
    eos_id: int
    to_ids: Callable[[str], list[int]] = field(repr=False)
    to_located: Callable[[str], tuple[list[int], list[int]]] = field(repr=False)
    to_text: Callable[[list[int]], str] = field(repr=False)
    stop_ids: frozenset[int] = frozenset()
    prompt_ids: tuple[int, ...] = ()
    specials: Mapping[str, str] = field(default_factory=dict)
    chat: ChatTemplate | None = None
    to_json: Callable[[], str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_ids", self.stop_ids | {self.eos_id})

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.to_ids(text), np.int32)

    def locate(self, text: str) -> Encoding:
        ids, starts = self.to_located(text)
        return Encoding(np.array(ids, np.int32), np.array(starts, np.int32))

    def decode(self, ids: Iterable[int]) -> str:
        ends = self.stop_ids | {self.bos_id}
        return self.to_text([int(i) for i in ids if 0 <= i < self.vocab_size and i not in ends])


class Origin(NamedTuple):
    """Where a tokenizer comes from, for messages."""

    option: str
    spec: str
    path: Path

    def unreadable(self, error: object) -> ConfigError:
        return ConfigError(
            f"{self.option}={self.spec}: {self.path} is not what its name says ({error}); replace it, or use bytes"
        )


def fingerprint(*parts: bytes | str) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        hasher.update(part if isinstance(part, bytes) else part.encode())
    return hasher.hexdigest()

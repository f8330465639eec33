"""Text to token ids and back: plain bytes, a Hugging Face `tokenizer.json`, or a SentencePiece model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshsys.errors import ConfigError

__all__ = ["Tokenizer", "load_tokenizer"]

# Names of the end and the beginning of a text, for a tokenizer.json that comes without tokenizer_config.json.
_USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
_USUAL_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]")


class Tokenizer(Protocol):
    """What the data pipeline and the sampler need of a tokenizer.

    Attributes:
        name: the value of `data.tokenizer`.
        fingerprint: equal for equal tokenizers, wherever their files lie.
        vocab_size: ids are below it; the least number of rows of an embedding.
        bos_id: the id that begins a document, if the tokenizer has one.
        eos_id: the id that ends a document; begins it too where `bos_id` is None.
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

    def encode(self, text: str) -> np.ndarray:
        """int32 ids [n] of `text` alone: no id is added at its ends, and nothing is cut off."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; beginnings, ends and ids that are no token (padded vocabularies) are left out."""


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer of `data.tokenizer`.

    Args:
        spec: `bytes`; or a `tokenizer.json` of Hugging Face; or a SentencePiece `*.model`; or a folder
            with `tokenizer.json` or `tokenizer.model`. Beginning and end of a text are read from
            `tokenizer_config.json` beside a `tokenizer.json`, else they are its special tokens with
            the usual names. A tokenizer without an end gets one more id for it.

    Raises:
        ConfigError: no such file, or one that the library does not read.
    """
    if spec == "bytes":
        return _Bytes()
    path = Path(os.path.expanduser(spec))
    if spec and os.path.isdir(path):
        inside = [path / name for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()]
        if not inside:
            raise ConfigError(
                f"data.tokenizer={spec}: no tokenizer.json or tokenizer.model in that folder; name the file itself"
            )
        path = inside[0]
    if not os.path.isfile(path):
        raise ConfigError(f"data.tokenizer={spec}: no such file; give bytes, a tokenizer.json, or a *.model")
    loaders = {".json": _load_hugging_face, ".model": _load_sentencepiece}
    if path.suffix not in loaders:
        raise ConfigError(f"data.tokenizer={spec}: of unknown kind; give bytes, a tokenizer.json, or a *.model")
    return loaders[path.suffix](spec, path)


@dataclass(frozen=True)
class _Bytes:
    """UTF-8 bytes, and 256 for the end of a document; 264 ids, for a vocabulary that 8 devices can share."""

    name: str = "bytes"
    fingerprint: str = "bytes"
    vocab_size: int = 264
    bos_id: None = None
    eos_id: int = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


@dataclass(frozen=True)
class _FromFile:
    """A library's tokenizer behind two functions."""

    name: str
    fingerprint: str
    vocab_size: int
    bos_id: int | None
    eos_id: int
    to_ids: Callable[[str], list[int]]
    to_text: Callable[[list[int]], str]

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.to_ids(text), np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        ends = (self.bos_id, self.eos_id)
        return self.to_text([int(i) for i in ids if 0 <= i < self.vocab_size and i not in ends])


def _fingerprint(*parts: bytes | str) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        hasher.update(part if isinstance(part, bytes) else part.encode())
    return hasher.hexdigest()


def _unreadable(spec: str, path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"data.tokenizer={spec}: {path} is not what its name says ({error}); replace it, or use bytes")


def _load_hugging_face(spec: str, path: Path) -> Tokenizer:
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise _unreadable(spec, path, error) from error
    library.no_truncation()  # many published files would cut documents at 512 ids
    library.no_padding()
    vocabulary = library.get_vocab(with_added_tokens=True)
    specials = [token.content for token in library.get_added_tokens_decoder().values() if token.special]
    config = _hugging_face_config(spec, path.with_name("tokenizer_config.json"))

    def find(key: str, usual: tuple[str, ...]) -> int | None:
        if key in config:
            token = config[key]  # a string, an object that holds it, or null
            content = token.get("content") if isinstance(token, dict) else token
            return vocabulary.get(content) if isinstance(content, str) else None
        return next((vocabulary[token] for token in usual if token in specials), None)

    size = 1 + max(vocabulary.values(), default=-1)  # ids can have gaps
    eos_id, bos_id = find("eos_token", _USUAL_EOS), find("bos_token", _USUAL_BOS)
    return _FromFile(
        name=spec,
        fingerprint=_fingerprint(path.read_bytes(), f"{bos_id},{eos_id}"),
        vocab_size=size + (eos_id is None),
        bos_id=bos_id,
        eos_id=size if eos_id is None else eos_id,
        to_ids=lambda text: library.encode(text, add_special_tokens=False).ids,
        to_text=lambda ids: library.decode(ids, skip_special_tokens=False),
    )


def _hugging_face_config(spec: str, path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise _unreadable(spec, path, error) from error
    return config if isinstance(config, dict) else {}


def _load_sentencepiece(spec: str, path: Path) -> Tokenizer:
    import sentencepiece

    try:
        library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise _unreadable(spec, path, error) from error
    size, eos_id, bos_id = library.vocab_size(), library.eos_id(), library.bos_id()
    return _FromFile(
        name=spec,
        fingerprint=_fingerprint(path.read_bytes()),
        vocab_size=size + (eos_id < 0),
        bos_id=bos_id if bos_id >= 0 else None,
        eos_id=eos_id if eos_id >= 0 else size,
        to_ids=lambda text: library.encode(text, out_type=int),
        to_text=library.decode,
    )

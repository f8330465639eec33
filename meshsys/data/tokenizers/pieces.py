"""Tokenizers of scored pieces, by the SentencePiece library: its own files, and pieces that other files list."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from meshsys.data.tokenizers.base import FromFile, Origin, fingerprint

if TYPE_CHECKING:
    import sentencepiece

__all__ = ["SPACE", "Piece", "PieceKind", "from_pieces", "load_sentencepiece"]

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How a piece has a space."""


class PieceKind(IntEnum):
    """SentencePiece's numbers; GGUF's are the same."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """A token: of two that could be joined next, those that make the piece of higher score are."""

    text: str
    score: float
    kind: PieceKind


def load_sentencepiece(origin: Origin) -> FromFile:
    """The tokenizer of a SentencePiece model file."""
    import sentencepiece

    try:
        library = sentencepiece.SentencePieceProcessor(model_file=str(origin.path))
    except (RuntimeError, OSError) as error:
        raise origin.unreadable(error) from error
    size, eos_id, bos_id = library.vocab_size(), library.eos_id(), library.bos_id()
    begin = bos_id if bos_id >= 0 else None
    return FromFile(
        name=origin.spec,
        fingerprint=fingerprint(origin.path.read_bytes()),
        vocab_size=size + (eos_id < 0),
        bos_id=begin,
        eos_id=eos_id if eos_id >= 0 else size,
        to_ids=lambda text: library.encode(text, out_type=int),
        to_located=lambda text: _located(library, text),
        to_text=library.decode,
        prompt_ids=() if begin is None else (begin,),
    )


def from_pieces(origin: Origin, pieces: Sequence[Piece], *, space_first: bool, **rest: Any) -> FromFile:
    """A tokenizer whose ids are the places of pieces in a list.

    A text may hold the names of control pieces, which become their ids, as in llama.cpp.

    Args:
        space_first: put a space before a text, and before what follows a control piece.
        rest: of `FromFile`.
    """
    import sentencepiece

    try:
        library = sentencepiece.SentencePieceProcessor(model_proto=_model(pieces))
    except RuntimeError as error:
        raise origin.unreadable(error) from error
    controls = {piece.text: number for number, piece in enumerate(pieces) if piece.kind is PieceKind.CONTROL}
    longest_first = sorted(controls, key=len, reverse=True)
    split = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if controls else "(?!)")
    before = " " * space_first

    def locate(text: str) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        starts: list[int] = []
        at = 0
        for number, part in enumerate(split.split(text)):
            if number % 2:
                ids.append(controls[part])
                starts.append(at)
            elif part:
                inside, places = _located(library, before + part)
                ids += inside
                starts += [at + max(0, place - len(before)) for place in places]
            at += len(part)
        return ids, starts

    def to_text(ids: list[int]) -> str:
        text = library.decode(ids)
        return text.removeprefix(before)

    return FromFile(name=origin.spec, to_ids=lambda text: locate(text)[0], to_located=locate, to_text=to_text, **rest)


def _located(library: sentencepiece.SentencePieceProcessor, text: str) -> tuple[list[int], list[int]]:
    found = library.encode(text, return_type="offset_mapping")
    return found["ids"], [start for start, _ in found["offsets"]]


def _model(pieces: Iterable[Piece]) -> bytes:
    """A SentencePiece model of type BPE, in protocol buffers' wire format.

    Written here, as the library's own Python module for it works with few versions of protobuf. The numbers of fields
    are those of https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto.
    """
    bpe, yes, no = 2, 1, 0
    trainer = _field(3, bpe) + _field(35, yes)  # model_type, byte_fallback
    # name, add_dummy_prefix, remove_extra_whitespaces
    normalizer = _field(1, b"identity") + _field(3, no) + _field(4, no)
    listed = b"".join(
        _field(1, _field(1, piece.text.encode()) + b"\x15" + struct.pack("<f", piece.score) + _field(3, piece.kind))
        for piece in pieces
    )
    return listed + _field(2, trainer) + _field(3, normalizer)


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))

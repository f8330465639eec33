"""The tokenizer files of llama2.c (https://github.com/karpathy/llama2.c): scored pieces, without their kinds."""

from __future__ import annotations

import re
import struct

from meshsys.data.tokenizers.base import FromFile, Origin, fingerprint
from meshsys.data.tokenizers.pieces import SPACE, Piece, PieceKind, from_pieces

__all__ = ["load_llama2c"]

_UNKNOWN, _BOS, _EOS = 0, 1, 2  # as in Llama 2; the program has these numbers written into it


def load_llama2c(origin: Origin) -> FromFile:
    """The tokenizer that llama2.c's `tokenizer.py` exported."""
    raw = origin.path.read_bytes()
    try:
        pieces = _read(raw)
    except (struct.error, ValueError) as error:
        raise origin.unreadable(error) from error
    return from_pieces(
        origin,
        pieces,
        space_first=True,
        fingerprint=fingerprint(raw),
        vocab_size=len(pieces),
        bos_id=_BOS,
        eos_id=_EOS,
        prompt_ids=(_BOS,),
    )


def _read(raw: bytes) -> list[Piece]:
    """Pieces are a float32 score, an int32 length and UTF-8 text; before them stands the greatest length."""
    longest = struct.unpack_from("<i", raw)[0]
    pieces: list[Piece] = []
    at = 4
    while at < len(raw):
        score, length = struct.unpack_from("<fi", raw, at)
        at += 8
        if not 0 <= length <= longest or at + length > len(raw):
            raise ValueError(f"piece {len(pieces)} has a length of {length}")
        text = raw[at : at + length].decode()
        at += length
        pieces.append(_piece(len(pieces), text, score))
    if len(pieces) <= _EOS:
        raise ValueError(f"it has {len(pieces)} pieces")
    return pieces


def _piece(number: int, text: str, score: float) -> Piece:
    if number in (_BOS, _EOS):
        return Piece(text.strip(), 0.0, PieceKind.CONTROL)  # the file has line breaks around them
    if number == _UNKNOWN:
        return Piece(text, 0.0, PieceKind.UNKNOWN)
    if re.fullmatch(r"<0x[0-9A-F]{2}>", text):
        return Piece(text, 0.0, PieceKind.BYTE)
    return Piece(text.replace(" ", SPACE), score, PieceKind.NORMAL)

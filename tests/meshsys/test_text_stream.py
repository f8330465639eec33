"""What reaches the reader, against the whole text cut at its first stop string."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshsys.data.tokenizers.base import Bytes
from meshsys.text_stream import TextStream

DECODE = Bytes().decode


def streamed(raw: bytes, stops: tuple[str, ...] = (), sizes: tuple[int, ...] = (1,)) -> tuple[list[str], TextStream]:
    stream, pieces, start = TextStream(DECODE, stops), [], 0
    for size in itertools.cycle(sizes):
        end = start + size
        pieces.append(stream.push(raw[start:end], is_last=end >= len(raw)))
        start = end
        if start >= len(raw):
            return pieces, stream


@pytest.mark.parametrize("text", ["", "plain", "Grüße, 5 €", "日本語", "a😀b", "😀"])
@pytest.mark.parametrize("sizes", [(1,), (2, 3), (100,)])
def test_characters_are_not_torn(text, sizes):
    pieces, stream = streamed(text.encode(), sizes=sizes)
    assert "".join(pieces) == stream.text == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


@pytest.mark.parametrize(("raw", "wanted"), [(b"a\xe2\x82", "a\ufffd"), (b"\xe2\x82b", "\ufffdb"), (b"\xff", "\ufffd")])
def test_bytes_that_are_no_text(raw, wanted):
    """They are shown as such, once it is certain that they will not become a character."""
    assert "".join(streamed(raw)[0]) == wanted


@pytest.mark.parametrize("seed", range(300))
def test_stop_strings(seed):
    """Random texts of few letters, so that beginnings of stop strings are everywhere."""
    random = np.random.default_rng(seed)

    def word(length: int) -> str:
        return "".join(random.choice(list("abä"), length))

    text, stops = word(random.integers(0, 40)), tuple(word(n) for n in random.integers(1, 6, random.integers(1, 4)))
    pieces, stream = streamed(text.encode(), stops, tuple(random.integers(1, 5, 3)))
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    assert "".join(pieces) == text[: min(ends, default=len(text))]
    assert stream.has_stopped == bool(ends)


def test_only_what_may_be_a_stop_string_is_held_back():
    stream = TextStream(DECODE, ["<end>", ""])
    assert [stream.push(piece.encode()) for piece in ("ab<", "e", "x<en", "d", "> more", "and")] == [
        "ab",
        "",
        "<ex",
        "",
        "",
        "",
    ]
    assert stream.has_stopped and stream.text == "ab<ex"

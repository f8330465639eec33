"""Text of tokens as they come: no torn characters, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

__all__ = ["TextStream"]

_TORN = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of one sequence.

    Attributes:
        text: all that was given out.
        has_stopped: a stop string came; the text ends before it.
    """

    def __init__(self, decode: Callable[[Iterable[int]], str], stops: Sequence[str] = ()):
        """`decode` gives the text of all tokens so far."""
        self._decode, self._stops = decode, [stop for stop in stops if stop]
        self._tokens: list[int] = []
        self.text = ""
        self.has_stopped = False

    def push(self, tokens: Iterable[int], *, is_last: bool = False) -> str:
        """The new text that is certain: what may become a character or a stop string is held back until the last."""
        if self.has_stopped:
            return ""
        self._tokens.extend(int(token) for token in tokens)
        whole = self._decode(self._tokens)
        # A character's bytes may be spread over tokens.
        certain = whole if is_last else whole.rstrip(_TORN)
        found = [at for stop in self._stops if (at := certain.find(stop, len(self.text))) >= 0]
        if found:
            end, self.has_stopped = min(found), True
        else:
            end = len(certain) - (0 if is_last else self._begun(certain))
        new = certain[len(self.text) : end]
        self.text += new
        return new

    def _begun(self, text: str) -> int:
        """How many characters at the end of a text, which was not given out yet, could begin a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        most = min(longest, len(text) - len(self.text))
        ends = (size for size in range(most, 0, -1) if any(stop.startswith(text[-size:]) for stop in self._stops))
        return next(ends, 0)

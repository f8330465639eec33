"""What a generator is asked for, and what it gives."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

__all__ = ["Completion", "Piece", "Request", "numbered"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to generate.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: the most new tokens.
        temperature, top_k, top_p, min_p: see `models.sampling.Settings`.
        stop_ids: tokens that end the sequence, of which they are part.
        seed: of the randomness, with the prompt and the sample; 32 bits.
        prompt_number: names the prompt in the randomness, 32 bits; None takes a number made of its tokens.
        sample: which of a prompt's samples this is; None counts the requests before it with the same prompt and seed.
    """

    prompt: Sequence[int] | np.ndarray
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    prompt_number: int | None = None
    sample: int | None = None

    def __post_init__(self) -> None:
        checks = (
            ("max_tokens", "at least 1", self.max_tokens >= 1),
            ("temperature", "finite and at least 0", 0 <= self.temperature < float("inf")),
            ("top_k", "at least 0", self.top_k >= 0),
            ("top_p", "above 0 and at most 1", 0 < self.top_p <= 1),
            ("min_p", "at least 0 and at most 1", 0 <= self.min_p <= 1),
        )
        for name, wanted, is_right in checks:
            if not is_right:
                raise ValueError(f"{name}={getattr(self, name)} must be {wanted}; change it")
        if len(self.prompt) == 0:
            raise ValueError("the prompt has no token; begin it with the one that begins a text")

    @property
    def ids(self) -> np.ndarray:
        """The prompt, int32 [n]."""
        return np.asarray(self.prompt, np.int32)


class Piece(NamedTuple):
    """New tokens of one request.

    Attributes:
        request: its number.
        tokens: int32 [n].
        log_probs: float32 [n], of the distributions that the tokens were sampled from.
        reason: why the sequence ends here: a stop token, or its length; empty if it goes on.
    """

    request: int
    tokens: np.ndarray
    log_probs: np.ndarray
    reason: Literal["", "stop", "length"]


class Completion(NamedTuple):
    """All new tokens of one request; see `Piece`."""

    tokens: np.ndarray
    log_probs: np.ndarray
    reason: Literal["", "stop", "length"]


def numbered(requests: Sequence[Request], vocabulary: int) -> list[Request]:
    """Requests with all the numbers that their keys are made of.

    Raises:
        ValueError: a token of a prompt is not in the vocabulary.
    """
    seen: dict[tuple[int, int], int] = {}
    found = []
    for request in requests:
        wrong = request.ids[(request.ids < 0) | (request.ids >= vocabulary)]
        if wrong.size:
            raise ValueError(f"the prompt has token {wrong[0]}, but the model's vocabulary ends at {vocabulary - 1}")
        number = zlib.crc32(request.ids.tobytes()) if request.prompt_number is None else request.prompt_number
        before = seen.get((request.seed, number), 0)
        seen[request.seed, number] = before + 1
        sample = before if request.sample is None else request.sample
        found.append(replace(request, prompt_number=number, sample=sample))
    return found

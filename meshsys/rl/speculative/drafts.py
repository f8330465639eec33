"""The rollouts of the epoch before, in the host's memory."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Draft", "DraftCache", "Name"]


class Name(NamedTuple):
    """What a draft is a draft of.

    Attributes:
        prompt: its id.
        turn: how often the same step has asked for it before.
        sample: the number within the group.
    """

    prompt: str
    turn: int
    sample: int


@dataclass(frozen=True, eq=False)
class Draft:
    """A response.

    Attributes:
        tokens: int32 [m].
        log_probs: float32 [m], under the policy that it was last a response of.
        seed, prompt_number: of its noise, with the sample; see `models.requests.Request`.
    """

    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    seed: int
    prompt_number: int


class DraftCache:
    """The newest draft of each name.

    Args:
        most: the most tokens that are kept; the drafts that were put first make room for others.
    """

    def __init__(self, most: int):
        self._most, self._tokens = most, 0
        self._drafts: OrderedDict[Name, Draft] = OrderedDict()

    def __len__(self) -> int:
        return len(self._drafts)

    def __iter__(self) -> Iterator[Name]:
        return iter(self._drafts)

    def get(self, name: Name) -> Draft | None:
        return self._drafts.get(name)

    def put(self, name: Name, draft: Draft) -> None:
        old = self._drafts.pop(name, None)
        self._tokens += len(draft.tokens) - (len(old.tokens) if old else 0)
        self._drafts[name] = draft
        while self._tokens > self._most:
            self._tokens -= len(self._drafts.popitem(last=False)[1].tokens)

    def arrays(self) -> dict[str, NDArray]:
        """All drafts in their order, for `load`; empty where there is none."""
        if not self._drafts:
            return {}
        names, drafts = list(self._drafts), list(self._drafts.values())
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(name.prompt for name in names))}
        return {
            "prompts": np.frombuffer(json.dumps(list(numbers)).encode(), np.uint8),
            "prompt": np.array([numbers[name.prompt] for name in names], np.int32),
            "turn": np.array([name.turn for name in names], np.int32),
            "sample": np.array([name.sample for name in names], np.int32),
            "seed": np.array([draft.seed for draft in drafts], np.uint32),
            "prompt_number": np.array([draft.prompt_number for draft in drafts], np.uint32),
            "length": np.array([len(draft.tokens) for draft in drafts], np.int32),
            "tokens": np.concatenate([draft.tokens for draft in drafts]),
            "log_probs": np.concatenate([draft.log_probs for draft in drafts]),
        }

    def load(self, arrays: Mapping[str, NDArray]) -> None:
        """Puts the drafts of `arrays`."""
        if not arrays:
            return
        prompts = json.loads(arrays["prompts"].tobytes())
        ends = np.cumsum(arrays["length"], dtype=np.int64)[:-1]
        tokens, log_probs = np.split(arrays["tokens"], ends), np.split(arrays["log_probs"], ends)
        columns = (arrays[name].tolist() for name in ("prompt", "turn", "sample", "seed", "prompt_number"))
        for name, own_tokens, own_log_probs in zip(zip(*columns, strict=True), tokens, log_probs, strict=True):
            prompt, turn, sample, seed, number = name
            self.put(Name(prompts[prompt], turn, sample), Draft(own_tokens, own_log_probs, seed, number))

"""Groups that are sampled without an end, by policies that change meanwhile.

When it takes weights is told by a logical clock, and by no other one: with the groups of b steps complete, it takes the
weights that the first b - 1 steps make, and waits for them if it must. What is sampled when is then a function of the
seed, and only how long it takes is not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshsys.rl.collect import Collector
from meshsys.rl.config import RlConfig
from meshsys.rl.prompts import Asked, PromptStream
from meshsys.rl.rewards import Ticket
from meshsys.rl.rollouts import Rollout
from meshsys.rl.sampler import Sampler
from models.generation import Piece

__all__ = ["Batch", "Stream"]

_CHUNKS = 8  # of the longest response, at least: weights change between two
_LARGEST_CHUNK = 32


@dataclass(frozen=True, eq=False)
class Batch:
    """The groups of a step.

    Attributes:
        groups: each with the ticket of its scores, in the order in which they were complete.
        position: see `meshsys.rl.modes.stepped.Stepped`.
        dropped: responses that became too old since the batch before, and were begun anew.
        wait_seconds: that were waited for weights since then; `seconds` are those of everything.
    """

    groups: Sequence[tuple[list[Rollout], Ticket]]
    position: dict[str, Any]
    dropped: int
    wait_seconds: float
    seconds: float


@dataclass(eq=False)
class _Response:
    sample: int
    attempt: int = 0
    pieces: list[Piece] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return bool(self.pieces and self.pieces[-1].reason)

    @property
    def oldest(self) -> int | None:
        """The version of its first token."""
        return int(self.versions[0][0]) if self.versions else None


@dataclass(eq=False)
class _Group:
    asked: Asked
    responses: list[_Response]
    ticket: Ticket | None = None

    @property
    def is_complete(self) -> bool:
        return all(one.is_complete for one in self.responses)


class Stream:
    """Batches of groups, to be iterated by a thread of its own.

    Args:
        sampler: with the weights of version `first`.
        weights: gives the weights of the next version and its number, when they are there; None ends the stream.
        slots: sequences that are sampled at once.
        first: the version that the first batch is learned by.
        updates: by which a step changes the version.
        again: numbers of prompts that come before those of the stream of prompts.

    Attributes:
        ends: set it, and the stream ends with the next chunk.
    """

    def __init__(
        self,
        config: RlConfig,
        sampler: Sampler,
        collector: Collector,
        prompts: PromptStream,
        weights: Callable[[], tuple[Any, int] | None],
        *,
        slots: int,
        first: int,
        updates: int,
        again: Sequence[int] = (),
    ):
        self._config, self._sampler, self._collector, self._prompts = config, sampler, collector, prompts
        self._weights, self._slots, self._first, self._updates = weights, slots, first, updates
        self._again, self.ends = deque(again), False
        self._groups: list[_Group] = []  # that are in no batch yet, in the order of their beginning
        self._complete: list[_Group] = []
        self._running: dict[int, tuple[_Group, _Response]] = {}  # and waiting, by the generation's number

    def batches(self, count: int) -> Iterator[Batch]:
        """So many batches."""
        config, begun = self._config, time.perf_counter()
        every = min(max(config.max_response_tokens // _CHUNKS, 1), _LARGEST_CHUNK)
        new = self._begin()
        requests = [self._request(group, one) for group, one in new]
        generation = self._sampler.start(requests, every, (config.max_prompt_tokens, config.max_response_tokens))
        self._running.update(enumerate(new))
        made, waited, dropped = 0, 0.0, 0
        while not self.ends:
            for piece in generation.advance():
                self._took(piece)
            while len(self._complete) >= config.prompts_per_step:
                batch, self._complete = self._cut(config.prompts_per_step)
                now = time.perf_counter()
                yield Batch(batch, self._position(), dropped, waited, now - begun)
                made, begun = made + 1, now
                if made == count:
                    return
                if self._sampler.version < self._first + (made - 1) * self._updates:
                    weights = self._weights()
                    if weights is None:
                        return
                    self._sampler.take(*weights)
                waited = time.perf_counter() - now
                late = self._drop(generation.cancel, made)
                dropped = len(late)
                self._add(generation, late)
            for group in self._complete:
                self._submit(group)
            self._add(generation, self._begin())

    def _add(self, generation: Any, new: Sequence[tuple[_Group, _Response]]) -> None:
        numbers = generation.add([self._request(group, one) for group, one in new])
        self._running.update(zip(numbers, new, strict=True))

    def _begin(self) -> list[tuple[_Group, _Response]]:
        """Responses of new groups, as many as find a slot."""
        new: list[tuple[_Group, _Response]] = []
        while len(self._running) + len(new) < self._slots:
            asked = self._prompts.again(self._again.popleft()) if self._again else self._prompts.take(1)[0]
            group = _Group(asked, [_Response(sample) for sample in range(self._config.samples_per_prompt)])
            self._groups.append(group)
            new += [(group, one) for one in group.responses]
        return new

    def _request(self, group: _Group, response: _Response) -> Any:
        return self._collector.requests([group.asked], response.attempt)[response.sample]

    def _took(self, piece: Piece) -> None:
        group, response = self._running[piece.request]
        response.pieces.append(piece)
        response.versions.append(np.full(piece.tokens.shape, self._sampler.version, np.int32))
        if piece.reason:
            del self._running[piece.request]
            if group.is_complete:
                self._complete.append(group)

    def _cut(self, count: int) -> tuple[list[tuple[list[Rollout], Ticket]], list[_Group]]:
        batch = self._complete[:count]
        for group in batch:
            self._groups.remove(group)
        return [(self._rollouts(group), self._submit(group)) for group in batch], self._complete[count:]

    def _rollouts(self, group: _Group) -> list[Rollout]:
        return [
            self._collector.rollout(group.asked, one.pieces, one.sample, np.concatenate(one.versions))
            for one in group.responses
        ]

    def _submit(self, group: _Group) -> Ticket:
        """Its scores; those of a group that may still lose a response are not asked for."""
        if group.ticket is None:
            group.ticket = self._collector.submit(self._rollouts(group))
        return group.ticket

    def _drop(self, cancel: Callable[[int], None], made: int) -> list[tuple[_Group, _Response]]:
        """Begins those responses anew that would be too old for the next batch, the first that can have them."""
        oldest = self._first + made * self._updates - (self._config.max_staleness or 2) * self._updates
        numbers = {id(response): number for number, (_, response) in self._running.items()}
        late = []
        for group in self._groups:
            for place, one in enumerate(group.responses):
                if one.oldest is None or one.oldest >= oldest:
                    continue
                if id(one) in numbers:
                    cancel(numbers[id(one)])
                    del self._running[numbers[id(one)]]
                group.responses[place] = _Response(one.sample, one.attempt + 1)
                late.append((group, group.responses[place]))
        self._complete = [group for group in self._complete if group.is_complete]
        return late

    def _position(self) -> dict[str, Any]:
        numbers = [group.asked.number for group in self._groups] + list(self._again)
        return {"prompt": self._prompts.at, "again": numbers}

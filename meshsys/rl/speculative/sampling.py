"""Responses that begin as their drafts do, as far as those stay.

Shapes: N drafts, T tokens of a response, padded; R rows, S tokens of a row.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshsys.errors import ConfigError
from meshsys.rl.config import RlConfig
from meshsys.rl.policy import DraftBatch
from meshsys.rl.prompt import Prompt
from meshsys.rl.rollouts import Rollout, RolloutRows
from meshsys.rl.sampler import Sampler
from meshsys.rl.speculative.accept import accepted, is_lenient, is_redrawn
from meshsys.rl.speculative.drafts import Draft, DraftCache, Name
from meshsys.rl.tasks.mixture import Mixture
from meshsys.rl.update import PolicyUpdate
from models.generation import Piece, Request

__all__ = ["Speculation", "speculation_of"]

PyTree = Any


@dataclass(frozen=True, eq=False)
class _Begun:
    """A request, and what is known of the response to it before it is sampled.

    Attributes:
        name: of its draft; None where the prompt does not come again.
        tokens, log_probs: int32 and float32 [n]; n may be 0.
    """

    request: Request
    name: Name | None
    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]

    def piece(self, number: int) -> Piece:
        return Piece(number, self.tokens, self.log_probs, self._reason)

    @property
    def rest(self) -> Request | None:
        """What is left to sample; the same noise goes on, as it goes by a token's place in the whole sequence."""
        if self._reason:
            return None
        request, known = self.request, self.tokens
        return replace(request, prompt=np.concatenate((request.ids, known)), max_tokens=request.max_tokens - len(known))

    @property
    def _reason(self) -> Literal["", "stop", "length"]:
        if len(self.tokens) and self.tokens[-1] in self.request.stop_ids:
            return "stop"
        return "length" if len(self.tokens) == self.request.max_tokens else ""


class Speculation:
    """Samples with drafts, and keeps what it sampled as drafts.

    Args:
        update: whose programs verify.
        rows: that these have.
        tasks: names of those whose prompts come again.
        seed: of the run.

    Attributes:
        drafts: as of the last `commit`.
    """

    def __init__(self, config: RlConfig, update: PolicyUpdate, rows: int, tasks: frozenset[str], seed: int):
        self._config, self._update, self._tasks, self._seed = config.speculative, update, tasks, seed
        self._sizes = rows, update.assembly.config.data.sequence_length, config.max_response_tokens
        self.drafts = DraftCache(config.speculative.cache_tokens)
        self.begin(None, 0)

    def begin(self, params: PyTree, step: int) -> None:
        """Begins a step; what one that was not committed has sampled is forgotten.

        Args:
            params: of the policy, in training form.
        """
        self._params, self._step = params, step
        self._new: list[tuple[Name, Draft]] = []
        self._turns: Counter[tuple[str, int]] = Counter()
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0

    def commit(self) -> dict[str, float]:
        """Ends a step: its responses are drafts from now on. Returns what its record says of drafts."""
        for name, draft in self._new:
            self.drafts.put(name, draft)
        counts = self._counts
        record = {
            "draft_tokens": counts["draft"],
            "accepted_fraction": counts["accepted"] / max(counts["draft"], 1),
            "skipped_fraction": counts["skipped"] / max(counts["responses"], 1),
            "tokens_saved": counts["saved"],
            "verify_seconds": self._seconds,
        }
        self.begin(None, self._step)
        return record

    def sample(self, sampler: Sampler, requests: Sequence[Request], prompts: Sequence[Prompt]) -> Iterator[Piece]:
        """As `Sampler.sample`; a response that stays as it is comes first, in one piece.

        Args:
            prompts: that of each request.
        """
        begun = self._begun(requests, prompts)
        pieces = [[one.piece(number)] for number, one in enumerate(begun)]
        rest = {number: request for number, one in enumerate(begun) if (request := one.rest)}
        self._counts["responses"] += len(begun)
        self._counts["skipped"] += len(begun) - len(rest)
        yield from (own[0] for own in pieces if len(own[0].tokens))
        if rest:
            numbers = list(rest)
            for piece in sampler.sample(list(rest.values())):
                number = numbers[piece.request]
                pieces[number].append(piece)
                yield piece._replace(request=number)
        for one, own in zip(begun, pieces, strict=True):
            if one.name is not None:
                tokens, log_probs = (
                    np.concatenate(parts) for parts in zip(*(piece[1:3] for piece in own), strict=True)
                )
                request = one.request
                assert request.prompt_number is not None
                self._new.append((one.name, Draft(tokens, log_probs, request.seed, request.prompt_number)))

    def _begun(self, requests: Sequence[Request], prompts: Sequence[Prompt]) -> list[_Begun]:
        """The requests with what stays of their drafts."""
        none = np.zeros(0, np.int32), np.zeros(0, np.float32)
        begun, drafted = [], []
        for number, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
            name = self._name(request, prompt)
            draft = None if name is None else self.drafts.get(name)
            if draft is not None and self._is_kept(request):
                if self._config.mode == "exact":
                    request = replace(request, seed=draft.seed, prompt_number=draft.prompt_number)
                drafted.append((number, prompt, draft))
            begun.append(_Begun(request, name, *none))
        count, verify_begun = self._sizes[0], time.perf_counter()
        verified = self._verified_exactly if self._config.mode == "exact" else self._verified_leniently
        for start in range(0, len(drafted), count):
            part = drafted[start : start + count]
            rollouts = [_rollout(prompt, begun[number].request, draft) for number, prompt, draft in part]
            own = [begun[number].request for number, *_ in part]
            for (number, *_), (tokens, log_probs) in zip(part, verified(rollouts, own), strict=True):
                begun[number] = replace(begun[number], tokens=tokens, log_probs=log_probs)
        self._seconds += time.perf_counter() - verify_begun
        return begun

    def _name(self, request: Request, prompt: Prompt) -> Name | None:
        if prompt.task not in self._tasks:
            return None
        assert request.sample is not None
        turn = self._turns[prompt.id, request.sample]
        self._turns[prompt.id, request.sample] += 1
        return Name(prompt.id, turn, request.sample)

    def _is_kept(self, request: Request) -> bool:
        """Whether a sample's noise is not drawn anew."""
        refresh = self._config.refresh if self._config.mode == "exact" else 0.0
        return refresh == 0 or self._random(request, "refresh").random() >= refresh

    def _random(self, request: Request, purpose: Literal["refresh", "accept"]) -> np.random.Generator:
        assert request.prompt_number is not None and request.sample is not None
        tag = ("refresh", "accept").index(purpose) + 1
        return np.random.default_rng((self._seed, self._step, request.prompt_number, request.sample, tag))

    def _verified_exactly(
        self, drafts: Sequence[Rollout], requests: Sequence[Request]
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float32]]]:
        """Of each draft the tokens that the policy draws too, and the one that it draws in place of the next."""
        rows = RolloutRows(drafts, *self._sizes)
        found = self._update.redraw(self._params, _named(rows, requests, self._sizes[0]))
        redrawn_NT, logp_NT = rows.to_tokens(found.token_BS), rows.to_tokens(found.logp_BS)
        length_N = rows.mask_NT.sum(1)
        kept_N = accepted(is_redrawn(rows.padded("tokens"), redrawn_NT), length_N)
        known_N = np.minimum(kept_N + 1, length_N)
        self._count(length_N, kept_N, known_N)
        for known, redrawn_T, logp_T in zip(known_N, redrawn_NT, logp_NT, strict=True):
            yield redrawn_T[:known].astype(np.int32), logp_T[:known].astype(np.float32)

    def _verified_leniently(
        self, drafts: Sequence[Rollout], requests: Sequence[Request]
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float32]]]:
        """Of each draft the tokens that stay, with their log-probabilities under the new policy."""
        rows = RolloutRows(drafts, *self._sizes)
        logp_NT = rows.to_tokens(self._update.score(self._params, rows.batch()))
        length_N, most = rows.mask_NT.sum(1), self._sizes[2]
        log_uniform_NT = np.stack([-self._random(one, "accept").standard_exponential(most) for one in requests])
        stays_NT = is_lenient(log_uniform_NT, logp_NT, rows.padded("log_probs"), self._config.lenience)
        kept_N = accepted(stays_NT, length_N)
        self._count(length_N, kept_N, kept_N)
        for kept, draft, logp_T in zip(kept_N, drafts, logp_NT, strict=True):
            yield draft.tokens[:kept], logp_T[:kept].astype(np.float32)

    def _count(self, length_N: NDArray[Any], kept_N: NDArray[Any], known_N: NDArray[Any]) -> None:
        self._counts.update(draft=int(length_N.sum()), accepted=int(kept_N.sum()), saved=int(known_N.sum()))


def speculation_of(
    config: RlConfig, prompts: Mixture, update: PolicyUpdate, rows: int, seed: int
) -> Speculation | None:
    """What the options ask for; None for `off`.

    Raises:
        ConfigError: no prompt would ever have a draft.
    """
    mode = config.speculative.mode
    if mode == "off":
        return None
    if config.mode != "alternate":
        raise ConfigError(
            f"rl.speculative.mode={mode} verifies drafts on the devices that train, which rl.mode={config.mode} keeps "
            "busy; set rl.mode=alternate, or rl.speculative.mode=off"
        )
    if config.environment:
        raise ConfigError(
            f"rl.speculative.mode={mode} is for one response to each prompt, and rl.environment.kind="
            f"{config.environment.kind} plays in turns; set rl.speculative.mode=off"
        )
    tasks = frozenset(task.name for task in prompts.tasks if task.size is not None)
    if not tasks:
        raise ConfigError(
            f"rl.speculative.mode={mode} needs prompts that come again, and the tasks have no end; set "
            "rl.tasks.0.size, or rl.speculative.mode=off"
        )
    return Speculation(config, update, rows, tasks, seed)


def _rollout(prompt: Prompt, request: Request, draft: Draft) -> Rollout:
    """A draft as rows take it, no longer than what is asked for now."""
    tokens, log_probs = draft.tokens[: request.max_tokens], draft.log_probs[: request.max_tokens]
    assert request.sample is not None
    versions = np.zeros(tokens.shape, np.int32)
    return Rollout(prompt, request.ids, tokens, log_probs, versions, draft.prompt_number, request.sample, False)


def _named(rows: RolloutRows, requests: Sequence[Request], count: int) -> DraftBatch:
    def column(name: str) -> Any:
        values = [getattr(request, name) for request in requests]
        return np.array(values + [0] * (count - len(values)), np.uint32)

    return DraftBatch(rows.batch(), column("seed"), column("prompt_number"), column("sample"))

"""Rollouts of a step: prompts are sampled from, and each group is scored while others are still sampled."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshsys.data.tokenizers import Tokenizer
from meshsys.rl.advantages import zero_variance_groups
from meshsys.rl.config import RlConfig
from meshsys.rl.games import Games
from meshsys.rl.prompt import Prompt
from meshsys.rl.prompts import Asked, PromptStream
from meshsys.rl.rewards import Scores, Ticket
from meshsys.rl.rollouts import Rollout
from meshsys.rl.sampler import Sampler
from meshsys.rl.speculative.sampling import Speculation
from models.generation import Piece, Request

__all__ = ["Collected", "Collector", "Rewards"]


class Rewards(Protocol):
    """What scores: `meshsys.rl.rewards.RewardPool`, or what stands before one."""

    def submit(self, samples: Sequence[tuple[Prompt, str]]) -> Ticket: ...

    def collect(self, ticket: Ticket) -> Scores: ...


@dataclass(frozen=True, eq=False)
class Collected:
    """What a step learns from, and what it took.

    Attributes:
        rollouts: by group, and by sample within it.
        score_N: what each is worth.
        by_name: each reward of each, before weighting.
        zero_variance_groups: whose rollouts are all worth the same, of those that were sampled.
        sampled_groups: of which some may have been replaced.
        errors, timeouts, crashes: of rewards; `failure` says what was wrong with the first, None where none failed.
        tokens: of responses, those that stay of drafts too.
        sample_seconds: from the first prompt to the last token; rewards are computed besides.
        reward_seconds: that were waited for rewards after that.
    """

    rollouts: list[Rollout]
    score_N: NDArray[np.float64]
    by_name: dict[str, NDArray[np.float64]]
    zero_variance_groups: int
    sampled_groups: int
    errors: int
    timeouts: int
    crashes: int
    failure: str | None
    tokens: int
    sample_seconds: float
    reward_seconds: float


class Collector:
    """Samples and scores.

    Args:
        refills: whether groups whose rollouts are all worth the same are replaced by others.
        seed: of the run; a step's randomness follows from it and the step.
        speculation: where responses begin as drafts do.
        games: what plays with an environment; None for one response to each prompt.
    """

    def __init__(
        self,
        config: RlConfig,
        sampler: Sampler,
        rewards: Rewards,
        tokenizer: Tokenizer,
        *,
        refills: bool,
        seed: int,
        speculation: Speculation | None = None,
        games: Games | None = None,
    ):
        self._config, self._sampler, self._rewards, self._tokenizer = config, sampler, rewards, tokenizer
        self._stop_ids = tuple(sorted(tokenizer.stop_ids))
        self._refills, self._seed, self._speculation, self._games = refills, seed, speculation, games

    def collect(self, prompts: PromptStream, step: int) -> Collected:
        """A step's rollouts.

        Raises:
            ConfigError: of the prompts, or a reward that cannot be imported.
        """
        wanted = self._config.prompts_per_step
        found = [self._sampled(prompts.take(wanted), step)]
        for _ in range(self._config.refills if self._refills else 0):
            missing = wanted - sum(one.sampled_groups - one.zero_variance_groups for one in found)
            if missing <= 0:
                break
            found.append(self._sampled(prompts.take(missing), step))
        return _best(found, wanted, self._config.samples_per_prompt)

    def _sampled(self, asked: Sequence[Asked], step: int) -> Collected:
        begun = time.perf_counter()
        groups: list[list[Rollout]] = [[] for _ in asked]
        tickets = {}
        for group, rollouts in self.groups(asked, step):
            groups[group] = rollouts
            tickets[group] = self.submit(rollouts)
        sampled = time.perf_counter()
        scores = [self._rewards.collect(tickets[group]) for group in range(len(asked))]
        rollouts = [one for group in groups for one in group]
        return self.collected(rollouts, scores, sampled - begun, time.perf_counter() - sampled)

    def submit(self, rollouts: Sequence[Rollout]) -> Ticket:
        """Begins to score responses."""
        return self._rewards.submit([(_judged(one), self.text(one)) for one in rollouts])

    def requests(self, asked: Sequence[Asked], step: int) -> list[Request]:
        """For the responses to prompts, by group and by sample within it.

        Args:
            step: their randomness follows from it, the prompts' numbers and the samples'.
        """
        longest, samples = self._config.max_response_tokens, self._config.samples_per_prompt
        return [self._request(step, one, sample, one.ids, longest) for one in asked for sample in range(samples)]

    def _request(
        self, step: int, asked: Asked, sample: int, context: Sequence[int] | NDArray, max_tokens: int
    ) -> Request:
        how = self._config.sampling
        return Request(
            prompt=context,
            max_tokens=max_tokens,
            temperature=how.temperature,
            top_k=how.top_k,
            top_p=how.top_p,
            min_p=how.min_p,
            stop_ids=self._stop_ids,
            seed=int(np.random.SeedSequence((self._seed, step)).generate_state(1)[0]),
            prompt_number=asked.number,
            sample=sample,
        )

    def groups(self, asked: Sequence[Asked], step: int) -> Iterator[tuple[int, list[Rollout]]]:
        """The responses to each prompt, with its place among them, as soon as all of them are sampled; games are
        played together, and end so."""
        samples = self._config.samples_per_prompt
        if self._games is not None:
            games = self._games.play(asked, samples, self._sampler, partial(self._request, step))
            yield from ((group, games[group * samples : (group + 1) * samples]) for group in range(len(asked)))
            return
        requests = self.requests(asked, step)
        pieces: list[list[Piece]] = [[] for _ in requests]
        left = [samples] * len(asked)
        rollouts: list[Rollout] = [None] * len(requests)  # type: ignore[list-item]
        for piece in self._pieces(requests, [one.prompt for one in asked for _ in range(samples)]):
            number = piece.request
            pieces[number].append(piece)
            if not piece.reason:
                continue
            group, sample = divmod(number, samples)
            rollouts[number] = self.rollout(asked[group], pieces[number], sample)
            left[group] -= 1
            if not left[group]:
                yield group, rollouts[group * samples : (group + 1) * samples]

    def _pieces(self, requests: Sequence[Request], prompts: Sequence[Prompt]) -> Iterator[Piece]:
        if self._speculation is None:
            return self._sampler.sample(requests)
        return self._speculation.sample(self._sampler, requests, prompts)

    def rollout(
        self, asked: Asked, pieces: Sequence[Piece], sample: int, versions: NDArray[np.int32] | None = None
    ) -> Rollout:
        """The response that the pieces are; by default all of the version that the sampler has."""
        tokens = np.concatenate([piece.tokens for piece in pieces])
        return Rollout(
            prompt=asked.prompt,
            prompt_ids=asked.ids,
            tokens=tokens,
            log_probs=np.concatenate([piece.log_probs for piece in pieces]),
            versions=np.full(tokens.shape, self._sampler.version, np.int32) if versions is None else versions,
            group=asked.number,
            sample=sample,
            has_stopped=pieces[-1].reason == "stop",
        )

    def text(self, rollout: Rollout) -> str:
        """The response, without the token that ended it; of a game, what both sides wrote."""
        ends = rollout.tokens[-1:].tolist()
        return self._tokenizer.decode(rollout.tokens[: -1 if ends and ends[0] in self._stop_ids else None])

    def collected(
        self,
        rollouts: list[Rollout],
        scores: Sequence[Scores],
        sample_seconds: float = 0.0,
        reward_seconds: float = 0.0,
    ) -> Collected:
        """Groups with the scores of each."""
        score_N = np.concatenate([one.total for one in scores])
        group_N = np.array([one.group for one in rollouts])
        return Collected(
            rollouts=rollouts,
            score_N=score_N,
            by_name={name: np.concatenate([one.by_name[name] for one in scores]) for name in scores[0].by_name},
            zero_variance_groups=len(zero_variance_groups(score_N, group_N)),
            sampled_groups=len(scores),
            errors=sum(one.errors for one in scores),
            timeouts=sum(one.timeouts for one in scores),
            crashes=sum(one.crashes for one in scores),
            failure=next((failure.message for one in scores for failure in one.failures), None),
            tokens=sum(int(one.trained.sum()) for one in rollouts),
            sample_seconds=sample_seconds,
            reward_seconds=reward_seconds,
        )


def _judged(rollout: Rollout) -> Prompt:
    """What rewards judge a rollout by, besides its text."""
    return replace(rollout.prompt, earned=rollout.game.reward) if rollout.game else rollout.prompt


def _best(found: Sequence[Collected], wanted: int, samples: int) -> Collected:
    """Of all groups as many as are wanted: those that teach something first, and then the earliest."""
    first, rest = found[0], found[1:]
    if not rest:
        return first
    rollouts = [rollout for one in found for rollout in one.rollouts]
    score_N = np.concatenate([one.score_N for one in found])
    group_N = np.array([one.group for one in rollouts])
    equal = set(map(int, zero_variance_groups(score_N, group_N)))
    order = sorted(range(0, len(rollouts), samples), key=lambda at: (int(group_N[at]) in equal, at))[:wanted]
    kept = np.concatenate([np.arange(at, at + samples) for at in sorted(order)])
    return replace(
        first,
        rollouts=[rollouts[at] for at in kept],
        score_N=score_N[kept],
        by_name={name: np.concatenate([one.by_name[name] for one in found])[kept] for name in first.by_name},
        failure=next((one.failure for one in found if one.failure), None),
        **{
            name: sum(getattr(one, name) for one in found)
            for name in (
                "zero_variance_groups",
                "sampled_groups",
                "errors",
                "timeouts",
                "crashes",
                "tokens",
                "sample_seconds",
                "reward_seconds",
            )
        },
    )

"""Rollouts that are games: turns of a policy and of an environment, in rounds over all games of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshsys.data.tokenizers import Tokenizer
from meshsys.errors import ConfigError
from meshsys.rl.environments import Environment, EnvironmentConfig, Transcript, play
from meshsys.rl.environments.turns import Turns
from meshsys.rl.prompt import Prompt
from meshsys.rl.prompts import Asked
from meshsys.rl.rollouts import Game, Rollout
from meshsys.rl.sampler import Sampler
from meshsys.rl.tasks.encode import encode_prompt
from models.generation import Piece, Request

__all__ = ["Games", "MakeRequest", "record_of_games"]

MakeRequest = Callable[[Asked, int, Sequence[int] | NDArray, int], Request]
"""From a prompt, the number of the sample, the context and the most new tokens."""


@dataclass(frozen=True)
class Games:
    """Plays them.

    Attributes:
        make: a new environment.
        begin: tokens that a plain text begins with.
        max_prompt_tokens: before the first action.
        max_response_tokens: from there on.
    """

    config: EnvironmentConfig
    make: Callable[[], Environment]
    tokenizer: Tokenizer
    begin: tuple[int, ...]
    max_prompt_tokens: int
    max_response_tokens: int

    def opening(self, prompt: Prompt) -> NDArray[np.int32]:
        """The tokens before the first action, int32 [n]; the prompt's own where the environment raises."""
        try:
            observation = self.make().reset(prompt)
        except Exception:  # the game itself will end so, and be told of
            return encode_prompt(prompt, self.tokenizer, self.begin)
        return np.array(Turns(self.tokenizer, self.begin).first(prompt, observation), np.int32)

    def play(self, asked: Sequence[Asked], samples: int, sampler: Sampler, request: MakeRequest) -> list[Rollout]:
        """So many games for each prompt, by prompt. The keys of a turn follow from the length of its context.

        Raises:
            ConfigError: an environment begins a game with more tokens than there may be.
        """
        games = [(one, number) for one in asked for number in range(samples)]
        openings: dict[int, int] = {}

        def act(numbers: list[int], contexts: list[list[int]]) -> list[tuple[Sequence[int], Sequence[float]]]:
            requests = []
            for number, context in zip(numbers, contexts, strict=True):
                left = self.max_response_tokens - (len(context) - openings.setdefault(number, len(context)))
                if openings[number] > self.max_prompt_tokens:
                    raise ConfigError(
                        f"rl.environment.kind={self.config.kind} began a game with {openings[number]} tokens, above "
                        f"rl.max_prompt_tokens={self.max_prompt_tokens}, and not as it did before; games of equal "
                        "prompts must begin alike"
                    )
                requests.append(request(*games[number], context, min(left, self.config.max_action_tokens or left)))
            pieces: list[list[Piece]] = [[] for _ in requests]
            for piece in sampler.sample(requests):
                pieces[piece.request].append(piece)
            return [
                (np.concatenate([p.tokens for p in own]).tolist(), np.concatenate([p.log_probs for p in own]).tolist())
                for own in pieces
            ]

        transcripts = play(
            self.make,
            [one.prompt for one, _ in games],
            act,
            self.tokenizer,
            max_turns=self.config.max_turns,
            max_tokens=self.max_response_tokens,
            prompt_ids=self.begin,
        )
        return [
            _rollout(one, number, transcript, sampler.version)
            for (one, number), transcript in zip(games, transcripts, strict=True)
        ]


def record_of_games(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What a step's record says of its games; nothing of single responses."""
    games = [one.game for one in rollouts if one.game]
    if not games:
        return {}
    told = [game.success for game in games if game.success is not None]
    return {
        "turns_mean": float(np.mean([game.turns for game in games])),
        **({"success": float(np.mean(told))} if told else {}),
        "environment_errors": sum(bool(game.error) for game in games),
    }


def _rollout(asked: Asked, sample: int, transcript: Transcript, version: int) -> Rollout:
    opening = transcript.opening
    tokens = np.array(transcript.tokens[opening:], np.int32)
    return Rollout(
        prompt=asked.prompt,
        prompt_ids=np.array(transcript.tokens[:opening], np.int32) if opening else asked.ids,
        tokens=tokens,
        log_probs=np.array(transcript.log_probs[opening:], np.float32),
        versions=np.full(tokens.shape, version, np.int32),
        group=asked.number,
        sample=sample,
        has_stopped=transcript.ended == "done",
        game=Game(
            trained=np.array(transcript.trained[opening:], bool),
            turns=len(transcript.turns),
            reward=transcript.reward,
            success=transcript.success,
            error=transcript.error,
        ),
    )

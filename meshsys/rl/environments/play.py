"""Many games at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from meshsys.rl.environments.base import Environment
from meshsys.rl.environments.transcript import Transcript
from meshsys.rl.environments.turns import Turns
from meshsys.rl.prompt import Prompt

if TYPE_CHECKING:
    from meshsys.data.tokenizers import Tokenizer

__all__ = ["Sample", "play"]

Sample = Callable[[list[int], list[list[int]]], Sequence[tuple[Sequence[int], Sequence[float]]]]
"""From the numbers of games and their contexts, new tokens of each (with the stop token, if there is one) and their
log-probabilities."""


def play(
    make: Callable[[], Environment],
    prompts: Sequence[Prompt],
    sample: Sample,
    tokenizer: Tokenizer,
    *,
    max_turns: int,
    max_tokens: int,
    prompt_ids: tuple[int, ...] | None = None,
) -> list[Transcript]:
    """A game for each prompt; in every round all that go on are sampled together.

    An environment that raises ends its game only.

    Args:
        make: a new environment, see `environment_maker`.
        sample: gives the contexts' new tokens, in their order.
        max_turns: of a game.
        max_tokens: a transcript that has so many from its first action on gets no further turn. What is sampled or
            observed is never cut.
        prompt_ids: see `encode_prompt`.
    """
    turns = Turns(tokenizer, prompt_ids)
    games = [_Game(make(), Transcript(prompt), turns, max_turns, max_tokens) for prompt in prompts]
    while going := [number for number, game in enumerate(games) if not game.transcript.ended]:
        sampled = sample(going, [list(games[number].transcript.tokens) for number in going])
        for number, (tokens, log_probs) in zip(going, sampled, strict=True):
            games[number].act(tokens, log_probs, tokenizer.decode(tokens))
    return [game.transcript for game in games]


class _Game:
    def __init__(
        self, environment: Environment, transcript: Transcript, turns: Turns, max_turns: int, max_tokens: int
    ) -> None:
        self.transcript = transcript
        self._environment, self._turns = environment, turns
        self._max_turns, self._max_tokens = max_turns, max_tokens
        try:
            observation = environment.reset(transcript.prompt)
        except Exception as error:
            self._fail(error)
        else:
            transcript.observe(turns.first(transcript.prompt, observation))

    def act(self, tokens: Sequence[int], log_probs: Sequence[float], text: str) -> None:
        transcript = self.transcript
        try:
            observation, reward, done, *told = self._environment.step(text)
        except Exception as error:
            transcript.act(tokens, log_probs, text, 0.0)
            self._fail(error)
            return
        transcript.act(tokens, log_probs, text, float(reward))
        transcript.success = told[0] if told else None
        if done:
            transcript.ended = "done"
        elif len(transcript.turns) >= self._max_turns:
            transcript.ended = "turns"
        else:
            # Nothing is trained on what comes after the last action, so an observation that leaves no room stays out.
            seen = self._turns.next(transcript.prompt, tokens, observation)
            if len(transcript.tokens) - transcript.opening + len(seen) >= self._max_tokens:
                transcript.ended = "tokens"
            else:
                transcript.observe(seen)

    def _fail(self, error: Exception) -> None:
        self.transcript.ended = "error"
        self.transcript.error = f"{type(error).__name__}: {error}"

"""Games as tokens: what the policy sampled and what it saw, never tokenized a second time.

A text may have other tokens than those that were sampled for it. Gradients are those of the sampled ones, so a
transcript grows by them as they are, and by the tokens of each observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from meshsys.rl.prompt import Prompt

__all__ = ["Transcript", "Turn"]


class Turn(NamedTuple):
    """One action.

    Attributes:
        start, stop: its tokens in the transcript.
        text: the same as text.
        reward: that it earned.
    """

    start: int
    stop: int
    text: str
    reward: float


@dataclass
class Transcript:
    """One game.

    Attributes:
        prompt: with which it began.
        tokens: all of them.
        trained: of each token, whether the policy sampled it.
        log_probs: of each token, as it was sampled; 0 for those it was not.
        turns: the actions.
        ended: why there are no more: the environment is `done`; no `turns` or `tokens` are left; the environment
            raised an `error`. Empty while the game goes on.
        success: what the environment told of that; None for nothing.
        error: what the environment raised.
    """

    prompt: Prompt
    tokens: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    ended: Literal["", "done", "turns", "tokens", "error"] = ""
    success: bool | None = None
    error: str = ""

    @property
    def reward(self) -> float:
        """The sum over turns."""
        return sum(turn.reward for turn in self.turns)

    @property
    def opening(self) -> int:
        """Tokens before the first action."""
        return self.turns[0].start if self.turns else len(self.tokens)

    def observe(self, tokens: Sequence[int]) -> None:
        """Adds what the policy sees."""
        self._add(tokens, [0.0] * len(tokens), False)

    def act(self, tokens: Sequence[int], log_probs: Sequence[float], text: str, reward: float) -> None:
        """Adds what the policy sampled.

        Raises:
            ValueError: not one log-probability for each token.
        """
        if len(tokens) != len(log_probs):
            raise ValueError(f"{len(tokens)} tokens were sampled with {len(log_probs)} log-probabilities")
        start = len(self.tokens)
        self._add(tokens, log_probs, True)
        self.turns.append(Turn(start, len(self.tokens), text, reward))

    def _add(self, tokens: Sequence[int], log_probs: Sequence[float], trained: bool) -> None:
        self.tokens += map(int, tokens)
        self.trained += [trained] * len(tokens)
        self.log_probs += map(float, log_probs)

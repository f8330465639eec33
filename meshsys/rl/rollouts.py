"""Sampled responses, and the rows that a program learns them from.

The response to a prompt may be a game's whole transcript, with an environment's tokens among the policy's: they are in
the row and attended to, and nothing is learned of them.

Shapes: N responses, T tokens of a response, padded; R rows, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshsys.rl.prompt import Prompt
from models import Batch

__all__ = ["Game", "Rollout", "RolloutRows"]


@dataclass(frozen=True, eq=False)
class Game:
    """A game in turns.

    Attributes:
        trained: bool [m], which tokens the policy chose.
        turns: that it had.
        reward: the environment's.
        success: what the environment told of that; None for nothing.
        error: what the environment raised; empty for nothing.
    """

    trained: NDArray[np.bool_]
    turns: int
    reward: float
    success: bool | None = None
    error: str = ""


@dataclass(frozen=True, eq=False)
class Rollout:
    """One response to one prompt, or the game that began with it.

    Attributes:
        prompt: what was asked; `prompt_ids`, int32 [n], are its tokens.
        tokens: int32 [m], the response with the token that ended it; of a game, all that follows its opening.
        log_probs: float32 [m], of the distributions that they were drawn from; 0 for an environment's.
        versions: int32 [m], the policy's updates before each was drawn.
        group: the number of the prompt within its step; responses to one prompt share it.
        sample: the number within the group.
        has_stopped: whether a token ended it, or its environment, and not its length.
        game: what is known of a game; None for a single response.
    """

    prompt: Prompt
    prompt_ids: NDArray[np.int32]
    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    versions: NDArray[np.int32]
    group: int
    sample: int
    has_stopped: bool
    game: Game | None = None

    @property
    def trained(self) -> NDArray[np.bool_]:
        """Which tokens the policy chose, [m]."""
        return np.ones(self.tokens.shape, bool) if self.game is None else self.game.trained


class RolloutRows:
    """Rollouts in rows of one sequence each: prompt, response, padding.

    A row's place t has token t and the target t + 1, so a response's first token is the target of the prompt's last.

    Args:
        rows: R; those after the last rollout are padding.
        length: S, at least one prompt's and one response's tokens together.
        max_tokens: T.
    """

    def __init__(self, rollouts: Sequence[Rollout], rows: int, length: int, max_tokens: int):
        self._rollouts, self._shape, self._tokens = list(rollouts), (rows, length), max_tokens

    @cached_property
    def _counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of each prompt and of each response."""
        pairs = [(len(one.prompt_ids), len(one.tokens)) for one in self._rollouts]
        prompts_N, responses_N = np.array(pairs, np.int64).reshape(-1, 2).T
        return prompts_N, responses_N

    @cached_property
    def mask_NT(self) -> NDArray[np.bool_]:
        """Which tokens the policy chose."""
        return self.padded("trained")

    @property
    def lengths_N(self) -> NDArray[np.int64]:
        """Tokens of each response, an environment's too."""
        return self._counts[1]

    def padded(self, name: str) -> NDArray:
        """A field of the rollouts that has a value for each token, [N, T] with zeros behind."""
        fields = [getattr(one, name) for one in self._rollouts]
        padded = np.zeros((len(fields), self._tokens), fields[0].dtype)
        padded[np.arange(self._tokens) < self.lengths_N[:, None]] = np.concatenate(fields)
        return padded

    @cached_property
    def _places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row and place of each token in the mask."""
        row, token = np.nonzero(self.mask_NT)
        return row, token + self._counts[0][row] - 1

    def to_rows(self, values_NT: NDArray, fill: float = 0.0) -> NDArray[np.float32]:
        """A value for each token, where it is a target, float32 [R, S]."""
        rows = np.full(self._shape, fill, np.float32)
        rows[self._places] = values_NT[self.mask_NT]
        return rows

    def to_tokens(self, values_RS: NDArray) -> NDArray[np.float64]:
        """The other way, float64 [N, T]; NaN where the policy chose none."""
        tokens = np.full(self.mask_NT.shape, np.nan)
        tokens[self.mask_NT] = values_RS[self._places]
        return tokens

    @cached_property
    def is_sampled_RS(self) -> NDArray[np.bool_]:
        """Where targets are tokens that the policy chose."""
        is_sampled = np.zeros(self._shape, bool)
        is_sampled[self._places] = True
        return is_sampled

    def batch(self, weights_NT: NDArray | None = None) -> Batch:
        """The rows as NumPy's arrays.

        Args:
            weights_NT: of the tokens; by default 1.
        """
        rows, length = self._shape
        ids = np.zeros((rows, length + 1), np.int32)
        prompts_N, responses_N = self._counts
        for row, one in enumerate(self._rollouts):
            ids[row, : prompts_N[row]] = one.prompt_ids
            ids[row, prompts_N[row] : prompts_N[row] + responses_N[row]] = one.tokens
        count_R = np.zeros(rows, np.int64)
        count_R[: len(self._rollouts)] = prompts_N + responses_N
        place_S = np.arange(length, dtype=np.int32)
        weights_NT = self.mask_NT.astype(np.float32) if weights_NT is None else weights_NT
        return Batch(
            tokens=ids[:, :-1],  # type: ignore[arg-type]
            targets=ids[:, 1:],  # type: ignore[arg-type]
            positions=np.broadcast_to(place_S, (rows, length)),  # type: ignore[arg-type]
            segment_ids=(place_S < count_R[:, None]).astype(np.int32),  # type: ignore[arg-type]
            weights=self.to_rows(weights_NT),  # type: ignore[arg-type]
            sequence=np.arange(rows, dtype=np.int32),  # type: ignore[arg-type]
        )

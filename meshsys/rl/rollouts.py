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

from meshsys.errors import ConfigError
from meshsys.rl.prompt import Prompt
from models import Batch

__all__ = ["Game", "Rollout", "RolloutRows", "length_of_a_row"]


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


def length_of_a_row(prompt: int, response: int, together: int) -> int:
    """Tokens of a row of so many responses to a prompt, of at most so many tokens each."""
    return prompt - 1 + together * (response + 1)


class RolloutRows:
    """Rollouts in rows: prompt, response, padding; or a prompt and several responses to it.

    A place has a token and, as its target, the one after it, so a response's first token is the target of the prompt's
    last. Responses that share a row share their prompt but for its last token, with which each begins: it is a segment,
    and each of them another that branches off from it. Nothing else sees another response.

    Args:
        rows: R; those after the last rollout are padding.
        length: S, at least `length_of_a_row`.
        max_tokens: T.
        together: responses of a row; that many after one another have the same prompt.

    Raises:
        ConfigError: they do not, as games of an environment that does not begin them alike.
    """

    def __init__(self, rollouts: Sequence[Rollout], rows: int, length: int, max_tokens: int, together: int = 1):
        self._rollouts, self._shape, self._tokens = list(rollouts), (rows, length), max_tokens
        self._together = together
        for number, one in enumerate(self._rollouts):
            if not np.array_equal(one.prompt_ids, self._rollouts[number - number % together].prompt_ids):
                raise ConfigError(
                    f"rl.responses_per_row={together}, but games of {one.prompt.id} did not begin with the same "
                    "tokens; set rl.responses_per_row=1"
                )

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
    def _begins_N(self) -> NDArray[np.int64]:
        """Where in its row each response's first token is the target."""
        prompts_N, responses_N = self._counts
        before_N = np.cumsum(responses_N + 1) - responses_N - 1
        number_N = np.arange(len(self._rollouts))
        return prompts_N - 1 + before_N - before_N[number_N - number_N % self._together]

    @cached_property
    def _places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row and place of each token in the mask."""
        number, token = np.nonzero(self.mask_NT)
        return number // self._together, token + self._begins_N[number]

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

    @property
    def is_sampled_RS(self) -> NDArray[np.bool_]:
        """Where targets are tokens that the policy chose."""
        return self.sequence_ids_RS > 0

    @cached_property
    def sequence_ids_RS(self) -> NDArray[np.int32]:
        """Which of its row's responses such a target belongs to, counted from 1; else 0."""
        ids, (row, place) = np.zeros(self._shape, np.int32), self._places
        ids[row, place] = np.nonzero(self.mask_NT)[0] % self._together + 1
        return ids

    def batch(self, weights_NT: NDArray | None = None) -> Batch:
        """The rows as NumPy's arrays.

        Args:
            weights_NT: of the tokens; by default 1.
        """
        rows, length = self._shape
        tokens, targets, segments, trunks = (np.zeros((rows, length), np.int32) for _ in range(4))
        positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
        for number, (one, begin) in enumerate(zip(self._rollouts, self._begins_N, strict=True)):
            row, which = divmod(number, self._together)
            before, end = len(one.prompt_ids) - 1, begin + 1 + len(one.tokens)
            tokens[row, :before], targets[row, :before] = one.prompt_ids[:-1], one.prompt_ids[1:]
            tokens[row, begin], tokens[row, begin + 1 : end] = one.prompt_ids[-1], one.tokens
            targets[row, begin : end - 1] = one.tokens
            segments[row, :before], segments[row, begin:end] = 1, 1
            if self._together > 1:
                positions[row, begin:end] = np.arange(before, before + end - begin)
                segments[row, begin:end], trunks[row, begin:end] = which + 2, 1
        weights_NT = self.mask_NT.astype(np.float32) if weights_NT is None else weights_NT
        sequence, weights = np.arange(rows, dtype=np.int32), self.to_rows(weights_NT)
        shared = trunks if self._together > 1 else None
        return Batch(tokens, targets, positions, segments, weights, sequence, shared)  # type: ignore[arg-type]

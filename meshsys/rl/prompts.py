"""The prompts of a run, one after another, as tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshsys.data.tokenizers import Tokenizer
from meshsys.errors import ConfigError
from meshsys.rl.prompt import Prompt
from meshsys.rl.tasks.encode import encode_prompt

__all__ = ["Asked", "PromptStream"]

_MOST_SKIPPED = 1000  # in a row, before the task is taken for one that has no prompt of the length


class _Prompts(Protocol):
    def __getitem__(self, number: int) -> Prompt: ...


@dataclass(frozen=True, eq=False)
class Asked:
    """A prompt that is short enough.

    Attributes:
        number: its place among all prompts of the run, those that were left out too.
        ids: int32 [n], its tokens.
    """

    number: int
    prompt: Prompt
    ids: NDArray[np.int32]


class PromptStream:
    """Prompts from a place on; the place is all of its state.

    Args:
        begin: tokens that a plain text begins with.
        max_tokens: longer prompts are left out.
        at: the number of the first prompt.
        opening: the tokens that the policy continues, where they are not the prompt's own.

    Attributes:
        at: the number of the next prompt.
        skipped: how many prompts were left out since the beginning, or the last resumption.
    """

    def __init__(
        self,
        prompts: _Prompts,
        tokenizer: Tokenizer,
        begin: Sequence[int],
        max_tokens: int,
        at: int = 0,
        opening: Callable[[Prompt], NDArray[np.int32]] | None = None,
    ):
        self._prompts, self._max_tokens = prompts, max_tokens
        self._opening = opening or (lambda prompt: encode_prompt(prompt, tokenizer, tuple(begin)))
        self.at, self.skipped = at, 0

    def again(self, number: int) -> Asked:
        """A prompt that was taken before."""
        prompt = self._prompts[number]
        return Asked(number, prompt, self._opening(prompt))

    def take(self, count: int) -> list[Asked]:
        """The next prompts.

        Raises:
            ConfigError: all prompts are too long, or the chat template does not take one.
        """
        taken: list[Asked] = []
        in_a_row = 0
        while len(taken) < count:
            prompt = self._prompts[self.at]
            ids = self._opening(prompt)
            self.at += 1
            if len(ids) <= self._max_tokens:
                taken.append(Asked(self.at - 1, prompt, ids))
                in_a_row = 0
                continue
            self.skipped, in_a_row = self.skipped + 1, in_a_row + 1
            if in_a_row == _MOST_SKIPPED:
                raise ConfigError(
                    f"rl.max_prompt_tokens={self._max_tokens}: {in_a_row} prompts in a row are longer, the last one "
                    f"{len(ids)} tokens; raise it"
                )
        return taken

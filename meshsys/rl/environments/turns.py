"""How observations stand between a policy's actions, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from meshsys.rl.prompt import Prompt
from meshsys.rl.tasks.encode import encode_prompt

if TYPE_CHECKING:
    from meshsys.data.tokenizers import Tokenizer

__all__ = ["Turns"]

_REPLY = "(an earlier reply)"  # stands for what the policy wrote, whose tokens are there


class Turns:
    """Observations as the user's messages where the prompt is a conversation, and as lines of text otherwise."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: tuple[int, ...] | None = None) -> None:
        """`prompt_ids`: see `encode_prompt`."""
        self._tokenizer, self._prompt_ids = tokenizer, prompt_ids

    def first(self, prompt: Prompt, observation: str) -> list[int]:
        """The tokens before the first action: the prompt with the observation as its last message."""
        if prompt.messages is None:
            shown = replace(prompt, text=f"{observation}\n")
        else:
            shown = replace(prompt, messages=(*prompt.messages[:-1], {"role": "user", "content": observation}))
        return encode_prompt(shown, self._tokenizer, self._prompt_ids).tolist()

    def next(self, prompt: Prompt, action: Sequence[int], observation: str) -> list[int]:
        """The tokens between an action and the next one.

        The chat template writes them after some reply; if the action ended with its stop token, they begin after that.
        """
        if prompt.messages is None:
            return self._tokenizer.encode(f"\n{observation}\n").tolist()
        chat = self._tokenizer.chat
        assert chat is not None  # as `first` has seen
        messages = [
            *prompt.messages,
            {"role": "assistant", "content": _REPLY},
            {"role": "user", "content": observation},
        ]
        rendered = chat.render(messages, add_generation_prompt=True)
        tokens: list[int] = self._tokenizer.encode(rendered.partition(_REPLY)[2]).tolist()
        last = action[-1] if len(action) else None
        if last in self._tokenizer.stop_ids and last in tokens:
            return tokens[tokens.index(last) + 1 :]
        return tokens

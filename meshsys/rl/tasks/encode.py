"""Prompts as tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshsys.errors import ConfigError
from meshsys.rl.prompt import Prompt

if TYPE_CHECKING:
    from meshsys.data.tokenizers import Tokenizer

__all__ = ["encode_prompt"]


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, prompt_ids: tuple[int, ...] | None = None) -> np.ndarray:
    """The tokens, int32 [n], that the policy continues.

    Args:
        prompt_ids: what a text without messages begins with, see `LoadedModel`; the tokenizer's by default.

    Raises:
        ConfigError: a conversation, and a tokenizer without a chat template.
    """
    if prompt.messages is None:
        begin = tokenizer.prompt_ids if prompt_ids is None else prompt_ids
        return np.concatenate((np.array(begin, np.int32), tokenizer.encode(prompt.text)))
    if tokenizer.chat is None:
        raise ConfigError(
            f"the prompt {prompt.id} is a conversation, and the tokenizer {tokenizer.name} has no chat template; set "
            "data.chat_template"
        )
    return tokenizer.encode(tokenizer.chat.render(prompt.messages, add_generation_prompt=True))

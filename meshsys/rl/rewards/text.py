"""Rewards that need nothing but the text."""

from __future__ import annotations

import re
from collections.abc import Callable

from meshsys.answers import given_answer, same_answer
from meshsys.rl.extract import Extract
from meshsys.rl.prompt import Prompt

__all__ = ["exact_match", "gold", "gsm8k", "length", "matches"]


def exact_match(extract: Extract) -> Callable[[Prompt, str], float]:
    """1 for the prompt's answer; numbers are compared as numbers."""
    return lambda prompt, response: float(same_answer(extract(response), gold(prompt)))


def gsm8k(extract: Extract) -> Callable[[Prompt, str], float]:
    """1 for the right number after `####`, or else at the end."""
    return lambda prompt, response: float(same_answer(given_answer(extract(response) or ""), gold(prompt)))


def matches(pattern: str) -> Callable[[Prompt, str], float]:
    """1 where the pattern matches the whole response."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda prompt, response: float(compiled.fullmatch(response) is not None)


def length(free: int, most: int) -> Callable[[Prompt, str], float]:
    """0 up to `free` characters, -1 from `most` on, linear between, as DAPO's for overlong answers
    (arXiv 2503.14476, equation 13), which counts tokens."""
    return lambda prompt, response: -min(1.0, max(0.0, (len(response) - free) / (most - free)))


def gold(prompt: Prompt) -> str:
    """The prompt's answer.

    Raises:
        ValueError: it has none.
    """
    if prompt.answer is None:
        raise ValueError(f"the prompt {prompt.id} has no answer to compare with")
    return prompt.answer

"""Rewards that the packages of the extra `rl` compute."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from meshsys.rl.extract import Extract
from meshsys.rl.imported import missing_extra
from meshsys.rl.prompt import Prompt
from meshsys.rl.rewards.text import gold

__all__ = ["math_verify", "reasoning_gym"]


def math_verify(extract: Extract, said: str) -> Callable[[Prompt, str], float]:
    """1 for what is mathematically equal to the prompt's answer.

    The package limits its time by signals unless told not to; the pool's limit holds here.
    """
    try:
        from math_verify import parse, verify
    except ImportError:
        raise missing_extra(said, "math-verify") from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no limit

    @cache
    def parsed(answer: str) -> Any:
        return parse(f"${answer}$", parsing_timeout=None) or parse(answer, parsing_timeout=None)

    def reward(prompt: Prompt, response: str) -> float:
        answer = extract(response)
        if not answer:
            return 0.0
        right = parsed(gold(prompt))
        return float(verify(right, parse(answer, parsing_timeout=None), timeout_seconds=None))

    return reward


def reasoning_gym(extract: Extract, said: str) -> Callable[[Prompt, str], float]:
    """What the scorer of the task says, from 0 to 1; those of a few tasks raise on what is no answer."""
    try:
        from reasoning_gym import get_score_answer_fn
    except ImportError:
        raise missing_extra(said, "reasoning-gym") from None
    scorer: Callable[[str], Callable[..., Any]] = cache(get_score_answer_fn)

    def reward(prompt: Prompt, response: str) -> float:
        entry = prompt.entry
        return float(scorer(entry["metadata"]["source_dataset"])(extract(response), entry))

    return reward

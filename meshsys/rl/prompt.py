"""What a policy is asked, and what its answer is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Prompt"]


@dataclass(frozen=True)
class Prompt:
    """One prompt of a task.

    Attributes:
        id: `TASK/NUMBER`, the same in every epoch.
        text: what is asked.
        messages: the same as a conversation that the tokenizer's chat template renders; None for plain text.
        answer: the right answer, where there is one.
        entry: what else the task's scorer reads; anything that can be pickled.
        task: the task's name.
        scorer: the kind of reward that is the task's own.
        earned: what an environment gave for the game that began with the prompt, in place of the scorer's reward.
    """

    id: str
    text: str
    messages: tuple[Mapping[str, Any], ...] | None = None
    answer: str | None = None
    entry: Any = None
    task: str = ""
    scorer: str = "exact_match"
    earned: float | None = None

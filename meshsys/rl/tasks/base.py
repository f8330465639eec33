"""What tasks are, and what several of them do."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

from meshsys.rl.prompt import Prompt
from meshsys.rl.tasks.config import TaskConfig

__all__ = ["Form", "Task", "hashed"]


class Task(Protocol):
    """Prompts by number, from 0; the same ones whenever they are asked for.

    Attributes:
        name: in metrics and in the prompts' ids.
        size: how many there are; None where there is no end.
        scorer: the kind of reward that is the task's own.
    """

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None: ...

    @property
    def scorer(self) -> str: ...

    def __getitem__(self, number: int) -> Prompt: ...


class Form:
    """How a task's questions are put: its template, for a model that chats or for one that continues texts."""

    def __init__(self, config: TaskConfig, chat: bool, *, asked: str = "{question}", continued: str = "{question}"):
        """`asked` and `continued`: what stands for the template where the user gave none."""
        self._template = config.template or (asked if chat else continued)
        self._system: list[Mapping[str, Any]] = []
        if config.system is not None:
            self._system = [{"role": "system", "content": config.system}]
        self._chat = chat

    def __call__(self, question: str) -> tuple[str, tuple[Mapping[str, Any], ...] | None]:
        """Text and messages of a prompt."""
        text = self._template.replace("{question}", question)
        return text, self.messages([{"role": "user", "content": text}]) if self._chat else None

    def messages(self, messages: list[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """A conversation, with the system's message."""
        return (*self._system, *messages)


def hashed(*parts: object) -> int:
    """31 bits that follow from some values; nearby values have nothing in common."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1

"""The options of a task."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from meshsys.config_file import INT32_MAX, Count, Label, Section, Text, one_of

__all__ = ["KINDS", "TaskConfig"]

KINDS = {
    "reasoning_gym": "NAME",
    "gsm8k": "FILE.jsonl",
    "jsonl": "FILE.jsonl",
    "python": "package.module:function",
    "rack": None,
}
"""What follows the kind in `source`."""

_WITH_OPTIONS = ("reasoning_gym", "python", "rack")


class TaskConfig(Section):
    """Where prompts come from.

    Attributes:
        source: `reasoning_gym:NAME`; `gsm8k:FILE`, JSONL with `question`, and `answer` with `####`; `jsonl:FILE` with
            `prompt` or `messages`, and `answer`; `python:package.module:function` or `python:file.py:function`, called
            with `seed` and the options, for a sequence of prompts; or `rack`.
        name: in metrics; null means what follows the kind, without folder and ending.
        weight: of the task among all: its part of the prompts.
        size: how many prompts the task has; null means all of a file, or no end.
        seed: of what is generated; null means that of the run.
        template: the prompt's text, with `{question}` where the question stands.
        system: the system's message, for models that chat.
        chat: whether the question is a user's message, which the chat template renders; null: where there is one.
        prompt_field, answer_field: of the lines of `jsonl`; null means `prompt` or `messages`, and `answer`.
        options: of the generator: its difficulty.
    """

    source: Text
    name: Label | None = None
    weight: float = Field(default=1.0, gt=0, le=1e6)
    size: Count | None = None
    seed: int | None = Field(default=None, ge=0, le=INT32_MAX)
    template: Text | None = None
    system: Text | None = None
    chat: bool | None = None
    prompt_field: Text | None = None
    answer_field: Text | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("source")
    @classmethod
    def _is_a_source(cls, source: str) -> str:
        kind, _, what = source.partition(":")
        forms = {name: name if form is None else f"{name}:{form}" for name, form in KINDS.items()}
        if kind not in KINDS:
            kind = one_of(KINDS, kind, "task")
        if bool(what) != (KINDS[kind] is not None):
            raise ValueError(f"is not a task; write {forms[kind]}")
        return source

    @field_validator("template")
    @classmethod
    def _has_a_question(cls, template: str | None) -> str | None:
        if template is not None and "{question}" not in template:
            raise ValueError("has no {question}; write that where the question stands")
        return template

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if self.options and self.kind not in _WITH_OPTIONS:
            raise ValueError(f"a task of source={self.source} has no options; remove them")
        for name in ("prompt_field", "answer_field"):
            if getattr(self, name) is not None and self.kind != "jsonl":
                raise ValueError(f"a task of source={self.source} has no {name}; remove it, or use jsonl:FILE")
        return self

    @property
    def kind(self) -> str:
        return self.source.partition(":")[0]

    @property
    def what(self) -> str:
        """What follows the kind."""
        return self.source.partition(":")[2]

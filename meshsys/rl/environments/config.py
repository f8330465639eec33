"""The options of an environment."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from meshsys.config_file import Count, Section, Text, one_of

__all__ = ["KINDS", "EnvironmentConfig"]

KINDS = ("rack",)


class EnvironmentConfig(Section):
    """What answers to a policy in turns.

    Attributes:
        kind: `rack`; or a class of your own, as `python:package.module:Class` or `python:file.py:Class`.
        options: keyword arguments of the class.
        max_turns: that the policy has.
        max_action_tokens: where an action is cut off; null means at the end of the transcript.
    """

    kind: Text
    options: dict[str, Any] = Field(default_factory=dict)
    max_turns: Count = 16
    max_action_tokens: Count | None = None

    @field_validator("kind")
    @classmethod
    def _is_a_kind(cls, kind: str) -> str:
        return (
            kind if kind.startswith("python:") else one_of((*KINDS, "python:module:Class"), kind, "kind of environment")
        )

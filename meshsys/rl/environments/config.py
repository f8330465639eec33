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
        max_tokens: of a transcript; one that reaches them gets no further turn.
    """

    kind: Text
    options: dict[str, Any] = Field(default_factory=dict)
    max_turns: Count = 16
    max_tokens: Count = 4096

    @field_validator("kind")
    @classmethod
    def _is_a_kind(cls, kind: str) -> str:
        return (
            kind if kind.startswith("python:") else one_of((*KINDS, "python:module:Class"), kind, "kind of environment")
        )

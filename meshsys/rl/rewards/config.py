"""The options of rewards, and of the processes that compute them."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from meshsys.config_file import Count, Label, Section, Text, one_of
from meshsys.rl.extract import pattern_problem

__all__ = ["EXTRACTING", "KINDS", "RewardConfig", "RewardPoolConfig"]

KINDS = {
    "task": "the task's own, or the environment's",
    "exact_match": "1 where the answer is the prompt's",
    "gsm8k": "1 where the number after ####, or else the last one, is the prompt's",
    "math_verify": "1 where the answer is mathematically equal to the prompt's",
    "reasoning_gym": "what the task's scorer in reasoning-gym says, 0 to 1",
    "rack": "1 for a shortest plan that puts a rack in order, less for longer ones",
    "format": "1 where `pattern` matches the whole response",
    "length": "0 up to `free_length` characters, falling to -1 at `max_length`",
}

_LARGEST = 1e6
EXTRACTING = ("task", "exact_match", "gsm8k", "math_verify", "reasoning_gym", "rack")


class RewardConfig(Section):
    """One reward.

    Attributes:
        kind: `task` for the task's own; or `exact_match`, `gsm8k`, `math_verify`, `reasoning_gym`, `rack`, `format`,
            `length`; or a function of your own, called with the prompt and the response, as
            `python:package.module:function` or `python:file.py:function`.
        weight: of the reward in the sum.
        name: in metrics; null means the kind, or the function's name.
        extract: a regular expression whose first group is the answer; the last match counts. Null takes the whole
            response.
        pattern: of `format`: a regular expression; `.` matches line breaks too.
        free_length, max_length: of `length`: characters.
        options: keyword arguments of a function of your own.
    """

    kind: Text = "task"
    weight: float = Field(default=1.0, ge=-_LARGEST, le=_LARGEST)
    name: Label | None = None
    extract: Text | None = None
    pattern: Text | None = None
    free_length: int = Field(default=0, ge=0)
    max_length: Count | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("kind")
    @classmethod
    def _is_a_kind(cls, kind: str) -> str:
        return kind if kind.startswith("python:") else one_of([*KINDS, "python:module:function"], kind, "reward")

    @field_validator("extract", "pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str | None, field: ValidationInfo) -> str | None:
        problem = pattern and pattern_problem(pattern, group=field.field_name == "extract")
        if problem:
            raise ValueError(problem)
        return pattern

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        """An option that a kind does not read would be a mistake unseen."""
        own = self.kind.startswith("python:")
        checks = (
            ("extract", self.extract is not None, self.kind in EXTRACTING, ", ".join(EXTRACTING)),
            ("pattern", self.pattern is not None, self.kind == "format", "format"),
            ("max_length", self.max_length is not None, self.kind == "length", "length"),
            ("free_length", self.free_length != 0, self.kind == "length", "length"),
            ("options", bool(self.options), own, "python:module:function"),
        )
        for name, is_set, is_read, kinds in checks:
            if is_set and not is_read:
                raise ValueError(f"a reward of kind={self.kind} has no {name}; remove it, or use kind: {kinds}")
        if self.kind == "format" and self.pattern is None:
            raise ValueError("a reward of kind=format needs a pattern; write one, as in .*<answer>.*</answer>")
        if self.kind == "length" and (self.max_length is None or self.max_length <= self.free_length):
            raise ValueError("a reward of kind=length needs a max_length above free_length; write it, in characters")
        return self

    @property
    def label(self) -> str:
        """The name in metrics."""
        return self.kind.rpartition(":")[2] if self.name is None else self.name


class RewardPoolConfig(Section):
    """The processes that compute rewards.

    Attributes:
        workers: how many; null means as many as cores but one, at most 8.
        seconds: that the rewards of one sample may take; a worker that takes longer is killed.
        memory_gib: that a worker may allocate, on Linux; null means any amount.
    """

    workers: int | None = Field(default=None, ge=1, le=1024)
    seconds: float = Field(default=10.0, gt=0, le=1e6)
    memory_gib: Annotated[float, Field(gt=0, le=1e6)] | None = 4.0

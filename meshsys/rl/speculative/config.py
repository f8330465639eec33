"""The options of speculative rollouts."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from meshsys.config_file import Count, Section

__all__ = ["SpeculativeConfig"]


class SpeculativeConfig(Section):
    """Whether the responses to a prompt are drafts of the next ones to it, and what becomes of a draft.

    Attributes:
        mode: `off`; `exact`: tokens stay that the new policy draws too, with the same noise, so that a response is one
            of the new policy; `lenient`: tokens stay with the ratio of their probabilities (SPEC-RL), which is faster
            and no sample of any policy.
        lenience: multiplies that ratio.
        refresh: the share of samples whose noise is drawn anew each epoch, and which have no draft then. Noise that
            stays the same throughout is no sample of a policy that it trained, and slows learning.
        cache_tokens: the most tokens of drafts that are kept, 8 bytes each; the oldest drafts make room.
    """

    mode: Literal["off", "exact", "lenient"] = "off"
    lenience: float = Field(default=1.0, gt=0, le=1e6)
    refresh: float = Field(default=0.25, ge=0, le=1)
    cache_tokens: Count = 100_000_000

    @model_validator(mode="after")
    def _uses_its_options(self) -> Self:
        for name, modes in (
            ("lenience", ("lenient",)),
            ("refresh", ("exact",)),
            ("cache_tokens", ("exact", "lenient")),
        ):
            value = getattr(self, name)
            if self.mode not in modes and value != type(self).model_fields[name].default:
                raise ValueError(
                    f"rl.speculative.{name}={value:g} does nothing with rl.speculative.mode={self.mode}; remove it, or "
                    f"set rl.speculative.mode={' or '.join(modes)}"
                )
        return self

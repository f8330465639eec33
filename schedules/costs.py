"""How long each action takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from schedules.actions import Action, Kind, ScheduleError

__all__ = ["Costs"]


@dataclass(frozen=True)
class Costs:
    """Times in one unit of the caller's choice: seconds if measured, or relative to a forward.

    Attributes:
        F: forward of one microbatch through one stage.
        I: input gradient.
        W: weight gradient.
        B: full backward; None for I + W.
        R: recompute as an action of its own.
        send: one transfer between ranks.
        stages: a factor for each stage, or empty for 1 everywhere; `send` has none.
    """

    F: float = 1.0
    I: float = 1.0  # noqa: E741 (the field's own letter)
    W: float = 1.0
    B: float | None = None
    R: float = 0.0
    send: float = 0.0
    stages: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        named = {name: getattr(self, name) for name in _NAMES}
        named.update({f"stages[{stage}]": factor for stage, factor in enumerate(self.stages)})
        for name, value in named.items():
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ScheduleError(f"cost {name}={value} is not a time; use a number from 0")

    @classmethod
    def parse(cls, text: str) -> Costs:
        """Reads `F=1,I=1.3,W=0.7`; what is not named keeps its default."""
        values: dict[str, float] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (part.strip() for part in item.partition("="))
            if name not in _NAMES or name in values:
                reason = "is named twice" if name in values else "is no cost"
                raise ScheduleError(
                    f"costs {text!r}: {name!r} {reason}; use {', '.join(_NAMES)}, as in F=1,I=1.3,W=0.7"
                )
            try:
                values[name] = float(value)
            except ValueError:
                raise ScheduleError(f"costs {text!r}: {item!r} has no number; write it as in F=1,I=1.3,W=0.7") from None
        return cls(**values)  # type: ignore[arg-type]

    def of(self, action: Action) -> float:
        """The time of one action.

        Raises:
            ScheduleError: factors are given for fewer stages than the schedule has.
        """
        if action.kind is Kind.B and self.B is None:
            time = self.I + self.W
        else:
            time = getattr(self, action.kind)
        if not self.stages:
            return time
        if action.stage >= len(self.stages):
            raise ScheduleError(
                f"costs: stages has {len(self.stages)} factors, none for stage {action.stage}; give one for each stage"
            )
        return time * self.stages[action.stage]


_NAMES = ("F", "I", "W", "B", "R", "send")

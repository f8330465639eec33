"""What environments are."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from meshsys.rl.prompt import Prompt

__all__ = ["Environment", "Step"]


class Step(NamedTuple):
    """What an action led to.

    Attributes:
        observation: what the policy sees next.
        reward: of this action; those of all actions are added up.
        done: there is no next action.
        success: whether what the game is about has been achieved; None where that is not told.
    """

    observation: str
    reward: float
    done: bool
    success: bool | None = None


class Environment(Protocol):
    """Something that answers to a policy's texts; one object plays one game at a time."""

    def reset(self, prompt: Prompt) -> str:
        """Begins a game, the same for equal prompts; the first observation."""

    def step(self, action: str) -> Step:
        """Takes what the policy wrote; a tuple with or without the last of `Step` will do."""

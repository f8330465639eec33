"""The rack as an environment, and whole plans judged."""

from __future__ import annotations

from meshsys.rl.environments.base import Step
from meshsys.rl.environments.rack.instances import Instance, describe
from meshsys.rl.environments.rack.puzzle import Rack, read_moves
from meshsys.rl.extract import extractor, pattern_problem
from meshsys.rl.prompt import Prompt

__all__ = ["RackGame", "plan_reward"]


class RackGame:
    """One move a turn. A rack in order is worth the moves of a shortest plan over the moves made."""

    def __init__(
        self,
        *,
        extract: str | None = None,
        illegal_cost: float | None = None,
        partial: float = 0.0,
        patience: float = 3.0,
    ) -> None:
        """
        Args:
            extract: a regular expression whose first group is what is read of an action; the last match counts. None
                reads all.
            illegal_cost: of a move that is not allowed or cannot be read; None ends the game there.
            partial: a rack that is not in order at the end is worth so much times the part of the misplaced tubes
                that came to their places.
            patience: the game ends after so many times the moves of a shortest plan.
        """
        if partial < 0 or patience < 1 or (illegal_cost is not None and illegal_cost < 0):
            raise ValueError("illegal_cost and partial must be at least 0, and patience at least 1")
        problem = extract and pattern_problem(extract, group=True)
        if problem:
            raise ValueError(f"extract={extract} {problem}")
        self._extract = extractor(extract)
        self._illegal_cost, self._partial, self._patience = illegal_cost, partial, patience

    def reset(self, prompt: Prompt) -> str:
        """Begins with the rack of a prompt of the task `rack`; the rules, and what it looks like."""
        self._instance = Instance.of(prompt.entry)
        self._state, self._moves = self._instance.start, 0
        return describe(self._instance, whole_plan=False)

    def step(self, action: str) -> Step:
        """Makes the first move that an action has."""
        rack = self._instance.rack
        self._moves += 1
        moves = read_moves(self._extract(action) or "")
        problem = rack.problem(self._state, moves[0]) if moves else "that is no move; write row,column -> row,column"
        cost = 0.0
        if problem is None:
            self._state = rack.moved(self._state, moves[0])
        elif self._illegal_cost is None:
            return Step(f"The game ends: {problem}.", self._worth(), True, False)
        else:
            cost = self._illegal_cost
        ordered = not rack.misplaced(self._state)
        if ordered or self._moves >= self._patience * self._instance.optimal:
            return Step("The rack is in order." if ordered else "The game ends.", self._worth() - cost, True, ordered)
        said = "" if problem is None else f"Not allowed: {problem}.\n"
        return Step(f"{said}{rack.text(self._state)}", -cost, False, False)

    def _worth(self) -> float:
        return _worth(self._instance, self._state, self._moves, self._partial)


def plan_reward(prompt: Prompt, response: str, *, partial: float = 0.0) -> float:
    """What a whole plan is worth, up to the move that brings order or is not allowed; see `RackGame`."""
    instance = Instance.of(prompt.entry)
    rack: Rack = instance.rack
    state, made = instance.start, 0
    for move in read_moves(response):
        if not rack.misplaced(state) or rack.problem(state, move) is not None:
            break
        state, made = rack.moved(state, move), made + 1
    return _worth(instance, state, made, partial)


def _worth(instance: Instance, state: bytes, moves: int, partial: float) -> float:
    left = instance.rack.misplaced(state)
    if not left:
        return instance.optimal / moves
    return partial * max(0.0, 1 - left / instance.rack.misplaced(instance.start))

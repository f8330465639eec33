"""Racks to be put in order, from seeds."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshsys.errors import ConfigError
from meshsys.rl.environments.rack.puzzle import Move, Rack, class_name
from meshsys.rl.environments.rack.solve import solve

__all__ = ["Instance", "RackOptions", "describe", "make_instance"]

_TRIES = 3  # at racks that take too long to solve
_ORDERED = 1000  # in a row, before no rack is taken to be out of order after so many moves


@dataclass(frozen=True)
class RackOptions:
    """How hard racks are.

    Attributes:
        rows, columns: cells.
        classes: of tubes; each has a column.
        tubes: of each class.
        moves: random ones, from an ordered rack; a shortest plan has at most so many.
    """

    rows: int = 3
    columns: int = 4
    classes: int = 3
    tubes: int = 2
    moves: int = 6

    def __post_init__(self) -> None:
        limits = {"rows": (1, 12), "columns": (2, 12), "classes": (1, self.columns), "tubes": (1, self.rows)}
        for name, (least, most) in (limits | {"moves": (1, 1000)}).items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name}={value} must be a whole number from {least} to {most}")
        if self.tubes == self.rows and self.classes == self.columns:
            raise ValueError(f"tubes={self.tubes} leave no empty cell; lower them, or classes={self.classes}")


class Instance(NamedTuple):
    """One rack to be put in order.

    Attributes:
        optimal: moves of a shortest plan.
    """

    rack: Rack
    start: bytes
    optimal: int

    def entry(self) -> dict[str, Any]:
        """What a prompt holds of it; plain values."""
        return {
            "rows": self.rack.rows,
            "owners": list(self.rack.owners),
            "start": list(self.start),
            "optimal": self.optimal,
        }

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Instance:
        """The other way round."""
        return cls(Rack(entry["rows"], tuple(entry["owners"])), bytes(entry["start"]), entry["optimal"])


def make_instance(options: RackOptions, seed: int) -> Instance:
    """A rack that is not in order, the same for equal seeds.

    Raises:
        ConfigError: shortest plans for such racks take too long to find, or all such racks are in order.
    """
    rack = Rack(options.rows, tuple(k + 1 if k < options.classes else 0 for k in range(options.columns)))
    ordered = bytes(
        owner if row >= options.rows - options.tubes else 0 for row in range(options.rows) for owner in rack.owners
    )
    generator = random.Random(seed)
    unsolved = in_order = 0
    while unsolved < _TRIES:
        state, last = ordered, None
        for _ in range(options.moves):
            moves = [move for move in rack.moves(state) if last is None or move.source != last.target]
            last = generator.choice(moves or list(rack.moves(state)))
            state = rack.moved(state, last)
        if not rack.misplaced(state):
            in_order += 1
            if in_order == _ORDERED:
                raise ConfigError(f"racks with {options} are in order after moves={options.moves}; take another number")
            continue
        plan = solve(rack, state)
        if plan is not None:
            return Instance(rack, state, len(plan))
        unsolved += 1
    raise ConfigError(f"racks with {options} take too long to solve; lower moves={options.moves}")


def describe(instance: Instance, *, whole_plan: bool) -> str:
    """The question: rules, rack, and what to write."""
    rack = instance.rack
    homes = ", ".join(
        f"column {column} is for {class_name(owner)}" for column, owner in enumerate(rack.owners) if owner
    )
    example = Move((0, 1), (2, 0))
    wanted = "all moves, one a line" if whole_plan else "one move"
    return (
        f"A rack has {rack.rows} rows and {rack.columns} columns of cells for tubes. Row 0 is the front. A tube can be "
        "lifted if no other stands before it in its column, and put into an empty cell with no tube before it. "
        f"Bring every tube into the column of its class in few moves: {homes}.\n\n{rack.text(instance.start)}\n\n"
        f"Write {wanted}, as row,column -> row,column, for example {example}"
    )

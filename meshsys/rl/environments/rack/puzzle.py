"""The rack: tubes of several classes in R rows and C columns, to be sorted by column.

A gripper comes from the front, row 0. It takes a tube only if no other stands before it in its column, and puts it
only into an empty cell that it reaches in the same way. The rack is in order once every tube stands in a column of its
class. Every move can be undone by another, so that whatever was made by moves from an ordered rack can be solved.

A state is R * C bytes, row by row: 0 for an empty cell, else the class, from 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Move", "Rack", "class_name", "read_moves"]

_MOVE = re.compile(r"(\d{1,3})\s*,\s*(\d{1,3})\s*->\s*(\d{1,3})\s*,\s*(\d{1,3})")


class Move(NamedTuple):
    """From a cell to a cell, each (row, column)."""

    source: tuple[int, int]
    target: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.source[0]},{self.source[1]} -> {self.target[0]},{self.target[1]}"


@dataclass(frozen=True)
class Rack:
    """What does not change.

    Attributes:
        rows: R.
        owners: of each column, the class that belongs there; 0 for none.
    """

    rows: int
    owners: tuple[int, ...]

    @property
    def columns(self) -> int:
        return len(self.owners)

    def depth(self, state: bytes, column: int) -> int:
        """Empty cells at the front of a column; R if it has no tube."""
        return next((row for row in range(self.rows) if state[row * self.columns + column]), self.rows)

    def problem(self, state: bytes, move: Move) -> str | None:
        """Why a move is not allowed."""
        for row, column in move:
            if row >= self.rows or column >= self.columns:
                return f"there is no cell {row},{column}"
        (row, column), (to_row, to_column) = move
        if not state[row * self.columns + column]:
            return f"cell {row},{column} is empty"
        if row != self.depth(state, column):
            return f"another tube stands before cell {row},{column}"
        lifted = self.moved(state, Move(move.source, move.source), lift=True)
        if lifted[to_row * self.columns + to_column] or move.source == move.target:
            return f"cell {to_row},{to_column} is not empty"
        if to_row >= self.depth(lifted, to_column):
            return f"another tube stands before cell {to_row},{to_column}"
        return None

    def moved(self, state: bytes, move: Move, *, lift: bool = False) -> bytes:
        """The state after a move that is allowed; with `lift`, without the tube."""
        cells = bytearray(state)
        tube = cells[move.source[0] * self.columns + move.source[1]]
        cells[move.source[0] * self.columns + move.source[1]] = 0
        if not lift:
            cells[move.target[0] * self.columns + move.target[1]] = tube
        return bytes(cells)

    def moves(self, state: bytes) -> Iterator[Move]:
        """All that are allowed."""
        for column in range(self.columns):
            row = self.depth(state, column)
            if row == self.rows:
                continue
            lifted = self.moved(state, Move((row, column), (row, column)), lift=True)
            for to_column in range(self.columns):
                for to_row in range(self.depth(lifted, to_column)):
                    if (to_row, to_column) != (row, column):
                        yield Move((row, column), (to_row, to_column))

    def misplaced(self, state: bytes) -> int:
        """Tubes that stand in no column of their class."""
        return sum(tube not in (0, self.owners[cell % self.columns]) for cell, tube in enumerate(state))

    def text(self, state: bytes) -> str:
        """The rack as a table; the last line has the classes of the columns."""
        numbers = " ".join(f"{column:>2}" for column in range(self.columns))
        lines = [f"row\\column {numbers}"]
        for row in range(self.rows):
            cells = state[row * self.columns : (row + 1) * self.columns]
            lines.append(f"{row:>10} " + " ".join(f"{class_name(tube):>2}" for tube in cells))
        lines.append(f"{'class':>10} " + " ".join(f"{class_name(owner):>2}" for owner in self.owners))
        return "\n".join(lines)


def class_name(number: int) -> str:
    """A letter; a dot for none."""
    return chr(ord("A") + number - 1) if number else "."


def read_moves(text: str) -> list[Move]:
    """The moves that a text has, as `1,0 -> 2,3`, in their order."""
    cells = [tuple(map(int, found)) for found in _MOVE.findall(text)]
    return [Move((a, b), (c, d)) for a, b, c, d in cells]

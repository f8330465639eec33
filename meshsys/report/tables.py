"""Tables of the page, and the marks in them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["bar", "key", "stack", "table"]


def bar(part: float, colour: str) -> str:
    """A bar as wide as a part of its cell."""
    return f'<i style="width:{100 * part:.1f}%;background:{colour}"></i>'


def key(colour: str) -> str:
    """A small square."""
    return f'<i class="key" style="background:{colour}"></i>'


def stack(parts: Sequence[tuple[str, float, str, int]]) -> str:
    """One bar of all parts that are not 0.

    Args:
        parts: name and size of each, the size in words, and the colour, by its number in the style sheet. Names and
            words are HTML.
    """
    pieces = "".join(
        f'<i style="flex:{size};background:var(--c{colour})" title="{name}: {words}"></i>'
        for name, size, words, colour in parts
        if size
    )
    return f'<div class="stack">{pieces}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, total: bool = False) -> str:
    """Cells are HTML. A heading that begins with # is of numbers, | is of bars; `total` sets the last row off."""
    kinds = [' class="n"' if name[:1] == "#" else ' class="bar"' if name == "|" else "" for name in head]
    names = "".join(f"<th{kind}>{name.lstrip('#|')}</th>" for name, kind in zip(head, kinds, strict=True))
    lines = []
    for place, row in enumerate(rows):
        cells = "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True))
        last = ' class="total"' if total and place == len(rows) - 1 else ""
        lines.append(f"<tr{last}>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'

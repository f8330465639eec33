"""The answer within a response."""

from __future__ import annotations

import re
from collections.abc import Callable

__all__ = ["Extract", "extractor", "pattern_problem"]

Extract = Callable[[str], str | None]
"""From a response to its answer; None where it has none."""


def extractor(pattern: str | None) -> Extract:
    """Takes the first group of a pattern's last match, or the whole response without a pattern."""
    if pattern is None:
        return str.strip
    compiled = re.compile(pattern, re.DOTALL)

    def extract(response: str) -> str | None:
        found = None
        for found in compiled.finditer(response):  # noqa: B007  the last one is wanted
            pass
        return None if found is None or found[1] is None else found[1].strip()

    return extract


def pattern_problem(pattern: str, *, group: bool) -> str | None:
    """Why a regular expression cannot be used, for messages.

    Args:
        group: it needs one.
    """
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        return f"is not a regular expression: {error}; mend it"
    if group and not groups:
        return "has no group for the answer; write parentheses, as in <answer>(.*?)</answer>"
    return None

"""Questions and answers in GSM8K's form (Cobbe et al. 2021): a number after `####`, at the end of the reasoning.

Imports little: processes that score answers have no use for JAX.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from math import comb

__all__ = ["ASKED", "CONTINUED", "given_answer", "last_number", "marked_answer", "pass_at_k", "same_answer"]

ASKED = "{question}\nSolve the problem step by step. End with #### and the number that is the answer."
"""How a question is put to a model that chats."""

CONTINUED = "Question: {question}\nAnswer:"
"""How it is put to one that continues texts."""

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+"


def marked_answer(text: str) -> str | None:
    """What follows the first `####` on its line, without spaces, thousands separators, currency and a full stop.

    The first, as a model may go on with another question.
    """
    found = re.search(r"####[ \t]*([^\n#]*)", text)
    return (_plain(found[1]) or None) if found else None


def last_number(text: str) -> str | None:
    """The last number of a text."""
    found = re.findall(_NUMBER, text)
    return _plain(found[-1]) if found else None


def given_answer(text: str) -> str | None:
    """The answer that is marked, or else the last number."""
    marked = marked_answer(text)
    return last_number(text) if marked is None else marked


def same_answer(answer: str | None, gold: str) -> bool:
    """Whether two answers are equal, as numbers if they are numbers."""
    if answer is None:
        return False
    try:
        return Decimal(answer) == Decimal(gold)
    except InvalidOperation:
        return answer.casefold() == gold.casefold()


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The probability that one of k samples, drawn without replacement, is right (Chen et al. 2021, equation 1)."""
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def _plain(answer: str) -> str:
    return re.sub(r"[,$\s]", "", answer).rstrip(".")

"""Rewards for whole runs."""

from __future__ import annotations

import time
import zlib


def share_of_low(prompt, response: str) -> float:
    """The share of characters with low codes: a tiny policy learns it in a few steps."""
    return sum(ord(letter) < 64 for letter in response) / max(len(response), 1)


def slow(prompt, response: str, *, seconds: float = 0.2) -> float:
    """The same after a while, the longer for some responses."""
    time.sleep(seconds * (zlib.crc32(response.encode()) % 4) / 2)
    return share_of_low(prompt, response)

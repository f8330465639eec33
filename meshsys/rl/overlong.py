"""What a response loses for coming close to the longest that it may be."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["overlong_penalty"]


def overlong_penalty(length_N: ArrayLike, max_tokens: int, buffer: int) -> NDArray[np.float64]:
    """The soft punishment of DAPO (Yu et al. 2025, equation 13), to be added to the scores: from 0 down to -1.

    Args:
        length_N: tokens of each response, its end of sequence too.
        max_tokens: the longest that a response may be.
        buffer: tokens before it over which the punishment grows; 0 punishes only what is longer than `max_tokens`.
    """
    over_N = np.asarray(length_N, np.float64) - (max_tokens - buffer)
    return -np.clip(over_N / buffer, 0, 1) if buffer else -(over_N > 0).astype(np.float64)

"""Each token's weight in the loss, with the denominators of the whole batch; on the host, in float64.

The loss of a batch is the sum of weight times token loss. As the denominators are those of all that one optimizer step
learns from, the sum does not depend on how tokens are divided among microbatches and devices, nor on padding.

Shapes: N responses of an optimizer step, T tokens of a response, padded.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["AGGREGATIONS", "divisor", "token_weights"]


def token_weights(aggregation: str, mask_NT: ArrayLike, max_tokens: int) -> NDArray[np.float64]:
    """The weights [N, T] of tokens, 0 outside the mask.

    Responses without a token in the mask count for nothing, so that rows may be added to fill a batch.

    Args:
        aggregation: a name of `AGGREGATIONS`.
            `token_mean`: the mean over all tokens (Yu et al. 2025, DAPO).
            `sequence_mean_token_mean`: the mean over responses of the mean over tokens (Shao et al. 2024, GRPO).
            `sequence_mean_token_sum`: the mean over responses of the sum over tokens.
            `sequence_mean_token_sum_norm`: the same divided by `max_tokens` (Liu et al. 2025, Dr. GRPO).
        mask_NT: the tokens to learn.
        max_tokens: the longest that a response may be.
    """
    mask = np.asarray(mask_NT, bool)
    return np.where(mask, AGGREGATIONS[aggregation](mask, max_tokens), 0)


def divisor(aggregation: str, mask_NT: ArrayLike) -> int:
    """What the weights of a batch are divided by: its tokens, or its responses.

    Weights times divisor add up over parts of a batch whose whole is not known yet; divided by the sum of the parts'
    divisors they are those of the whole.
    """
    mask = np.asarray(mask_NT, bool)
    return int(mask.sum()) if aggregation == "token_mean" else int(mask.any(1).sum())


def _responses(mask_NT: NDArray[np.bool_]) -> int:
    return max(int(mask_NT.any(1).sum()), 1)


def _token_mean(mask_NT: NDArray[np.bool_], max_tokens: int) -> ArrayLike:
    return 1 / max(int(mask_NT.sum()), 1)


def _sequence_mean_token_mean(mask_NT: NDArray[np.bool_], max_tokens: int) -> ArrayLike:
    return 1 / (_responses(mask_NT) * np.maximum(mask_NT.sum(1, keepdims=True), 1))


def _sequence_mean_token_sum(mask_NT: NDArray[np.bool_], max_tokens: int) -> ArrayLike:
    return 1 / _responses(mask_NT)


def _sequence_mean_token_sum_norm(mask_NT: NDArray[np.bool_], max_tokens: int) -> ArrayLike:
    return 1 / (_responses(mask_NT) * max_tokens)


AGGREGATIONS: dict[str, Callable[[NDArray[np.bool_], int], ArrayLike]] = {
    "token_mean": _token_mean,
    "sequence_mean_token_mean": _sequence_mean_token_mean,
    "sequence_mean_token_sum": _sequence_mean_token_sum,
    "sequence_mean_token_sum_norm": _sequence_mean_token_sum_norm,
}

"""Estimates of how far the policy has left the reference, from the tokens that were sampled.

With d = log policy - log reference at a token that the policy drew (Schulman 2020, "Approximating KL divergence"):

    k1 = d                    k2 = d^2 / 2                    k3 = exp(-d) - 1 + d

The mean of k1 and of k3 is KL(policy || reference); that of k2 is near it. What an estimate does when it is minimised
is another matter, as only the gradient of a loss counts, and only the value of a reward:

    place    estimate    expected gradient, on policy
    loss     k1          0: the mean of a score function. It penalises nothing.
    loss     k2          that of KL(policy || reference)
    loss     k3          that of KL(reference || policy), the other way around
    reward   k1          that of KL(policy || reference)
    reward   k2, k3      0 to first order near the reference, where k1's is not: it hardly penalises

So k1 belongs into the reward, and k2 or k3 into the loss; the others are refused. In the loss, an estimate is
multiplied by the constant ratio of the policy to the one that drew the tokens, which keeps the table true off policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["LARGEST_LOG_RATIO", "Estimator", "KlPenalty", "Place", "estimate", "token_rewards"]

Estimator = Literal["k1", "k2", "k3"]
Place = Literal["loss", "reward"]

LARGEST_LOG_RATIO = 20.0  # exp of it is 5e8, which float32 holds, and its products with advantages and weights


@dataclass(frozen=True)
class KlPenalty:
    """How leaving the reference is penalised.

    Attributes:
        coefficient: of the estimate; above 0.
        estimator: which estimate.
        place: whether the estimate is added to the loss or taken from the rewards.
    """

    coefficient: float
    estimator: Estimator
    place: Place


def estimate(estimator: Estimator, logp: Any, reference_logp: Any) -> Any:
    """The estimate at each token, for NumPy and JAX arrays of any shape.

    Differences beyond `LARGEST_LOG_RATIO` count as that, and have no gradient.
    """
    xp = logp.__array_namespace__()
    d = xp.clip(logp - reference_logp, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    match estimator:
        case "k1":
            return d
        case "k2":
            return 0.5 * d * d
        case "k3":
            return xp.expm1(-d) + d


def token_rewards(
    penalty: KlPenalty, logp_NT: ArrayLike, reference_logp_NT: ArrayLike, mask_NT: ArrayLike
) -> NDArray[np.float64]:
    """What leaving the reference takes from the rewards of tokens, float64 [N, T], 0 outside the mask.

    Args:
        logp_NT: of the policy that drew the tokens.
    """
    mask = np.asarray(mask_NT, bool)
    logp = np.where(mask, np.asarray(logp_NT, np.float64), 0)
    reference = np.where(mask, np.asarray(reference_logp_NT, np.float64), 0)
    return -penalty.coefficient * estimate(penalty.estimator, logp, reference)

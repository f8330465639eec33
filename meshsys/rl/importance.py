"""Weights that correct for a sampler whose log-probabilities differ from the trainer's; on the host, in float64.

A sampler of other precision, layout or kernels draws from a slightly other distribution than the trainer computes
gradients of. The weight of a token is trainer over sampler, bounded so that no token rules the step (Yao et al. 2025,
"Your efficient RL framework secretly brings you off-policy RL training").

Shapes: N responses, T tokens of a response, padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshsys.rl.kl import LARGEST_LOG_RATIO, estimate

__all__ = ["Correction", "Importance"]

Floats = NDArray[np.float64]


class Correction(NamedTuple):
    """What a step's tokens are weighted by.

    Attributes:
        weight_NT: of each token, 0 outside the mask.
        metrics: of tokens in the mask; without any, all are 0. `logp_difference_mean` and `logp_difference_max`, of
            absolute differences; `sampler_kl`, from the sampler to the trainer; `importance_mean`, `importance_max`
            and `importance_ess`, the effective sample size as a share of the tokens, of the weights before they are
            bounded; the same three as `bounded_importance_...` after; `bounded_share`, of weights that were changed.
    """

    weight_NT: Floats
    metrics: dict[str, float]


@dataclass(frozen=True)
class Importance:
    """How the weights are made.

    Attributes:
        mode: `truncate` takes a larger weight than the cap as the cap; `mask` takes one outside of floor and cap as 0;
            `none` takes every weight as 1, and measures all the same.
        level: whether each token has its own weight, or its response's, the geometric mean over tokens.
        cap: the largest weight.
        floor: the smallest, for `mask`.
    """

    mode: Literal["none", "truncate", "mask"] = "truncate"
    level: Literal["token", "sequence"] = "token"
    cap: float = 2.0
    floor: float = 0.5

    def __call__(self, trainer_logp_NT: ArrayLike, sampler_logp_NT: ArrayLike, mask_NT: ArrayLike) -> Correction:
        """The weights of a batch.

        Raises:
            ValueError: a log-probability in the mask that is NaN.
        """
        mask = np.asarray(mask_NT, bool)
        trainer, sampler = _in_mask("trainer", trainer_logp_NT, mask), _in_mask("sampler", sampler_logp_NT, mask)
        difference = np.clip(trainer - sampler, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        log_weight = difference
        if self.level == "sequence":
            mean_N = difference.sum(1) / np.maximum(mask.sum(1), 1)
            log_weight = np.broadcast_to(mean_N[:, None], mask.shape)
        raw = np.where(mask, np.exp(log_weight), 0)
        weight = np.where(mask, self._bounded(raw), 0)
        metrics = {
            "logp_difference_mean": _mean(np.abs(difference)[mask]),
            "logp_difference_max": float(np.abs(difference)[mask].max(initial=0)),
            "sampler_kl": _mean(estimate("k3", sampler, trainer)[mask]),
            **_summary("importance", raw[mask]),
            **_summary("bounded_importance", weight[mask]),
            "bounded_share": _mean((weight != raw)[mask]),
        }
        return Correction(weight, metrics)

    def _bounded(self, weight_NT: Floats) -> Floats:
        match self.mode:
            case "none":
                return np.ones_like(weight_NT)
            case "truncate":
                return np.minimum(weight_NT, self.cap)
            case "mask":
                return np.where((weight_NT >= self.floor) & (weight_NT <= self.cap), weight_NT, 0)


def _in_mask(whose: str, logp_NT: ArrayLike, mask_NT: NDArray[np.bool_]) -> Floats:
    logp = np.where(mask_NT, np.asarray(logp_NT, np.float64), 0)
    if np.isnan(logp).any():
        row, token = np.argwhere(np.isnan(logp))[0]
        raise ValueError(f"the {whose}'s log-probability of response {row} is NaN at token {token}")
    return logp


def _mean(x: NDArray) -> float:
    return float(x.mean()) if x.size else 0.0


def _summary(name: str, weight: Floats) -> dict[str, float]:
    squares = float(np.square(weight).sum())
    return {
        f"{name}_mean": _mean(weight),
        f"{name}_max": float(weight.max(initial=0)),
        f"{name}_ess": float(weight.sum()) ** 2 / (weight.size * squares) if squares else 0.0,
    }

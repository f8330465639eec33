"""Weights against a sampler that differs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from meshsys.rl.importance import Importance

MASK_NT = np.array([[1, 1, 1], [1, 1, 0]], bool)
SAMPLER_NT = np.array([[-1.0, -2.0, -0.5], [-3.0, -1.0, np.nan]])
RATIO_NT = np.array([[1.0, 4.0, 0.25], [1.5, 0.9, np.nan]])
TRAINER_NT = SAMPLER_NT + np.log(RATIO_NT)


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        (Importance("none"), [[1, 1, 1], [1, 1, 0]]),
        (Importance("truncate", cap=2.0), [[1, 2, 0.25], [1.5, 0.9, 0]]),
        (Importance("mask", cap=2.0, floor=0.5), [[1, 0, 0], [1.5, 0.9, 0]]),
        (Importance("truncate", "sequence", cap=1.1), [[1, 1, 1], [1.1, 1.1, 0]]),
        (Importance("mask", "sequence", cap=1.1, floor=0.9), [[1, 1, 1], [0, 0, 0]]),
    ],
    ids=lambda it: f"{it.mode}-{it.level}" if isinstance(it, Importance) else "",
)
def test_weights_by_hand(settings: Importance, weights: list[list[float]]) -> None:
    np.testing.assert_allclose(settings(TRAINER_NT, SAMPLER_NT, MASK_NT).weight_NT, weights, rtol=1e-12)


def test_a_sequences_weight_is_its_geometric_mean() -> None:
    weight_NT = Importance("truncate", "sequence")(TRAINER_NT, SAMPLER_NT, MASK_NT).weight_NT
    mean = math.sqrt(1.5 * 0.9)
    np.testing.assert_allclose(weight_NT, [[1, 1, 1], [mean, mean, 0]], rtol=1e-12)


def test_what_is_measured_is_measured_before_and_after() -> None:
    metrics = Importance("truncate", cap=2.0)(TRAINER_NT, SAMPLER_NT, MASK_NT).metrics
    raw, bounded = [1, 4, 0.25, 1.5, 0.9], [1, 2, 0.25, 1.5, 0.9]
    naive = {
        "logp_difference_mean": sum(abs(math.log(ratio)) for ratio in raw) / 5,
        "logp_difference_max": math.log(4),
        "sampler_kl": sum(ratio - 1 - math.log(ratio) for ratio in raw) / 5,
        "importance_mean": sum(raw) / 5,
        "importance_max": 4,
        "importance_ess": sum(raw) ** 2 / (5 * sum(weight**2 for weight in raw)),
        "bounded_importance_mean": sum(bounded) / 5,
        "bounded_importance_max": 2,
        "bounded_importance_ess": sum(bounded) ** 2 / (5 * sum(weight**2 for weight in bounded)),
        "bounded_share": 1 / 5,
    }
    assert metrics == pytest.approx(naive)


@pytest.mark.parametrize("mode", ["none", "truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_sampler_that_does_not_differ_is_not_corrected(mode: str, level: str) -> None:
    correction = Importance(mode, level)(SAMPLER_NT, SAMPLER_NT, MASK_NT)
    np.testing.assert_array_equal(correction.weight_NT, MASK_NT.astype(float))
    assert correction.metrics["bounded_share"] == 0 and correction.metrics["importance_ess"] == 1


def test_no_difference_is_too_large() -> None:
    trainer_NT, sampler_NT = np.array([[0.0, -1e9]]), np.array([[-np.inf, 0.0]])
    correction = Importance("truncate")(trainer_NT, sampler_NT, np.ones((1, 2), bool))
    assert np.isfinite(correction.weight_NT).all() and all(map(math.isfinite, correction.metrics.values()))


def test_nothing_to_measure_is_zero() -> None:
    correction = Importance()(TRAINER_NT, SAMPLER_NT, np.zeros((2, 3), bool))
    assert not correction.weight_NT.any() and not any(correction.metrics.values())


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="the sampler's log-probability of response 1 is NaN at token 2"):
        Importance()(np.zeros((2, 3)), SAMPLER_NT, np.ones((2, 3), bool))

"""Weights against means taken by hand."""

from __future__ import annotations

import numpy as np
import pytest

from meshsys.rl.aggregation import AGGREGATIONS, divisor, token_weights

LENGTHS = (5, 1, 3, 0)
MOST = 7


def _naive(aggregation: str, losses: list[list[float]]) -> float:
    losses = [row for row in losses if row]
    match aggregation:
        case "token_mean":
            every = [loss for row in losses for loss in row]
            return sum(every) / len(every)
        case "sequence_mean_token_mean":
            return sum(sum(row) / len(row) for row in losses) / len(losses)
        case "sequence_mean_token_sum":
            return sum(sum(row) for row in losses) / len(losses)
        case "sequence_mean_token_sum_norm":
            return sum(sum(row) for row in losses) / (len(losses) * MOST)
    raise AssertionError(aggregation)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_take_the_mean(aggregation: str) -> None:
    loss_NT = np.random.default_rng(0).normal(size=(4, 5))
    mask_NT = np.arange(5)[None, :] < np.array(LENGTHS)[:, None]
    naive = _naive(aggregation, [list(row[:length]) for row, length in zip(loss_NT, LENGTHS, strict=True)])
    weight_NT = token_weights(aggregation, mask_NT, MOST)
    assert np.sum(weight_NT * loss_NT) == pytest.approx(naive, rel=1e-14)
    assert (weight_NT[~mask_NT] == 0).all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_padding_changes_no_weight(aggregation: str) -> None:
    mask_NT = np.arange(5)[None, :] < np.array(LENGTHS)[:, None]
    wider = np.pad(mask_NT, ((0, 2), (1, 3)))
    weight_NT = token_weights(aggregation, mask_NT, MOST)
    np.testing.assert_array_equal(token_weights(aggregation, wider, MOST), np.pad(weight_NT, ((0, 2), (1, 3))))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_of_nothing_weighs_nothing(aggregation: str) -> None:
    np.testing.assert_array_equal(token_weights(aggregation, np.zeros((2, 3), bool), MOST), np.zeros((2, 3)))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_of_parts_are_those_of_the_whole_by_the_sum_of_divisors(aggregation: str) -> None:
    mask = np.arange(7) < np.array([3, 7, 1, 0, 5, 2])[:, None]
    parts = [mask[:1], mask[1:4], mask[4:]]
    divisors = [divisor(aggregation, part) for part in parts]
    found = [token_weights(aggregation, part, 7) * by for part, by in zip(parts, divisors, strict=True)]
    assert divisors == ([3, 8, 7] if aggregation == "token_mean" else [1, 2, 2])
    np.testing.assert_allclose(np.concatenate(found) / sum(divisors), token_weights(aggregation, mask, 7), rtol=1e-12)

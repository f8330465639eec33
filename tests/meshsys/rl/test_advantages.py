"""Advantages against loops that a reader can check by eye, and against values of verl."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from meshsys.rl import advantages
from meshsys.rl.advantages import Episodes, members_of_groups, zero_variance_groups

GAMMA, LAMBDA = 0.9, 0.8


@pytest.fixture
def episodes() -> Episodes:
    """Three groups of three, mixed up, of lengths 1 to 6; the fourth response has a hole, as a tool's words leave."""
    rng = np.random.default_rng(0)
    mask_NT = np.arange(6)[None, :] < np.array([6, 1, 3, 6, 2, 5, 4, 6, 1])[:, None]
    mask_NT[3, 2:4] = False
    noise_NT = rng.normal(size=(2, 9, 6))
    return Episodes(
        score_N=rng.normal(size=9),
        mask_NT=mask_NT,
        token_reward_NT=np.where(mask_NT, noise_NT[0], np.nan),
        group_N=np.array([7, 2, 7, 40, 2, 40, 40, 7, 2]),
        group_size=3,
        value_NT=np.where(mask_NT, noise_NT[1], np.nan),
    )


def _chosen(episodes: Episodes, row: int) -> list[int]:
    """The tokens of a response that the policy chose."""
    return [t for t in range(episodes.mask_NT.shape[1]) if episodes.mask_NT[row, t]]


def _rewards(episodes: Episodes, row: int) -> list[float]:
    """Of the chosen tokens; the score comes with the last."""
    rewards = [float(episodes.token_reward_NT[row, t]) for t in _chosen(episodes, row)]
    rewards[-1] += float(episodes.score_N[row])
    return rewards


def _others(episodes: Episodes, row: int) -> list[float]:
    """The rewards of the other responses of a group."""
    group = episodes.group_N
    return [sum(_rewards(episodes, other)) for other in range(9) if other != row and group[other] == group[row]]


def _spread(episodes: Episodes, value_of_row: list[list[float]]) -> np.ndarray:
    """A value of each chosen token as an array, 0 elsewhere."""
    spread = np.zeros(episodes.mask_NT.shape)
    for row, values in enumerate(value_of_row):
        for t, value in zip(_chosen(episodes, row), values, strict=True):
            spread[row, t] = value
    return spread


def _whitened(rows: list[list[float]]) -> list[list[float]]:
    every = [value for row in rows for value in row]
    mean = sum(every) / len(every)
    variance = sum((value - mean) ** 2 for value in every) / (len(every) - 1)
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in row] for row in rows]


def _alike(episodes: Episodes, value_of_row: list[float]) -> list[list[float]]:
    return [[value] * len(_chosen(episodes, row)) for row, value in enumerate(value_of_row)]


def _centred(episodes: Episodes, row: int) -> float:
    own, others = sum(_rewards(episodes, row)), _others(episodes, row)
    return own - (own + sum(others)) / (1 + len(others))


def test_grpo_divides_by_the_groups_deviation(episodes: Episodes) -> None:
    naive = []
    for row in range(9):
        rewards = [sum(_rewards(episodes, row)), *_others(episodes, row)]
        mean = sum(rewards) / 3
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / 2)
        naive.append((rewards[0] - mean) / (deviation + 1e-6))
    np.testing.assert_allclose(
        advantages.grpo(episodes).advantage_NT, _spread(episodes, _alike(episodes, naive)), rtol=1e-12
    )


def test_dr_grpo_takes_the_groups_mean(episodes: Episodes) -> None:
    naive = _spread(episodes, _alike(episodes, [_centred(episodes, row) for row in range(9)]))
    np.testing.assert_allclose(advantages.dr_grpo(episodes).advantage_NT, naive, atol=1e-12)
    undivided = advantages.grpo(episodes, normalize_advantages=False).advantage_NT
    np.testing.assert_array_equal(undivided, advantages.dr_grpo(episodes).advantage_NT)


def test_rloo_takes_the_mean_of_the_others(episodes: Episodes) -> None:
    naive = [sum(_rewards(episodes, row)) - sum(_others(episodes, row)) / 2 for row in range(9)]
    np.testing.assert_allclose(
        advantages.rloo(episodes).advantage_NT, _spread(episodes, _alike(episodes, naive)), atol=1e-12
    )


@pytest.mark.parametrize("whiten", [True, False])
def test_reinforce_plus_plus_sums_rewards_to_go(episodes: Episodes, whiten: bool) -> None:
    naive = []
    for row in range(9):
        rewards = _rewards(episodes, row)
        naive.append([sum(GAMMA**k * reward for k, reward in enumerate(rewards[t:])) for t in range(len(rewards))])
    naive = _whitened(naive) if whiten else naive
    ours = advantages.reinforce_plus_plus(episodes, gamma=GAMMA, normalize_advantages=whiten).advantage_NT
    np.testing.assert_allclose(ours, _spread(episodes, naive), atol=1e-12)


@pytest.mark.parametrize("whiten", [True, False])
def test_reinforce_plus_plus_baseline_takes_the_groups_mean(episodes: Episodes, whiten: bool) -> None:
    naive = _alike(episodes, [_centred(episodes, row) for row in range(9)])
    naive = _whitened(naive) if whiten else naive
    ours = advantages.reinforce_plus_plus_baseline(episodes, normalize_advantages=whiten).advantage_NT
    np.testing.assert_allclose(ours, _spread(episodes, naive), atol=1e-12)


@pytest.mark.parametrize("whiten", [True, False])
def test_gae_sums_discounted_surprises(episodes: Episodes, whiten: bool) -> None:
    naive, returns = [], []
    for row in range(9):
        rewards = _rewards(episodes, row)
        values = [float(episodes.value_NT[row, t]) for t in _chosen(episodes, row)] + [0.0]
        surprises = [reward + GAMMA * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
        naive.append(
            [sum((GAMMA * LAMBDA) ** k * it for k, it in enumerate(surprises[t:])) for t in range(len(rewards))]
        )
        returns.append([advantage + value for advantage, value in zip(naive[-1], values[:-1], strict=True)])
    naive = _whitened(naive) if whiten else naive
    ours = advantages.gae(episodes, gamma=GAMMA, gae_lambda=LAMBDA, normalize_advantages=whiten)
    np.testing.assert_allclose(ours.advantage_NT, _spread(episodes, naive), atol=1e-12)
    np.testing.assert_allclose(ours.return_NT, _spread(episodes, returns), atol=1e-12)


# Where verl divides by a count of tokens, it adds 1e-8 to it.
VERL_ERROR = 1e-9


def test_values_of_verl(shared: Path) -> None:
    verl = np.load(shared / "fixtures" / "rl" / "verl_reference.npz")
    mask_NT = verl["mask"] > 0
    episodes = Episodes(verl["score"], mask_NT, group_N=verl["group"], group_size=4, value_NT=verl["values"])
    ours = {
        f"advantage_{name}": getattr(advantages, name)(episodes).advantage_NT
        for name in ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    }
    gae = advantages.gae(episodes, gamma=0.98, gae_lambda=0.95)
    ours["advantage_gae_gamma0.98_lambda0.95_whitened"], ours["returns_gae_gamma0.98_lambda0.95"] = gae
    for name, ours_NT in ours.items():
        np.testing.assert_allclose(ours_NT, verl[name] * mask_NT, rtol=0, atol=VERL_ERROR, err_msg=name)


# Equal but for rounding: 0.1 + 0.2 is not 0.3, and float32 sums differ in the seventh digit.
@pytest.mark.parametrize("equal", [[0.1 + 0.2, 0.3, 0.3], [1.0, 1.0 + 1e-7, 1.0 - 1e-7], [0.0, 0.0, 0.0], [-3.0] * 3])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_equal_scores_have_no_advantage_at_all(name: str, equal: list[float]) -> None:
    scores, groups = np.array([0.0, *equal, 1.0, 1.0]), np.array([5, 3, 3, 3, 5, 5])
    episodes = Episodes(scores, np.ones((6, 2), bool), group_N=groups, group_size=3)
    advantage_NT = getattr(advantages, name)(episodes).advantage_NT
    assert (advantage_NT[1:4] == 0).all()
    assert (advantage_NT[[0, 4, 5]] != 0).all()
    np.testing.assert_array_equal(zero_variance_groups(scores, groups), [3])


def test_a_little_variance_is_variance() -> None:
    assert zero_variance_groups([0.999, 1.0, 0.0, 1e-9], [0, 0, 1, 1]).size == 0


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"]
)
def test_neither_padding_nor_poison_nor_order_matters(episodes: Episodes, name: str) -> None:
    estimate = getattr(advantages, name)
    ours = estimate(episodes).advantage_NT
    assert np.isfinite(ours).all() and (ours[~episodes.mask_NT] == 0).all()

    def wider(x: np.ndarray, fill: float) -> np.ndarray:
        return np.pad(x, ((0, 0), (2, 3)), constant_values=fill)

    order = np.random.default_rng(1).permutation(9)
    moved = Episodes(
        episodes.score_N[order],
        wider(episodes.mask_NT, False)[order],
        wider(episodes.token_reward_NT, np.nan)[order],
        episodes.group_N[order],
        3,
        wider(episodes.value_NT, np.inf)[order],
    )
    np.testing.assert_allclose(estimate(moved).advantage_NT, wider(ours, 0)[order], atol=1e-12)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_advantages_of_a_group_sum_to_zero(episodes: Episodes, name: str) -> None:
    advantage_N = getattr(advantages, name)(episodes).advantage_NT[:, 0]
    for group in (2, 7, 40):
        assert abs(advantage_N[episodes.group_N == group].sum()) < 1e-12


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("seed", range(5))
def test_what_all_scores_share_does_not_matter(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    score_N, mask_NT = rng.normal(size=12), rng.random((12, 4)) < 0.7
    groups = {"group_N": rng.permutation(np.repeat([3, 1, 2], 4)), "group_size": 4}

    def advantage_NT(score_N: np.ndarray) -> np.ndarray:
        return getattr(advantages, name)(Episodes(score_N, mask_NT, **groups)).advantage_NT

    np.testing.assert_allclose(advantage_NT(score_N + 10), advantage_NT(score_N), atol=1e-12)
    scale = 10 if name in ("dr_grpo", "rloo") else 1
    np.testing.assert_allclose(advantage_NT(score_N * 10), advantage_NT(score_N) * scale, atol=1e-5)


def test_gae_that_looks_to_the_end_compares_returns_with_values(episodes: Episodes) -> None:
    to_go_NT = advantages.reinforce_plus_plus(episodes, gamma=GAMMA, normalize_advantages=False).advantage_NT
    ours = advantages.gae(episodes, gamma=GAMMA, gae_lambda=1.0, normalize_advantages=False)
    np.testing.assert_allclose(ours.advantage_NT, to_go_NT - episodes.value_NT, atol=1e-12)
    np.testing.assert_allclose(ours.return_NT, to_go_NT, atol=1e-12)


def test_the_end_of_a_response_has_its_score() -> None:
    episodes = Episodes(np.array([1.0, 2.0]), np.array([[1, 1, 0], [0, 0, 0]], bool))
    np.testing.assert_array_equal(episodes.reward_NT, [[0, 1, 0], [0, 0, 0]])


def test_a_response_without_tokens_counts_in_its_group() -> None:
    mask_NT = np.array([[1, 1], [0, 0]], bool)
    episodes = Episodes(np.array([1.0, 0.0]), mask_NT, group_N=np.array([0, 0]), group_size=2)
    np.testing.assert_allclose(advantages.dr_grpo(episodes).advantage_NT, [[0.5, 0.5], [0, 0]])


def test_groups_are_whole() -> None:
    np.testing.assert_array_equal(members_of_groups([9, 4, 9, 4], 2), [[1, 3], [0, 2]])
    with pytest.raises(ValueError, match="group 4 has 1 responses and not 2; sample whole groups"):
        members_of_groups([9, 4, 9], 2)
    mask_NT = np.ones((2, 1), bool)
    with pytest.raises(ValueError, match="a group of 1 has nobody to compare with"):
        advantages.grpo(Episodes(np.zeros(2), mask_NT, group_N=np.arange(2), group_size=1))
    with pytest.raises(ValueError, match="give group_N and group_size"):
        advantages.rloo(Episodes(np.zeros(2), mask_NT))
    with pytest.raises(ValueError, match="give value_NT"):
        advantages.gae(Episodes(np.zeros(2), mask_NT))


def test_what_is_not_finite_is_refused() -> None:
    mask_NT = np.array([[1, 1], [1, 0]], bool)
    with pytest.raises(ValueError, match="the score of response 1 is not finite"):
        Episodes(np.array([0.0, np.nan]), mask_NT)
    with pytest.raises(ValueError, match="value_NT of response 0 is not finite at token 1"):
        Episodes(np.zeros(2), mask_NT, value_NT=np.array([[0, np.inf], [0, np.nan]]))

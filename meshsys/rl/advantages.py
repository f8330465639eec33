"""How much better each token was than expected, from the scores of sampled responses; on the host, in float64.

Shapes: N responses of the whole batch, T tokens of a response, padded; G groups, M members of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Advantages",
    "Episodes",
    "dr_grpo",
    "gae",
    "grpo",
    "members_of_groups",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "zero_variance_groups",
]

Floats = NDArray[np.float64]

# Scores closer than this, relative to the largest, are one score: sums of float32 rewards differ by as much.
_SAME = 1e-6
_EPSILON_STD = 1e-6
_EPSILON_VARIANCE = 1e-8


@dataclass(frozen=True)
class Episodes:
    """Responses and what they earned. What arrays hold at tokens outside the mask does not matter; it may be NaN.

    Attributes:
        score_N: the reward of each response as a whole.
        mask_NT: the tokens that the policy chose, its end of sequence too; neither padding nor a tool's words.
        token_reward_NT: rewards of single tokens, such as a penalty for leaving the reference; None for none.
        group_N: int, the group of each response: responses to one prompt share an id. None without groups.
        group_size: members of every group.
        value_NT: what a value model expected before each token; None without one.
    """

    score_N: Floats
    mask_NT: NDArray[np.bool_]
    token_reward_NT: Floats | None = None
    group_N: NDArray[np.integer] | None = None
    group_size: int | None = None
    value_NT: Floats | None = None

    def __post_init__(self) -> None:
        score_N = np.asarray(self.score_N, np.float64)
        mask_NT = np.asarray(self.mask_NT, bool)
        if score_N.shape != mask_NT.shape[:1] or mask_NT.ndim != 2:
            raise ValueError(f"score_N is {score_N.shape} and mask_NT {mask_NT.shape}; they must be [N] and [N, T]")
        if not np.isfinite(score_N).all():
            raise ValueError(f"the score of response {np.argmin(np.isfinite(score_N))} is not finite")
        object.__setattr__(self, "score_N", score_N)
        object.__setattr__(self, "mask_NT", mask_NT)
        for name in ("token_reward_NT", "value_NT"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, _at_tokens(name, np.asarray(given, np.float64), mask_NT))

    @property
    def outcome_N(self) -> Floats:
        """All that each response earned."""
        return self.score_N if self.token_reward_NT is None else self.score_N + self.token_reward_NT.sum(1)

    @property
    def reward_NT(self) -> Floats:
        """What each token earned: the score comes with the last."""
        reward_NT = np.zeros(self.mask_NT.shape) if self.token_reward_NT is None else self.token_reward_NT.copy()
        rows_N = np.flatnonzero(self.mask_NT.any(1))
        last_N = self.mask_NT.shape[1] - 1 - np.argmax(self.mask_NT[rows_N, ::-1], axis=1)
        reward_NT[rows_N, last_N] += self.score_N[rows_N]
        return reward_NT

    @property
    def members_GM(self) -> NDArray[np.intp]:
        """The responses of each group."""
        if self.group_N is None or self.group_size is None:
            raise ValueError("this advantage compares the responses of a group; give group_N and group_size")
        if np.shape(self.group_N) != self.score_N.shape:
            raise ValueError(
                f"group_N is {np.shape(self.group_N)} and score_N {self.score_N.shape}; they must be equal"
            )
        if self.group_size < 2:
            raise ValueError(f"a group of {self.group_size} has nobody to compare with; sample 2 or more to a prompt")
        return members_of_groups(self.group_N, self.group_size)


class Advantages(NamedTuple):
    """Of each token, 0 outside the mask; `return_NT` is what a value model should have expected, None without one."""

    advantage_NT: Floats
    return_NT: Floats | None = None


def members_of_groups(group_N: ArrayLike, size: int) -> NDArray[np.intp]:
    """The places [G, M] of each group's members in the batch, groups by ascending id and members in their order.

    Raises:
        ValueError: a group that does not have `size` members.
    """
    ids_N = np.asarray(group_N)
    ids_G, count_G = np.unique(ids_N, return_counts=True)
    if (count_G != size).any():
        odd = np.argmax(count_G != size)
        raise ValueError(f"group {ids_G[odd]} has {count_G[odd]} responses and not {size}; sample whole groups")
    return np.argsort(ids_N, kind="stable").reshape(-1, size)


def zero_variance_groups(score_N: ArrayLike, group_N: ArrayLike) -> NDArray[np.integer]:
    """The ids of the groups, ascending, whose scores are equal: nothing can be learned from them.

    Equal means closer than the noise of float32 sums, as in `grpo`, which gives exactly these groups no advantage.
    """
    scores_N, ids_N = np.asarray(score_N, np.float64), np.asarray(group_N)
    ids_G = np.unique(ids_N)
    return ids_G[[bool(_are_equal(scores_N[ids_N == group])) for group in ids_G]]


def grpo(episodes: Episodes, *, normalize_advantages: bool = True) -> Advantages:
    """Score less the group's mean, divided by its sample standard deviation (Shao et al. 2024, section 4.1.2).

    Without `normalize_advantages` it is not divided. A group of equal scores gets exactly 0.
    """
    members_GM = episodes.members_GM
    outcome_GM = episodes.outcome_N[members_GM]
    centred_GM = _centred(outcome_GM)
    if normalize_advantages:
        centred_GM = centred_GM / (outcome_GM.std(1, ddof=1, keepdims=True) + _EPSILON_STD)
    return Advantages(_to_tokens(centred_GM, members_GM, episodes.mask_NT))


def dr_grpo(episodes: Episodes) -> Advantages:
    """Score less the group's mean (Liu et al. 2025): dividing would favour prompts that are too easy or too hard."""
    return grpo(episodes, normalize_advantages=False)


def rloo(episodes: Episodes) -> Advantages:
    """Score less the mean of the group's other responses (Kool et al. 2019; Ahmadian et al. 2024)."""
    members_GM = episodes.members_GM
    size = members_GM.shape[1]
    # r - (sum - r) / (M - 1) = (r - mean) * M / (M - 1), which is exactly 0 where all are equal.
    return Advantages(
        _to_tokens(_centred(episodes.outcome_N[members_GM]) * size / (size - 1), members_GM, episodes.mask_NT)
    )


def reinforce_plus_plus(episodes: Episodes, *, gamma: float = 1.0, normalize_advantages: bool = True) -> Advantages:
    """What each token and those after it earned, whitened over all tokens of the batch (Hu 2025).

    Args:
        gamma: how much a token's reward is worth one chosen token earlier.
    """
    mask_NT, reward_NT = episodes.mask_NT, episodes.reward_NT
    after_N = np.zeros(len(mask_NT))
    return_NT = np.zeros(mask_NT.shape)
    for t in reversed(range(mask_NT.shape[1])):
        after_N = np.where(mask_NT[:, t], reward_NT[:, t] + gamma * after_N, after_N)
        return_NT[:, t] = np.where(mask_NT[:, t], after_N, 0)
    return Advantages(_whitened(return_NT, mask_NT) if normalize_advantages else return_NT)


def reinforce_plus_plus_baseline(episodes: Episodes, *, normalize_advantages: bool = True) -> Advantages:
    """Score less the group's mean, whitened over all tokens of the batch and not by group (Hu 2025).

    Whitening moves all tokens by one constant, those of groups of equal scores too.
    """
    advantage_NT = dr_grpo(episodes).advantage_NT
    return Advantages(_whitened(advantage_NT, episodes.mask_NT) if normalize_advantages else advantage_NT)


def gae(
    episodes: Episodes, *, gamma: float = 1.0, gae_lambda: float = 0.95, normalize_advantages: bool = True
) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2016), whitened over all tokens of the batch.

    A response ends with its last token, also where its length was cut: nothing is expected after it. Tokens that the
    policy did not choose are no steps: the token before them is followed by the one after them.

    Returns:
        Advantages, and returns, which are made of the advantages before whitening.
    """
    if episodes.value_NT is None:
        raise ValueError("gae compares with what a value model expected; give value_NT")
    mask_NT, reward_NT, value_NT = episodes.mask_NT, episodes.reward_NT, episodes.value_NT
    advantage_N, next_value_N = np.zeros(len(mask_NT)), np.zeros(len(mask_NT))
    advantage_NT = np.zeros(mask_NT.shape)
    for t in reversed(range(mask_NT.shape[1])):
        surprise_N = reward_NT[:, t] + gamma * next_value_N - value_NT[:, t]
        advantage_N = np.where(mask_NT[:, t], surprise_N + gamma * gae_lambda * advantage_N, advantage_N)
        next_value_N = np.where(mask_NT[:, t], value_NT[:, t], next_value_N)
        advantage_NT[:, t] = np.where(mask_NT[:, t], advantage_N, 0)
    return_NT = advantage_NT + value_NT
    return Advantages(_whitened(advantage_NT, mask_NT) if normalize_advantages else advantage_NT, return_NT)


def _at_tokens(name: str, x_NT: Floats, mask_NT: NDArray[np.bool_]) -> Floats:
    if x_NT.shape != mask_NT.shape:
        raise ValueError(f"{name} is {x_NT.shape} and mask_NT {mask_NT.shape}; they must be equal")
    x_NT = np.where(mask_NT, x_NT, 0)
    if not np.isfinite(x_NT).all():
        row, token = np.argwhere(~np.isfinite(x_NT))[0]
        raise ValueError(f"{name} of response {row} is not finite at token {token}")
    return x_NT


def _are_equal(x: Floats) -> NDArray[np.bool_]:
    """Over the last dimension, which stays."""
    largest = np.abs(x).max(-1, keepdims=True)
    return np.ptp(x, axis=-1, keepdims=True) <= _SAME * largest


def _centred(x_GM: Floats) -> Floats:
    return np.where(_are_equal(x_GM), 0, x_GM - x_GM.mean(1, keepdims=True))


def _to_tokens(x_GM: Floats, members_GM: NDArray[np.intp], mask_NT: NDArray[np.bool_]) -> Floats:
    x_N = np.empty(len(mask_NT))
    x_N[members_GM] = x_GM
    return np.where(mask_NT, x_N[:, None], 0)


def _whitened(x_NT: Floats, mask_NT: NDArray[np.bool_]) -> Floats:
    """Mean 0 and sample variance 1 over the tokens in the mask; tokens that are all equal become 0."""
    x = x_NT[mask_NT]
    white_NT = np.zeros(x_NT.shape)
    if x.size > 1 and not _are_equal(x):
        white_NT[mask_NT] = (x - x.mean()) / np.sqrt(x.var(ddof=1) + _EPSILON_VARIANCE)
    return white_NT

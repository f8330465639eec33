"""The algorithms by name: each an advantage, an aggregation and an objective, with its paper's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from meshsys.rl import advantages
from meshsys.rl.advantages import Advantages
from meshsys.rl.kl import KlPenalty
from meshsys.rl.objectives import Cispo, Gspo, Objective, PpoClip, Reinforce

__all__ = ["ADVANTAGES", "ALGORITHMS", "OBJECTIVES", "AdvantageKind", "Algorithm", "ObjectiveKind"]


@dataclass(frozen=True)
class AdvantageKind:
    """A way to compute advantages.

    Attributes:
        estimate: `estimate(episodes)`, with what `options` names as further arguments by name.
        options: what there is a choice of.
        grouped: whether it compares the responses to one prompt.
        whole: whether it compares all responses of a step, so that none has an advantage before all have scores.
        valued: whether it needs a value model.
    """

    estimate: Callable[..., Advantages]
    options: tuple[str, ...] = ()
    grouped: bool = False
    whole: bool = False
    valued: bool = False


@dataclass(frozen=True)
class ObjectiveKind:
    """A way to compute the loss of a token.

    Attributes:
        make: the objective, of what `defaults` names, by name.
        defaults: what there is a choice of, and what is taken without one.
        of_sequences: whether it looks at sequences, and takes `max_sequences` and `axis` too.
        on_policy: whether it takes the tokens for the policy's own, and so is right for one update with them.
    """

    make: Callable[..., Objective]
    defaults: Mapping[str, float | None] = field(default_factory=dict)
    of_sequences: bool = False
    on_policy: bool = False


ADVANTAGES = {
    "grpo": AdvantageKind(advantages.grpo, ("normalize_advantages",), grouped=True),
    "dr_grpo": AdvantageKind(advantages.dr_grpo, grouped=True),
    "rloo": AdvantageKind(advantages.rloo, grouped=True),
    "reinforce_plus_plus": AdvantageKind(advantages.reinforce_plus_plus, ("gamma", "normalize_advantages"), whole=True),
    "reinforce_plus_plus_baseline": AdvantageKind(
        advantages.reinforce_plus_plus_baseline, ("normalize_advantages",), grouped=True, whole=True
    ),
    "gae": AdvantageKind(advantages.gae, ("gamma", "gae_lambda", "normalize_advantages"), whole=True, valued=True),
}

OBJECTIVES = {
    "ppo_clip": ObjectiveKind(PpoClip, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}),
    "gspo": ObjectiveKind(Gspo, {"clip_low": 3e-4, "clip_high": 4e-4}, of_sequences=True),
    "cispo": ObjectiveKind(Cispo, {"clip_low": 1.0, "clip_high": 4.0}),
    "reinforce": ObjectiveKind(Reinforce, on_policy=True),
}


@dataclass(frozen=True)
class Algorithm:
    """What is known of an algorithm before its options are.

    Attributes:
        name: what the user writes.
        summary: one line.
        source: the paper.
        advantage: a name of `ADVANTAGES`.
        objective: a name of `OBJECTIVES`.
        aggregation: a name of `meshsys.rl.aggregation.AGGREGATIONS`.
        clip_high: in place of the objective's default.
        kl: the penalty if the user names none; None for none.
        dynamic_sampling: whether prompts whose responses all score the same are replaced.
        overlong_share: of the longest response, over which the punishment of length grows; 0 for no punishment.
    """

    name: str
    summary: str
    source: str
    advantage: str
    objective: str = "ppo_clip"
    aggregation: str = "token_mean"
    clip_high: float | None = None
    kl: KlPenalty | None = None
    dynamic_sampling: bool = False
    overlong_share: float = 0.0


_LISTED = (
    Algorithm(
        "grpo",
        "scores normalised by their group",
        "Shao et al. 2024, arXiv:2402.03300",
        advantage="grpo",
        aggregation="sequence_mean_token_mean",
        kl=KlPenalty(0.04, "k3", "loss"),
    ),
    Algorithm(
        "dr_grpo",
        "GRPO without its biases to length and difficulty",
        "Liu et al. 2025, arXiv:2503.20783",
        advantage="dr_grpo",
        aggregation="sequence_mean_token_sum_norm",
    ),
    Algorithm(
        "dapo",
        "GRPO over tokens, clipped higher, on prompts that teach something",
        "Yu et al. 2025, arXiv:2503.14476",
        advantage="grpo",
        clip_high=0.28,
        dynamic_sampling=True,
        overlong_share=0.2,
    ),
    Algorithm(
        "gspo",
        "GRPO with one ratio for a whole response",
        "Zheng et al. 2025, arXiv:2507.18071",
        advantage="grpo",
        objective="gspo",
        aggregation="sequence_mean_token_mean",
    ),
    Algorithm(
        "cispo",
        "GRPO that clips weights and no gradients",
        "MiniMax 2025, arXiv:2506.13585; bound of Khatri et al. 2025, arXiv:2510.13786",
        advantage="grpo",
        objective="cispo",
    ),
    Algorithm(
        "rloo",
        "REINFORCE, compared with the other responses of the group",
        "Ahmadian et al. 2024, arXiv:2402.14740",
        advantage="rloo",
        objective="reinforce",
        aggregation="sequence_mean_token_sum",
        kl=KlPenalty(0.03, "k1", "reward"),
    ),
    Algorithm(
        "reinforce_plus_plus",
        "rewards to go, whitened over the batch: PPO without a value model, GRPO without groups",
        "Hu 2025, arXiv:2501.03262",
        advantage="reinforce_plus_plus",
        kl=KlPenalty(0.01, "k1", "reward"),
    ),
    Algorithm(
        "reinforce_plus_plus_baseline",
        "scores less their group's mean, whitened over the batch",
        "Hu 2025, arXiv:2501.03262",
        advantage="reinforce_plus_plus_baseline",
        kl=KlPenalty(0.001, "k2", "loss"),
    ),
    Algorithm(
        "ppo",
        "a value model says what to expect of each token",
        "Schulman et al. 2017, arXiv:1707.06347; settings of Ouyang et al. 2022, arXiv:2203.02155",
        advantage="gae",
        kl=KlPenalty(0.02, "k1", "reward"),
    ),
)

ALGORITHMS = {algorithm.name: algorithm for algorithm in _LISTED}

"""What options come to, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import Field

from meshsys.config_file import Section, load
from meshsys.errors import ConfigError
from meshsys.rl import advantages
from meshsys.rl.advantages import Episodes
from meshsys.rl.algorithm_config import AlgorithmConfig, Recipe
from meshsys.rl.algorithms import ADVANTAGES, ALGORITHMS, OBJECTIVES
from meshsys.rl.importance import Importance
from meshsys.rl.kl import KlPenalty
from meshsys.rl.objectives import Cispo, Gspo, PpoClip, Reinforce
from meshsys.rl.values import ValueLoss


class Rl(Section):
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)


class Root(Section):
    """Where a run's configuration has the section."""

    rl: Rl = Field(default_factory=Rl)


def _load(tmp_path: Path, *overrides: str) -> AlgorithmConfig:
    path = tmp_path / "run.yaml"
    path.write_text("rl: {}\n", encoding="utf-8")
    options = [f"rl.algorithm.{override}" for override in overrides]
    return load(Root, path, options, example="rl.algorithm.name=grpo").rl.algorithm


def _recipe(**options: Any) -> Recipe:
    return AlgorithmConfig.model_validate(options).recipe(100)


# Objective, aggregation and penalty of each paper, or of its settings in common use (docs/rl_algorithms.md).
PAPERS = {
    "grpo": (PpoClip(0.2, 0.2), "sequence_mean_token_mean", KlPenalty(0.04, "k3", "loss")),
    "dr_grpo": (PpoClip(0.2, 0.2), "sequence_mean_token_sum_norm", None),
    "dapo": (PpoClip(0.2, 0.28), "token_mean", None),
    "gspo": (Gspo(3e-4, 4e-4), "sequence_mean_token_mean", None),
    "cispo": (Cispo(1.0, 4.0), "token_mean", None),
    "rloo": (Reinforce(), "sequence_mean_token_sum", KlPenalty(0.03, "k1", "reward")),
    "reinforce_plus_plus": (PpoClip(0.2, 0.2), "token_mean", KlPenalty(0.01, "k1", "reward")),
    "reinforce_plus_plus_baseline": (PpoClip(0.2, 0.2), "token_mean", KlPenalty(0.001, "k2", "loss")),
    "ppo": (PpoClip(0.2, 0.2), "token_mean", KlPenalty(0.02, "k1", "reward")),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_as_its_paper(name: str) -> None:
    recipe = _recipe(name=name)
    assert (recipe.policy_loss.objective, recipe.aggregation, recipe.kl) == PAPERS[name]
    assert recipe.policy_loss.kl == (recipe.kl if recipe.kl and recipe.kl.place == "loss" else None)
    assert recipe.importance == Importance()
    assert recipe.dynamic_sampling == (name == "dapo") and recipe.overlong_buffer == (20 if name == "dapo" else 0)
    assert recipe.grouped == (name not in ("ppo", "reinforce_plus_plus"))
    assert recipe.on_policy == (name == "rloo")
    assert recipe.value_loss == (ValueLoss(0.1, 0.2) if name == "ppo" else None)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_advantage_can_be_taken(name: str) -> None:
    mask_NT = np.ones((4, 2), bool)
    episodes = Episodes(np.arange(4.0), mask_NT, None, np.array([0, 1, 0, 1]), 2, np.zeros((4, 2)))
    recipe = _recipe(name=name)
    function = getattr(advantages, ALGORITHMS[name].advantage)
    np.testing.assert_array_equal(recipe.advantage(episodes).advantage_NT, function(episodes).advantage_NT)
    assert (recipe.advantage(episodes).return_NT is None) == (recipe.value_loss is None)


def test_the_registry_holds_together() -> None:
    assert {algorithm.advantage for algorithm in ALGORITHMS.values()} == set(ADVANTAGES)
    assert {algorithm.objective for algorithm in ALGORITHMS.values()} == set(OBJECTIVES)


def test_options_reach_what_uses_them() -> None:
    recipe = _recipe(name="ppo", gamma=0.9, gae_lambda=0.8, normalize_advantages=False, value_clip=0.5, clip_low=0.1)
    mask_NT, scores_N, value_NT = np.ones((1, 3), bool), np.ones(1), np.array([[0.1, 0.2, 0.3]])
    episodes = Episodes(scores_N, mask_NT, value_NT=value_NT)
    wanted = advantages.gae(episodes, gamma=0.9, gae_lambda=0.8, normalize_advantages=False)
    np.testing.assert_array_equal(recipe.advantage(episodes).advantage_NT, wanted.advantage_NT)
    assert recipe.value_loss == ValueLoss(0.1, 0.5) and recipe.policy_loss.objective == PpoClip(0.1, 0.2)
    assert _recipe(clip_high=0.3, dual_clip=3.0).policy_loss.objective == PpoClip(0.2, 0.3, 3.0)
    assert _recipe(entropy_coefficient=0.01).policy_loss.entropy_coefficient == 0.01
    importance = {"mode": "mask", "level": "sequence", "cap": 1.1, "floor": 0.9}
    assert _recipe(importance=importance).importance == Importance("mask", "sequence", 1.1, 0.9)
    gspo = AlgorithmConfig(name="gspo").recipe(10, max_sequences=4, sequence_axis="context").policy_loss.objective
    assert gspo == Gspo(3e-4, 4e-4, 4, "context")


def test_an_objective_comes_with_bounds_of_its_scale() -> None:
    assert _recipe(name="grpo", objective="gspo").policy_loss.objective == Gspo(3e-4, 4e-4)
    assert _recipe(name="gspo", objective="ppo_clip").policy_loss.objective == PpoClip(0.2, 0.2)
    assert _recipe(name="dapo", objective="ppo_clip").policy_loss.objective == PpoClip(0.2, 0.28)


@pytest.mark.parametrize(
    ("name", "options", "penalty"),
    [
        ("dapo", {"coefficient": 0.1}, KlPenalty(0.1, "k2", "loss")),
        ("dapo", {"coefficient": 0.1, "place": "reward"}, KlPenalty(0.1, "k1", "reward")),
        ("dapo", {"coefficient": 0.1, "estimator": "k1"}, KlPenalty(0.1, "k1", "reward")),
        ("grpo", {"coefficient": 0.0}, None),
        ("grpo", {"estimator": "k2"}, KlPenalty(0.04, "k2", "loss")),
        ("grpo", {"place": "reward"}, KlPenalty(0.04, "k1", "reward")),
        ("grpo", {"place": "loss"}, KlPenalty(0.04, "k3", "loss")),
        ("ppo", {"place": "loss"}, KlPenalty(0.02, "k2", "loss")),
    ],
)
def test_a_penalty_goes_where_it_penalises(name: str, options: dict[str, Any], penalty: KlPenalty | None) -> None:
    assert _recipe(name=name, kl=options).kl == penalty


REFUSALS = {
    ("name=drgrpo",): "rl.algorithm.name=drgrpo is not a known algorithm; did you mean dr_grpo?",
    ("name=reinforce++",): "did you mean reinforce_plus_plus?",
    (
        "aggregation=token-mean",
    ): "rl.algorithm.aggregation=token-mean is not a known aggregation; did you mean token_mean?",
    ("objective=ppo_clp",): "did you mean ppo_clip?",
    ("gae_lambda=0.9",): "rl.algorithm.gae_lambda=0.9 is not used by rl.algorithm.name=grpo; leave it out, or set "
    "rl.algorithm.name (ppo)",
    ("gamma=0.9",): "set rl.algorithm.name (reinforce_plus_plus, ppo)",
    (
        "name=rloo",
        "clip_low=0.1",
    ): "rl.algorithm.clip_low=0.1 is not used by rl.algorithm.objective=reinforce; leave it out, "
    "or set rl.algorithm.objective (ppo_clip, gspo, cispo)",
    ("name=gspo", "dual_clip=3.0"): "rl.algorithm.dual_clip=3.0 is not used by rl.algorithm.objective=gspo",
    ("name=dr_grpo", "normalize_advantages=true"): "rl.algorithm.normalize_advantages=true is not used by",
    ("name=ppo", "dynamic_sampling=true"): "rl.algorithm.dynamic_sampling=true is not used by rl.algorithm.name=ppo",
    ("value_clip=0.1",): "rl.algorithm.value_clip=0.1 is not used by rl.algorithm.name=grpo",
    (
        "kl.estimator=k1",
        "kl.place=loss",
    ): "rl.algorithm.kl.estimator=k1 with rl.algorithm.kl.place=loss penalises nothing: the "
    "expected gradient of k1 is 0; use rl.algorithm.kl.estimator=k2, or rl.algorithm.kl.place=reward",
    (
        "kl.estimator=k3",
        "kl.place=reward",
    ): "rl.algorithm.kl.estimator=k3 with rl.algorithm.kl.place=reward hardly penalises",
    (
        "name=ppo",
        "kl.estimator=k2",
        "kl.place=reward",
    ): "use rl.algorithm.kl.estimator=k1, or rl.algorithm.kl.place=loss",
    (
        "name=dapo",
        "kl.estimator=k3",
    ): "rl.algorithm.kl.estimator=k3 does nothing, as rl.algorithm.kl.coefficient is 0; set "
    "that above 0, as in 0.01, or leave estimator out",
    (
        "importance.floor=0.1",
    ): "rl.algorithm.importance.floor=0.1 is not used by rl.algorithm.importance.mode=truncate; leave "
    "it out, or set mode to mask",
    ("importance.mode=none", "importance.cap=2.0"): "rl.algorithm.importance.cap=2.0 is not used by",
    ("importance.mode=mask", "importance.floor=3.0"): "rl.algorithm.importance.floor=3 leaves no weight below "
    "rl.algorithm.importance.cap=2; lower the floor, or raise the cap",
    ("clip_low=1.5",): "rl.algorithm.clip_low=1.5 must be at most 1; lower it",
    ("epsilon=0.2",): "rl.algorithm.epsilon=0.2 is not an option; rl.algorithm has name, objective",
}


@pytest.mark.parametrize("overrides", REFUSALS, ids=" ".join)
def test_what_is_not_used_or_does_nothing_is_refused(overrides: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        _load(tmp_path, *overrides)
    assert REFUSALS[overrides] in str(refusal.value)


def test_a_buffer_leaves_room_for_a_response() -> None:
    with pytest.raises(
        ConfigError, match="rl.algorithm.overlong_buffer=100 punishes every response of up to 100 tokens"
    ):
        _recipe(overlong_buffer=100)
    assert _recipe(overlong_buffer=99).overlong_buffer == 99
    assert _recipe(name="dapo", overlong_buffer=0).overlong_buffer == 0

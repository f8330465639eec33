"""Rewards by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from meshsys.rl.extract import extractor
from meshsys.rl.imported import import_function
from meshsys.rl.prompt import Prompt
from meshsys.rl.rewards.config import EXTRACTING, RewardConfig
from meshsys.rl.rewards.packages import math_verify, reasoning_gym
from meshsys.rl.rewards.text import exact_match, gsm8k, length, matches

__all__ = ["Reward", "make_rewards"]

Reward = Callable[[Prompt, str], Any]
"""Called with a prompt and a response; gives a finite number."""


def make_rewards(configs: Sequence[RewardConfig], scorers: Collection[str], option: str) -> list[Reward]:
    """The functions of rewards, imports done.

    Args:
        scorers: of the tasks, see `Prompt.scorer`.
        option: where the rewards stand in the configuration, for messages.

    Raises:
        ConfigError: one that cannot be imported.
    """
    return [_make(config, scorers, f"{option}.{number}.kind={config.kind}") for number, config in enumerate(configs)]


def _make(config: RewardConfig, scorers: Collection[str], said: str) -> Reward:
    extract = extractor(config.extract)
    match config.kind:
        case "task":
            return _of_the_tasks(config, scorers, said)
        case "exact_match":
            return exact_match(extract)
        case "gsm8k":
            return gsm8k(extract)
        case "math_verify":
            return math_verify(extract, said)
        case "reasoning_gym":
            return reasoning_gym(extract, said)
        case "rack":
            from meshsys.rl.environments.rack import plan_reward

            return lambda prompt, response: plan_reward(prompt, extract(response) or "")
        case "format":
            assert config.pattern is not None
            return matches(config.pattern)
        case "length":
            assert config.max_length is not None
            return length(config.free_length, config.max_length)
        case python:
            return import_function(python.removeprefix("python:"), said, config.options)


def _of_the_tasks(config: RewardConfig, scorers: Collection[str], said: str) -> Reward:
    """Asks the scorer that each prompt names; a game has its environment's reward."""
    by_scorer = {scorer: _make(_as_a(scorer, config), (), said) for scorer in sorted(scorers)}

    def reward(prompt: Prompt, response: str) -> Any:
        if prompt.earned is not None:
            return prompt.earned
        scorer = prompt.scorer
        if scorer not in by_scorer:
            by_scorer[scorer] = _make(_as_a(scorer, config), (), said)
        return by_scorer[scorer](prompt, response)

    return reward


def _as_a(kind: str, config: RewardConfig) -> RewardConfig:
    return RewardConfig(kind=kind, extract=config.extract if kind in EXTRACTING else None)

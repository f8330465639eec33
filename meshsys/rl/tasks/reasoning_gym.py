"""Tasks of the package reasoning-gym: puzzles and exercises made from seeds."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from meshsys.errors import ConfigError
from meshsys.rl.imported import missing_extra
from meshsys.rl.prompt import Prompt
from meshsys.rl.tasks.base import Form, hashed
from meshsys.rl.tasks.config import TaskConfig

__all__ = ["open_reasoning_gym"]

_CHUNK = 512  # items of a data set: few enough for those that make all of them when they begin

# What these ask depends on the order of Python's sets, which differs between two processes.
_UNORDERED = frozenset({"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"})


class _Gym:
    """One task. Its prompts are those of data sets of `_CHUNK` items, whose seeds have nothing in common: the package
    makes item i of seed s with the randomness of s + i, so that the prompts of two neighbouring seeds were the same."""

    scorer = "reasoning_gym"

    def __init__(self, name: str, size: int | None, make: Callable[[int], Any], form: Form, seed: int) -> None:
        """`make`: gives the data set of a seed."""
        self.name, self.size, self._form = name, size, form
        self._chunk = lru_cache(maxsize=2)(lambda chunk: make(hashed(seed, chunk)))

    def __getitem__(self, number: int) -> Prompt:
        entry = self._chunk(number // _CHUNK)[number % _CHUNK]
        text, messages = self._form(entry["question"])
        return Prompt(f"{self.name}/{number}", text, messages, entry["answer"], entry, self.name, self.scorer)


def open_reasoning_gym(config: TaskConfig, name: str, chat: bool, option: str, seed: int) -> _Gym:
    """The task `reasoning_gym:NAME`.

    Raises:
        ConfigError: the package is not there; no task of that name; options that it does not take.
    """
    said = f"{option}.source={config.source}"
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise missing_extra(said, "reasoning-gym") from None
    wanted = config.what
    if wanted not in DATASETS or wanted == "composite":
        near = difflib.get_close_matches(wanted, DATASETS, 1)
        hint = f"did you mean {near[0]}?" if near else "its gallery lists them"
        raise ConfigError(f"{said} is no task of reasoning-gym; {hint}")
    if wanted in _UNORDERED and not _sets_are_ordered():
        raise ConfigError(f"{said} asks other questions in every process; start with PYTHONHASHSEED=0, or leave it out")
    for own in ("seed", "size"):
        if own in config.options:
            raise ConfigError(f"{option}.options.{own} is the task's; write it as {option}.{own}")

    def make(seed: int) -> Any:
        return reasoning_gym.create_dataset(wanted, seed=seed, size=_CHUNK, **config.options)

    task = _Gym(name, config.size, make, Form(config, chat), seed)
    try:
        task[0]
    except (TypeError, ValueError, AssertionError, ArithmeticError, LookupError, AttributeError) as error:
        fields = ", ".join(field for field in DATASETS[wanted][1].__dataclass_fields__ if field not in ("seed", "size"))
        raise ConfigError(f"{said} does not take {option}.options: {error}; it has {fields}") from error
    return task


def _sets_are_ordered() -> bool:
    return sys.flags.hash_randomization == 0 or os.environ.get("PYTHONHASHSEED", "random").isdecimal()

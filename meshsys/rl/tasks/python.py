"""Tasks of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshsys.errors import ConfigError
from meshsys.rl.imported import import_function
from meshsys.rl.prompt import Prompt
from meshsys.rl.tasks.base import Form
from meshsys.rl.tasks.config import TaskConfig
from meshsys.rl.tasks.files import prompt_of

__all__ = ["open_python"]


class _Own:
    """What a function gave: `prompts[number]` is a `Prompt`, or a mapping as in a line of JSONL."""

    scorer = "exact_match"

    def __init__(self, name: str, size: int | None, prompts: Any, form: Form, said: str) -> None:
        self.name, self.size, self._prompts, self._form, self._said = name, size, prompts, form, said

    def __getitem__(self, number: int) -> Prompt:
        prompt = self._prompts[number]
        where = f"{self._said}: prompt {number}"
        identity = f"{self.name}/{number}"
        if isinstance(prompt, Prompt):
            return replace(prompt, id=identity, task=self.name)
        if isinstance(prompt, Mapping):
            return prompt_of(prompt, identity, self.name, self._form, where)
        raise ConfigError(f"{where} is {type(prompt).__name__}; give a Prompt, or a mapping with prompt and answer")


def open_python(config: TaskConfig, name: str, chat: bool, option: str, seed: int) -> _Own:
    """The task `python:package.module:function`.

    Raises:
        ConfigError: there is no such function, or it gives no sequence.
    """
    said = f"{option}.source={config.source}"
    function = import_function(config.what, said)
    try:
        prompts = function(seed=seed, **config.options)
    except TypeError as error:
        raise ConfigError(f"{said} cannot be called with seed and {option}.options: {error}") from error
    if not hasattr(prompts, "__getitem__"):
        raise ConfigError(f"{said} gives {type(prompts).__name__}; give a list, or what has prompts[number]")
    size = len(prompts) if hasattr(prompts, "__len__") else None
    if size == 0:
        raise ConfigError(f"{said} gives no prompt; give at least one")
    if size is not None and config.size is not None and size < config.size:
        raise ConfigError(f"{option}.size={config.size}, and {config.source} gives {size} prompts; lower it")
    return _Own(name, size if config.size is None else config.size, prompts, Form(config, chat), said)

"""Tasks by their sources."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from meshsys.errors import ConfigError
from meshsys.rl.tasks.base import Task
from meshsys.rl.tasks.config import TaskConfig
from meshsys.rl.tasks.files import open_gsm8k, open_jsonl
from meshsys.rl.tasks.mixture import Mixture
from meshsys.rl.tasks.python import open_python
from meshsys.rl.tasks.rack import open_rack
from meshsys.rl.tasks.reasoning_gym import open_reasoning_gym

__all__ = ["open_task", "open_tasks"]

_FILES: dict[str, Callable[[TaskConfig, str, bool, str], Task]] = {"gsm8k": open_gsm8k, "jsonl": open_jsonl}
_GENERATED: dict[str, Callable[[TaskConfig, str, bool, str, int], Task]] = {
    "python": open_python,
    "rack": open_rack,
    "reasoning_gym": open_reasoning_gym,
}


def open_tasks(configs: Sequence[TaskConfig], seed: int, *, chat: bool, option: str = "rl.tasks") -> Mixture:
    """All tasks as one endless sequence of prompts.

    Args:
        configs: at least one.
        seed: of what is generated, unless a task has its own; and of the order.
        chat: the tokenizer has a chat template.
        option: where the tasks stand in the configuration, for messages.

    Raises:
        ConfigError: a file, a package or a name that is not there, or does not fit.
    """
    tasks = [open_task(config, seed, chat=chat, option=f"{option}.{number}") for number, config in enumerate(configs)]
    names = [task.name for task in tasks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{option} has two tasks of the name {twice}; give one of them another name")
    return Mixture(tasks, [config.weight for config in configs], seed)


def open_task(config: TaskConfig, seed: int, *, chat: bool, option: str = "rl.task") -> Task:
    """One task, in its own order; see `open_tasks`."""
    if config.chat is not None:
        if config.chat and not chat:
            raise ConfigError(f"{option}.chat=true, and the tokenizer has no chat template; set data.chat_template")
        chat = config.chat
    if config.system is not None and not chat:
        raise ConfigError(f"{option}.system is for models that chat; write it into {option}.template")
    name = config.name or os.path.splitext(os.path.basename(config.what.rpartition(":")[2]))[0] or config.kind
    if config.kind in _FILES:
        return _FILES[config.kind](config, name, chat, option)
    return _GENERATED[config.kind](config, name, chat, option, seed if config.seed is None else config.seed)

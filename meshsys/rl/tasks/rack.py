"""Racks to be put in order, as prompts."""

from __future__ import annotations

from meshsys.errors import ConfigError
from meshsys.rl.environments.rack import RackOptions, describe, make_instance
from meshsys.rl.prompt import Prompt
from meshsys.rl.tasks.base import Form, hashed
from meshsys.rl.tasks.config import TaskConfig

__all__ = ["open_rack"]


class _Racks:
    """Asks for a whole plan; an environment that plays by turns reads the entry only."""

    scorer = "rack"

    def __init__(self, name: str, size: int | None, options: RackOptions, form: Form, seed: int) -> None:
        self.name, self.size, self._options, self._form, self._seed = name, size, options, form, seed

    def __getitem__(self, number: int) -> Prompt:
        instance = make_instance(self._options, hashed(self._seed, number))
        text, messages = self._form(describe(instance, whole_plan=True))
        return Prompt(f"{self.name}/{number}", text, messages, None, instance.entry(), self.name, self.scorer)


def open_rack(config: TaskConfig, name: str, chat: bool, option: str, seed: int) -> _Racks:
    """The task `rack`.

    Raises:
        ConfigError: options that no rack has.
    """
    try:
        options = RackOptions(**config.options)
        make_instance(options, 0)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{option}.options of a rack: {error}; it has rows, columns, classes, tubes, moves") from None
    return _Racks(name, config.size, options, Form(config, chat), seed)

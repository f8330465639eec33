"""The keys of a config.json: each is asked for by someone, or the file cannot be used."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from models.pretrained.source import PretrainedError

__all__ = ["Keys"]

_KINDS: dict[type, tuple[type, ...]] = {float: (float, int)}
_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text", list: "a list", dict: "a mapping"}


class Keys:
    """One mapping of a config.json.

    Args:
        file: for messages.
        values: the mapping.
        defaults: what transformers takes where a key is absent; a null is not absent.
        prefix: of the keys in messages, as `rope_scaling.`.
    """

    def __init__(self, file: Path, values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""):
        self.file = file
        self._values, self._defaults, self._prefix = values, defaults, prefix
        self._asked: set[str] = set()

    def take(self, key: str, kind: type, null: Any = ...) -> Any:
        """The value of a key.

        Args:
            kind: of the value, checked; a float may be written as an integer.
            null: taken for a null; without it, a null is an error.
        """
        self._asked.add(key)
        if key not in self._values and key not in self._defaults:
            raise PretrainedError(f"{self.file} has no {self._prefix}{key}; add it")
        value = self._values.get(key, self._defaults.get(key))
        if value is None and null is not ...:
            return null
        fits = isinstance(value, _KINDS.get(kind, (kind,))) and (kind is bool or not isinstance(value, bool))
        if not fits:
            raise self.wrong(key, f"is not {_NAMES[kind]}", value)
        return kind(value)

    def below(self, key: str) -> Keys | None:
        """The mapping that a key holds; None for a null or where it is absent."""
        value = self.take(key, dict, None) if key in self else None
        return None if value is None else Keys(self.file, value, {}, f"{self._prefix}{key}.")

    def with_defaults(self, defaults: Mapping[str, Any]) -> Keys:
        """The same keys, for a family."""
        return Keys(self.file, self._values, defaults, self._prefix)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def only(self, key: str, allowed: Iterable[Any], why: str) -> None:
        """A key that changes nothing at some values, and may be absent."""
        self._asked.add(key)
        if key in self._values and not any(_same(self._values[key], value) for value in allowed):
            raise self.wrong(key, why)

    def any(self, key: str) -> Any:
        """A key that changes nothing; its value, None where it is absent."""
        self._asked.add(key)
        return self._values.get(key)

    def skip_empty(self) -> None:
        """Asks for every key that holds nothing, where that means that an option is off."""
        self._asked.update(key for key, value in self._values.items() if value in (None, {}, []))

    def finish(self, what: str) -> None:
        """Raises where a key was not asked for.

        Args:
            what: the file describes, for the message.
        """
        for key in self._values:
            if key not in self._asked:
                raise self.wrong(key, f"is not an option that is known of {what}, so the network may be another")

    def wrong(self, key: str, reason: str, value: Any = ...) -> PretrainedError:
        """The error that a key's value cannot be used."""
        text = json.dumps(self._values.get(key) if value is ... else value)
        return PretrainedError(
            f"{self.file}: {self._prefix}{key}={text if len(text) <= 60 else text[:57] + '...'} {reason}"
        )


def _same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)

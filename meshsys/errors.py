"""Errors that the user can put right."""

from __future__ import annotations

__all__ = ["ConfigError"]


class ConfigError(ValueError):
    """A configuration, file or option that cannot be used.

    The message is one line: it names the option as `section.key=value`, what is wrong, and the way out.
    The command line prints it without a traceback and exits with 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))

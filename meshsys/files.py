"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from meshsys.errors import ConfigError

__all__ = ["write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Writes a file, or leaves the one that is there.

    Raises:
        ConfigError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}; make the folder writable") from None

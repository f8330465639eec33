"""Files that are there whole or not at all."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from meshsys.errors import ConfigError

__all__ = ["keep_until", "writable", "write_whole"]


def writable(name: str, option: str) -> Path:
    """The file that the user named by an option, for `write_whole`; asked before long work, whose result would be lost.

    Raises:
        ConfigError: it could not be written.
    """
    path = Path(os.path.realpath(os.path.expanduser(name)))  # a link stays one, and what it points to is written
    obstacle = _obstacle(path)
    if obstacle is not None:
        raise ConfigError(f"{option}={name} {obstacle}; give another path")
    return path


def write_whole(path: Path, text: str, option: str | None = None) -> None:
    """Writes a file, or leaves the one that is there.

    Args:
        option: by which the user named the file, for messages.

    Raises:
        ConfigError: the file cannot be written.
    """
    temporary = _temporary(path)
    try:
        temporary.write_bytes(text.encode())
        os.replace(temporary, path)
    except OSError as error:
        said, hint = (path, "make the folder writable") if option is None else (f"{option}={path}", "give another path")
        raise ConfigError(f"{said} cannot be written: {error.strerror}; {hint}") from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def keep_until(path: Path, step: int) -> None:
    """Drops from a file of JSON records, one a line, those after a step, and what is no record, such as a last line
    that was cut short; a file that is not there stays so."""
    if not path.exists():
        return
    kept = []
    # Not `splitlines`: a text may hold what that takes for the end of a line, as U+2028. The last part is a line that
    # was not finished, or empty.
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        with suppress(ValueError, TypeError, KeyError):
            if json.loads(line)["step"] <= step:
                kept.append(f"{line}\n")
    write_whole(path, "".join(kept))


def _temporary(path: Path) -> Path:
    """Beside the file, as only within a file system one takes another's place at once."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def _obstacle(path: Path) -> str | None:
    """Why no file can be written there; whether one can be made is known once one has been made."""
    if os.path.exists(path):
        if not os.path.isfile(path):
            return "is a folder" if os.path.isdir(path) else "is no regular file"
        if not os.access(path, os.W_OK):
            return "is read-only"
    temporary = _temporary(path)
    try:
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    return None

"""Where documents come from: the running Python's own text, a file, a folder, or a glob.

Everything is read and checked once, when the source is opened, so that a bad line stops a run
before it begins. Documents of files are then read again only when they are asked for.
"""

from __future__ import annotations

import glob
import hashlib
import importlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshsys.errors import ConfigError

__all__ = ["Documents", "check_source", "check_unicode", "json_lines", "open_documents"]

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")

# Installed packages and test suites differ between two installations of one Python; compiled files are not text.
_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class Documents(Protocol):
    """Texts by position, in an order that depends on their names alone.

    Attributes:
        digest: hexadecimal hash of every document in order; equal digests mean equal training text.
    """

    @property
    def digest(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> str: ...


def check_source(source: str) -> None:
    """Sees to it that `data.source` names a file; reads none.

    Raises:
        ConfigError: nothing there.
    """
    if source != "python_docs":
        _files(source, f"data.source={source}")


def open_documents(source: str, text_field: str, option: str = "data.source") -> Documents:
    """The documents of `data.source`.

    Args:
        source: `python_docs`; or a file (any name; `.jsonl` is JSON lines); or a folder, searched
            through for `SUFFIXES` but for hidden names; or a glob, `**` included.
        text_field: the key of the text in a line of JSONL.
        option: by which the user gave the source, for messages.

    A text file is one document, and so is a line of JSONL; empty ones are left out.

    Raises:
        ConfigError: nothing there, nothing in it, not UTF-8, or a bad line of JSONL (with file and line).
    """
    said = f"{option}={source}"
    documents: Documents = _python_docs() if source == "python_docs" else _scan(said, _files(source, said), text_field)
    if not len(documents):
        raise ConfigError(f"{said} holds no text; name files that do, or python_docs")
    return documents


def json_lines(source: str, option: str = "data.source") -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in the JSONL files of `data.source`, each with the option, file and line for messages.

    Raises:
        ConfigError: nothing there, another file than JSONL, or a bad line.
    """
    said = f"{option}={source}"
    if source == "python_docs":
        raise ConfigError(f"{said} is text; give a file, a folder or a glob of .jsonl")
    for path in _files(source, said):
        if path.suffix != ".jsonl":
            raise ConfigError(f"{said}: {path} is no .jsonl; leave it out")
        try:
            for where, _, _, raw in _lines(path):
                where = f"{said}: {where}"
                yield where, _record(_decoded(raw, where), where)
        except OSError as error:
            raise _no_access(said, path, error) from error


@dataclass(frozen=True)
class _Texts:
    """Documents held in memory."""

    texts: tuple[str, ...]
    digest: str

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> str:
        return self.texts[index]


@dataclass(frozen=True)
class _Spans:
    """Documents as byte ranges of files: `[start[i], stop[i])` of `files[file[i]]`."""

    said: str
    text_field: str
    files: tuple[Path, ...]
    file: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    digest: str

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, index: int) -> str:
        path, start = self.files[self.file[index]], int(self.start[index])
        with path.open("rb") as stream:
            stream.seek(start)
            raw = stream.read(int(self.stop[index]) - start)
        return _text(raw, path, f"{self.said}: {path} at byte {start}", self.text_field)


def _hasher_update(hasher: hashlib.blake2b, text: str) -> None:
    encoded = text.encode()
    hasher.update(len(encoded).to_bytes(8, "little"))  # so that moving a boundary changes the digest
    hasher.update(encoded)


def _python_docs() -> _Texts:
    hasher = hashlib.blake2b(digest_size=16)
    texts = [text for text in _python_texts() if text]
    for text in texts:
        _hasher_update(hasher, text)
    return _Texts(tuple(texts), hasher.hexdigest())


def _python_texts() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    # The language reference as prose; its module would show it as quoted string literals.
    topics_file = library / "pydoc_data" / "topics.py"
    if topics_file.is_file():
        yield from (text for _, text in sorted(importlib.import_module("pydoc_data.topics").topics.items()))
    for path in sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).as_posix()):
        if path == topics_file or not _NOT_THE_LIBRARY.isdisjoint(path.relative_to(library).parts):
            continue
        try:
            yield path.read_bytes().decode("utf-8-sig")
        except (UnicodeDecodeError, OSError):  # a few library files declare another encoding
            continue


def _files(source: str, said: str) -> list[Path]:
    root = Path(os.path.expanduser(source))
    if os.path.isfile(root):  # of `os.path`, as it answers False where `Path` would raise: for names too long
        return [root]
    if source and os.path.isdir(root):
        found = [path for path in root.rglob("*") if path.suffix in SUFFIXES and _visible(path.relative_to(root))]
        wanted = " ".join(f"*{suffix}" for suffix in SUFFIXES)
    else:
        found = [Path(name) for name in glob.glob(str(root), recursive=True)]
        wanted = "file or folder of that name, and nothing that matches it as a pattern"
    files = sorted((path for path in found if path.is_file()), key=lambda path: path.as_posix())
    if not files:
        raise ConfigError(f"{said}: no {wanted}; give a file, a folder, a glob, or python_docs")
    return files


def _visible(path: Path) -> bool:
    return not any(part.startswith(".") for part in path.parts)


def _scan(said: str, files: Sequence[Path], text_field: str) -> _Spans:
    hasher = hashlib.blake2b(digest_size=16)
    spans: list[tuple[int, int, int]] = []
    for number, path in enumerate(files):
        try:
            for start, stop, text in _documents_of(path, said, text_field):
                if text:
                    spans.append((number, start, stop))
                    _hasher_update(hasher, text)
        except OSError as error:
            raise _no_access(said, path, error) from error
    file, begin, end = np.array(spans, np.int64).reshape(-1, 3).T
    return _Spans(said, text_field, tuple(files), file, begin, end, hasher.hexdigest())


def _documents_of(path: Path, said: str, text_field: str) -> Iterator[tuple[int, int, str]]:
    """Byte range and text of each document of a file."""
    if path.suffix != ".jsonl":
        raw = path.read_bytes()
        yield 0, len(raw), _text(raw, path, f"{said}: {path}", text_field)
        return
    for where, start, stop, raw in _lines(path):
        yield start, stop, _text(raw, path, f"{said}: {where}", text_field)


def _lines(path: Path) -> Iterator[tuple[str, int, int, bytes]]:
    """The lines of a file that are not blank: what names each in errors, its byte range, and itself."""
    stop = 0
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            start, stop = stop, stop + len(raw)
            if raw.strip():
                yield f"{path}:{number}", start, stop, raw


def _no_access(said: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{said}: cannot read {path} ({error.strerror})")


def _text(raw: bytes, path: Path, where: str, text_field: str) -> str:
    """The document in `raw`; `where` names it in errors."""
    text = _decoded(raw, where)
    return _record_text(_record(text, where), where, text_field) if path.suffix == ".jsonl" else text


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 (byte {error.start}); convert it or leave it out") from error


def _record(line: str, where: str) -> dict[str, Any]:
    """The object in a line of JSONL."""
    try:
        record = json.loads(line)
    except RecursionError as error:
        raise ConfigError(f"{where} is nested too deeply; mend or remove that line") from error
    except ValueError as error:  # also of an integer of thousands of digits, which is no JSONDecodeError
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "a number is too long"
        raise ConfigError(f"{where} is not JSON ({reason}); mend or remove that line") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is not a JSON object; mend or remove that line")
    return record


def _record_text(record: dict[str, Any], where: str, text_field: str) -> str:
    text = record.get(text_field)
    if not isinstance(text, str):
        fields = ", ".join(key for key, value in record.items() if isinstance(value, str)) or "none"
        raise ConfigError(f"{where} has no text in data.text_field={text_field}; its fields with text: {fields}")
    check_unicode(text, where)
    return text


def check_unicode(text: str, where: str) -> None:
    """Sees to it that text can be encoded; JSON may hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} holds half of a surrogate pair; mend or remove that line") from error

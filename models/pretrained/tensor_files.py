"""Safetensors files, read in place and written one tensor at a time.

The format is eight bytes with the length of a JSON header, the header, and the tensors' bytes, little endian and in
C order (https://huggingface.co/docs/safetensors). A folder holds `model.safetensors`, or several files and
`model.safetensors.index.json`, which says what is in which.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import ml_dtypes
import numpy as np

from models.pretrained.source import PretrainedError

__all__ = ["Planned", "StoredTensor", "open_file", "open_folder", "read_json", "write_file", "write_folder"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_LARGEST_HEADER = 100_000_000  # bytes; the format's own limit
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_SIZES = {"BOOL": 1, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4}
_SIZES |= {"I64": 8, "U64": 8} | {name: dtype.itemsize for name, dtype in _DTYPES.items()}


class _MappedFile:
    """A file's map, of which the process holds what was used of late."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self.bytes = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._begin = np.frombuffer(self.bytes, np.uint8, 1).ctypes.data
        self._used: deque[tuple[int, int]] = deque()
        self._held = 0
        self._lock = Lock()

    def used(self, part: np.ndarray) -> None:
        """Takes note that a view was read, and lets go of the pages of those before it."""
        first, end = np.lib.array_utils.byte_bounds(part)
        start = (first - self._begin) // mmap.PAGESIZE * mmap.PAGESIZE
        with self._lock:
            self._used.append((start, end - self._begin - start))
            self._held += end - self._begin - start
            while self._held > _MOST_HELD:
                self._let_go(*self._used.popleft())

    def _let_go(self, start: int, length: int) -> None:
        self._held -= length
        if sys.platform == "linux":
            self.bytes.madvise(mmap.MADV_DONTNEED, start, length)


_MOST_HELD = 32 << 20  # bytes


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, not yet read.

    Attributes:
        dtype: safetensors' name of it, such as `BF16`.
        offset: bytes from the beginning of the file.
        mapped: the file.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    mapped: _MappedFile = field(repr=False)

    @property
    def is_float(self) -> bool:
        """Whether `view` can read it."""
        return self.dtype in _DTYPES

    def view(self) -> np.ndarray:
        """The tensor as a part of the file's map, read-only."""
        count = math.prod(self.shape)
        return np.frombuffer(self.mapped.bytes, _DTYPES[self.dtype], count, self.offset).reshape(self.shape)

    def copy(self, part: np.ndarray, out: np.ndarray) -> None:
        """`out[...] = part` for a part of `view`.

        Small blocks, which a cache holds, are transposed twice as fast.
        """
        for pages, target in _blocks(part, out, _READ_AT_ONCE):
            for block, place in _blocks(pages, target, _COPIED_AT_ONCE):
                place[...] = block
            self.mapped.used(pages)


_READ_AT_ONCE, _COPIED_AT_ONCE = 4 << 20, 256 << 10  # bytes


def _blocks(part: np.ndarray, out: np.ndarray, nbytes: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both in blocks along the axis that is outermost in the file, each from so many bytes of it."""
    axis = max(range(part.ndim), key=lambda axis: (part.shape[axis] > 1) * part.strides[axis])
    step = max(1, nbytes // max(1, part.strides[axis]))
    for start in range(0, part.shape[axis], step):
        place = (slice(None),) * axis + (slice(start, start + step),)
        yield part[place], out[place]


@dataclass(frozen=True)
class Planned:
    """A tensor to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# --- Reading ------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        PretrainedError: it is absent or something else.
    """
    try:
        return _json_object(path, path.read_bytes())
    except OSError as error:
        raise PretrainedError(f"{path} cannot be read: {error.strerror}; give a folder that has one") from None


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder, by name.

    Raises:
        PretrainedError: a file is absent or damaged.
    """
    if (folder / SINGLE).is_file():
        return open_file(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise PretrainedError(f"{folder} has neither {SINGLE} nor {INDEX}; {_instead(folder)}")
    index = folder / INDEX
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise PretrainedError(f"{index} has no weight_map of tensors to files; {_AGAIN}")
    shards = list(dict.fromkeys(places.values()))
    for shard in shards:
        if Path(shard).name != shard or not (folder / shard).is_file():
            first = next(name for name, place in places.items() if place == shard)
            raise PretrainedError(f"{folder / shard} is missing; {INDEX} says that it holds {first}; {_AGAIN}")
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in open_file(folder / shard).items():
            if places.get(name) != shard:
                raise PretrainedError(f"{folder / shard} holds {name}, but {INDEX} says nothing of it; {_AGAIN}")
            tensors[name] = tensor
    if absent := [name for name in places if name not in tensors]:
        raise PretrainedError(f"{folder / places[absent[0]]} has no {absent[0]}, though {INDEX} says so; {_AGAIN}")
    return tensors


_AGAIN = "copy the folder again"


def _instead(folder: Path) -> str:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        return "its weights are pickles, which can run code; save it with safetensors, as transformers does by default"
    return "give a folder that transformers or `meshsys export` wrote, a .gguf file or a llama2.c .bin file"


def open_file(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a file, by name; see `open_folder`."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        if size < 8 or start > size:
            raise PretrainedError(f"{path} is truncated: it has {size} bytes, and its header alone {start}; {_AGAIN}")
        if start > _LARGEST_HEADER:
            raise PretrainedError(f"{path} is not a safetensors file: its header would have {start} bytes; {_AGAIN}")
        header = _json_object(path, file.read(start - 8))
    header.pop("__metadata__", None)
    tensors, end, mapped = {}, start, _MappedFile(path)
    for name, entry in header.items():
        tensors[name], last = _stored(path, name, entry, start, mapped)
        if last > size:
            raise PretrainedError(f"{path} is truncated: it has {size} bytes, and {name} ends at {last}; {_AGAIN}")
        end = max(end, last)
    if end != size:
        raise PretrainedError(f"{path} has {size} bytes, but its last tensor ends at {end}; {_AGAIN}")
    return tensors


def _stored(path: Path, name: str, entry: Any, start: int, mapped: _MappedFile) -> tuple[StoredTensor, int]:
    """The tensor of a header's entry, and where it ends."""
    try:
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        fits = all(type(n) is int and n >= 0 for n in (*shape, first, last))
        fits = fits and (dtype not in _SIZES or last - first == math.prod(shape) * _SIZES[dtype])
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise PretrainedError(f"{path} has a header in which {name} is damaged; {_AGAIN}")
    return StoredTensor(path, name, str(dtype), shape, start + first, mapped), start + last


def _json_object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:80]
        raise PretrainedError(f"{path} is not valid JSON: {reason}; {_AGAIN}") from None
    if not isinstance(value, dict):
        raise PretrainedError(f"{path} holds no JSON object; {_AGAIN}")
    return value


# --- Writing ------------------------------------------------------------------------------------------------------


def write_folder(folder: Path, tensors: Iterable[tuple[Planned, Any]], shard_bytes: int) -> None:
    """Writes tensors in their order, to as many files as it takes.

    Args:
        tensors: each with a function that makes it, which is called once, when its turn has come.
        shard_bytes: a file has no more, unless one tensor alone does.
    """
    files: list[list[tuple[Planned, Any]]] = [[]]
    filled = 0
    for planned, make in tensors:
        if files[-1] and filled + planned.nbytes > shard_bytes:
            files.append([])
            filled = 0
        files[-1].append((planned, make))
        filled += planned.nbytes
    names = list(_names(len(files)))
    for name, held in zip(names, files, strict=True):
        write_file(folder / name, held)
    if len(files) > 1:
        places = {planned.name: name for name, held in zip(names, files, strict=True) for planned, _ in held}
        total = sum(planned.nbytes for held in files for planned, _ in held)
        index: Mapping[str, Any] = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _names(count: int) -> Iterator[str]:
    if count == 1:
        yield SINGLE
        return
    for number in range(1, count + 1):
        yield f"model-{number:05d}-of-{count:05d}.safetensors"


def write_file(path: Path, tensors: list[tuple[Planned, Any]]) -> None:
    """Writes tensors in their order; see `write_folder`."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # what transformers asks for
    offset = 0
    for planned, _ in tensors:
        ends = [offset, offset := offset + planned.nbytes]
        header[planned.name] = {"dtype": names[planned.dtype], "shape": planned.shape, "data_offsets": ends}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that every tensor begins at a multiple of eight
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for planned, make in tensors:
            array = np.ascontiguousarray(make(), planned.dtype)
            assert array.shape == planned.shape, planned.name
            file.write(array.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())

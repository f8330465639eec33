"""GGUF files: metadata and tensors, checked as the file is opened.

The format, versions 2 and 3: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Own code and not
`gguf.GGUFReader`, which takes seconds for a vocabulary and does not say which tensor is damaged; dequantising is
the `gguf` package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from models.pretrained.source import PretrainedError

__all__ = ["GgufFile", "Tensor"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_KINDS = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K".split()


class Tensor(NamedTuple):
    """One tensor of a file.

    Attributes:
        kind: name of its storage, such as `Q4_1`.
        shape: the slowest dimension first; matrices are [out, in].
        start: its first byte in the file.
        row_bytes: bytes of a row, along the last dimension.
    """

    kind: str
    shape: tuple[int, ...]
    start: int
    row_bytes: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])


class GgufFile:
    """A GGUF file, mapped into memory.

    Attributes:
        path: the file.
        metadata: by key; strings, numbers, booleans, and lists of them.
        tensors: by name.

    Raises:
        PretrainedError: no such file, no GGUF, cut short, or a tensor of a kind that is not read; the message names
            the key or the tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _mapped(path)
        reader = _Reader(path, self._data)
        tensors, keys = reader.header()
        self.metadata: Mapping[str, Any] = reader.metadata(keys)
        self.tensors: Mapping[str, Tensor] = reader.tensors(tensors, self.metadata)

    def read(self, name: str, rows: slice, columns: slice) -> np.ndarray:
        """A part of a tensor, all but its last dimension taken as rows: float32 [rows, columns].

        Raises:
            PretrainedError: it holds a value that is not finite.
        """
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        tensor = self.tensors[name]
        kind = GGMLQuantizationType[tensor.kind]
        block, block_bytes = GGML_QUANT_SIZES[kind]
        count, offset = (rows.stop - rows.start) * tensor.row_bytes, tensor.start + rows.start * tensor.row_bytes
        raw = np.frombuffer(self._data, np.uint8, count, offset).reshape(-1, tensor.row_bytes)
        first, last = columns.start // block, -(-columns.stop // block)
        raw = np.ascontiguousarray(raw[:, first * block_bytes : last * block_bytes])
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.asarray(dequantize(raw, kind), np.float32)
        values = values[:, columns.start - first * block : columns.stop - first * block]
        if not np.isfinite(values).all():
            raise PretrainedError(f"{self.path}: {name} holds values that are not finite; it is damaged, get it again")
        return values


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # an empty file cannot be mapped
        raise PretrainedError(f"{path} is empty; get the file again") from None
    except OSError as error:
        raise PretrainedError(f"{path} cannot be read ({error.strerror}); give a GGUF file") from None


class _Reader:
    """Reads a file's parts in their order."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0
        self._inside = "its header"  # for messages

    def header(self) -> tuple[int, int]:
        """The numbers of tensors and of metadata keys."""
        if bytes(self._data[:4]) != b"GGUF":
            raise PretrainedError(f"{self._path} is no GGUF file (it does not begin with GGUF); give another")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            said = f"of version {version}" if swapped not in (2, 3) else "big-endian"
            raise PretrainedError(f"{self._path} is {said}; convert it to a little-endian file of version 2 or 3")
        return self._number("Q"), self._number("Q")

    def metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            self._inside = f"its metadata after {list(found)[-1]}" if found else "its metadata"
            key = self._string()
            self._inside = f"its metadata {key}"
            if key in found:
                raise self._broken("is there twice")
            found[key] = self._value(self._number("I"))
        return found

    def tensors(self, count: int, metadata: Mapping[str, Any]) -> dict[str, Tensor]:
        described = [self._tensor() for _ in range(count)]
        alignment = metadata.get("general.alignment", 32)
        self._inside = "its metadata general.alignment"
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._broken(f"is {alignment}, no power of two")
        begin = -(-self._at // alignment) * alignment
        found: dict[str, Tensor] = {}
        for name, tensor in described:
            self._inside = f"tensor {name}"
            if name in found:
                raise self._broken("is there twice")
            placed = tensor._replace(start=begin + tensor.start)
            if placed.start + placed.rows * placed.row_bytes > len(self._data):
                raise self._broken("ends beyond the file, which is cut short")
            found[name] = placed
        return found

    def _tensor(self) -> tuple[str, Tensor]:
        """Name and description, whose start counts from where tensors begin."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        self._inside = "its list of tensors"
        name = self._string()
        self._inside = f"tensor {name}"
        dimensions = self._number("I")
        if not 1 <= dimensions <= 4:
            raise self._broken(f"has {dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        if not all(0 < size < 1 << 40 for size in shape):
            raise self._broken(f"has the shape {list(shape)}")
        number, start = self._number("I"), self._number("Q")
        kind = GGMLQuantizationType(number).name if number in iter(GGMLQuantizationType) else f"number {number}"
        if kind not in _KINDS:
            known = ", ".join(_KINDS)
            raise PretrainedError(
                f"{self._path}: {self._inside} is stored as {kind}, no known kind; use one of {known}"
            )
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        if shape[-1] % block:
            raise self._broken(f"has rows of {shape[-1]} values, no multiple of {kind}'s {block}")
        return name, Tensor(kind, shape, start, shape[-1] // block * block_bytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        return self._number(self._scalar(kind))

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind == _ARRAY:
            raise self._broken("is a list of lists")
        code = self._scalar(kind)
        raw = self._bytes(count * struct.calcsize(code))
        return np.frombuffer(raw, f"<{np.dtype(code).str[1:]}").tolist()

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._broken(f"is of the unknown type {kind}")
        return _SCALARS[kind]

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(code)))[0]

    def _string(self) -> str:
        raw = self._bytes(self._number("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._broken("is not UTF-8") from None

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise self._broken("ends beyond the file, which is cut short")
        raw, self._at = self._data[self._at : end], end
        return raw

    def _broken(self, what: str) -> PretrainedError:
        return PretrainedError(f"{self._path}: {self._inside} {what}; the file is damaged, get it again")

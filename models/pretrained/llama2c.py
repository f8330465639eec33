"""Models of llama2.c (https://github.com/karpathy/llama2.c): float32 files without names, in one of two orders.

Its `export.py` writes both; the later one begins with `ak42` in little endian, and a version.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from models.config import ModelConfig
from models.pretrained.layouts import Layout
from models.pretrained.rows import read_rows
from models.pretrained.source import Index, PretrainedError

__all__ = ["Llama2cSource"]

_MAGIC = b"24ka"
_HEADER, _HEADER_V1 = 28, 256  # bytes
_ORDER = "embedding attention_norm query key value out mlp_norm gate down up norm rotary kernel".split()
_ORDER_V1 = "attention_norm mlp_norm norm embedding query key value out gate down up kernel".split()

_LAYOUTS = {
    "shared.embed.embedding": Layout("embedding", "V D", "VD"),
    "shared.head.norm.scale": Layout("norm", "D", "D"),
    "shared.head.kernel": Layout("kernel", "V D", "DV"),
    "layers.attention_norm.scale": Layout("attention_norm", "D", "D"),
    "layers.mlp_norm.scale": Layout("mlp_norm", "D", "D"),
    "layers.attention.query": Layout("query", "NH D", "DNH"),
    "layers.attention.key": Layout("key", "KH D", "DKH"),
    "layers.attention.value": Layout("value", "KH D", "DKH"),
    "layers.attention.out": Layout("out", "D NH", "NHD"),
    "layers.mlp.gate": Layout("gate", "F D", "DF"),
    "layers.mlp.up": Layout("up", "F D", "DF"),
    "layers.mlp.down": Layout("down", "D F", "FD"),
}


class Llama2cSource:
    """The parameters in a file of llama2.c: a `models.pretrained.source.WeightSource`.

    Raises:
        PretrainedError: no such file, of another format or size, or quantised.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.notes = path, tuple[str, ...]()
        self.config, context_length, start, order = _read_header(path)
        self.facts: Mapping[str, Any] = {"model_type": "llama", "max_position_embeddings": context_length}
        self._sizes = _sizes(self.config)
        self._layouts = dict(_LAYOUTS)
        for leaf in ("layers.attention.query", "layers.attention.key"):
            self._layouts[leaf] = replace(_LAYOUTS[leaf], interleaved=self.config.size_of_head)
        held = {layout.tensor: (leaf, layout) for leaf, layout in _LAYOUTS.items()}
        self._tensors: dict[str, tuple[int, tuple[int, ...]]] = {}
        for name in order:
            if name == "rotary":  # tables of cosines and sines, which follow from the configuration
                start += 4 * context_length * self.config.size_of_head
                continue
            if name == "kernel" and self.config.tie_embeddings:
                continue
            leaf, layout = held[name]
            shape = layout.stored_shape(self._shape(leaf))
            if leaf.startswith("layers."):
                shape = (self.config.layers, *shape)
            self._tensors[leaf] = start, shape
            start += 4 * math.prod(shape)
        if (size := path.stat().st_size) != start:
            raise PretrainedError(f"{path} has {size} bytes, and its header asks for {start}; get the file again")

    def read(self, leaf: str, layer: int | None, index: Index, out: np.ndarray) -> None:
        start, shape = self._tensors[leaf]
        tensor = np.memmap(self.path, "<f4", "r", start, shape)
        matrix = tensor if layer is None else tensor[layer]
        rows = partial(self._rows, leaf, matrix.reshape(-1, matrix.shape[-1]))
        read_rows(self._layouts[leaf], rows, self._shape(leaf), index, out)

    def _rows(self, leaf: str, matrix: np.ndarray, rows: slice, columns: slice) -> np.ndarray:
        values = matrix[rows, columns]
        if not np.isfinite(values).all():
            raise PretrainedError(f"{self.path}: {leaf} holds values that are not finite; get the file again")
        return values

    def _shape(self, leaf: str) -> tuple[int, ...]:
        return tuple(self._sizes[letter] for letter in _LAYOUTS[leaf].canonical)


def _sizes(config: ModelConfig) -> dict[str, int]:
    return {
        "V": config.vocab_size,
        "D": config.d_model,
        "F": config.d_ff,
        "N": config.heads,
        "K": config.num_kv_heads,
        "H": config.size_of_head,
    }


def _read_header(path: Path) -> tuple[ModelConfig, int, int, list[str]]:
    """The architecture, tokens of the context, the byte where tensors begin, and their order."""
    try:
        with path.open("rb") as file:
            raw = file.read(_HEADER_V1)
    except OSError as error:
        raise PretrainedError(f"{path} cannot be read ({error.strerror}); give a file of llama2.c") from None
    named = raw[:4] == _MAGIC
    start, order = (_HEADER_V1, _ORDER_V1) if named else (_HEADER, _ORDER)
    if len(raw) < start:
        raise PretrainedError(f"{path} has {len(raw)} bytes, less than a header of llama2.c; get the file again")
    if named and (version := struct.unpack_from("<i", raw, 4)[0]) != 1:
        raise PretrainedError(f"{path} is a quantised file of llama2.c (version {version}); export it with --version 1")
    width, d_ff, layers, heads, kv_heads, vocabulary, context_length = struct.unpack_from("<7i", raw, 8 if named else 0)
    tied = bool(raw[36]) if named else vocabulary > 0
    try:
        config = ModelConfig(
            layers=layers,
            d_model=width,
            heads=heads,
            kv_heads=kv_heads,
            d_ff=d_ff,
            vocab_size=abs(vocabulary),
            tie_embeddings=tied,
            norm_epsilon=1e-5,
            rope_theta=10_000.0,
        )
    except (ValueError, ZeroDivisionError):
        config = None
    if config is None or not vocabulary or not 0 < context_length < 1 << 24:
        raise PretrainedError(f"{path} is no file of llama2.c: its header makes no model; give another")
    return config, context_length, start, order

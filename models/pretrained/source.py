"""Where parameters come from: files of any format, read part by part as the shards of a mesh need them.

A format is a `WeightSource`; `fill` makes one parameter of it on a mesh, in whatever form its layers are stacked.

Shapes: L layers; P ranks, V chunks a rank, J layer places a chunk (`schedules.stages`).
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from models.config import ModelConfig

__all__ = ["Index", "PretrainedError", "WeightSource", "fill"]

Index = tuple[slice, ...]
"""A part of a parameter without its layer axes: one slice a dimension, with a start, a stop and no step."""

Bounds = tuple[tuple[int, int], ...]
"""The same of a parameter with its layer axes, as starts and stops: dicts take slices as keys from Python 3.12 on."""


class PretrainedError(ValueError):
    """A file that cannot be used; one line that names the file, what in it, and the way out."""


class WeightSource(Protocol):
    """The parameters of a model in a file or folder, in canonical form.

    Whoever makes one has checked that all parameters of `config` are there, of the right shapes and of dtypes that
    can be read, and that nothing else is: only damage in the middle of a file is left for `read` to find.

    A `leaf` is the path of a parameter, joined by dots: `shared.embed.embedding`, `layers.attention.query`,
    `layers.moe.gate`. A source has low-rank updates (`query_lora_a`) if its `config.lora` says so.

    Attributes:
        path: the file or folder, as messages name it.
        config: the architecture: as `ModelConfig`'s defaults where a file says nothing (dtype, dropout, lora).
        facts: what a config.json says besides the architecture: `model_type`, `max_position_embeddings`,
            `bos_token_id`, `eos_token_id`, `pad_token_id`, as far as they are known.
        notes: what the file holds and the model has no place for, a line each.
    """

    path: Path
    config: ModelConfig
    facts: Mapping[str, Any]
    notes: tuple[str, ...]

    def read(self, leaf: str, layer: int | None, index: Index, out: np.ndarray) -> None:
        """Writes a part of one layer's parameter to `out`, in the layout of the canonical form.

        Matrices are [in, out], rotary dimensions are in halves. Reads no more of the file than it has to.

        Args:
            layer: global number of the layer; None for parameters that no layer has.
            index: of the part.
            out: of the part's shape and of any float dtype, to which values are converted; several threads read
                at once.

        Raises:
            PretrainedError: the file is damaged there.
        """


def fill(
    source: WeightSource,
    leaf: str,
    shape: jax.ShapeDtypeStruct,
    layers: np.ndarray | None = None,
) -> jax.Array:
    """One parameter on its mesh; the host holds a few shards of it besides, and a CPU device takes those over.

    Args:
        leaf: see `WeightSource`.
        shape: of the result, with its dtype and sharding.
        layers: numbers of the layers that the leading axes hold, as [L] for the canonical form or as the table
            [P, V, J] of the training form; -1 gives zeros. None for a parameter that no layer has.
    """
    assert shape.sharding is not None
    holders: dict[Bounds, list[jax.Device]] = {}
    for device, index in shape.sharding.addressable_devices_indices_map(shape.shape).items():
        holders.setdefault(_bounds(index, shape.shape), []).append(device)
    found: list[jax.Array] = []
    different = list(holders)  # replicas are read once
    for start in range(0, len(different), _AT_ONCE):
        some = different[start : start + _AT_ONCE]
        shards = _shards(source, leaf, some, np.dtype(shape.dtype), layers)
        for bounds, shard in zip(some, shards, strict=True):
            found += [jax.device_put(shard, device) for device in holders[bounds]]
    return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, found)


_AT_ONCE = 4  # shards on the host


def _shards(
    source: WeightSource, leaf: str, places: list[Bounds], dtype: np.dtype, layers: np.ndarray | None
) -> list[np.ndarray]:
    """The parts of a parameter at some places; they are read together, layer by layer, by several threads."""
    shards = [_memory([stop - start for start, stop in bounds], dtype) for bounds in places]
    jobs: list[tuple[int, np.ndarray, Index]] = []
    for bounds, shard in zip(places, shards, strict=True):
        index = tuple(slice(*ends) for ends in bounds)
        if layers is None:
            jobs.append((0, shard, index))
            continue
        here = layers[index[: layers.ndim]]
        jobs += [
            (int(here[place]), shard[*place, ...], index[layers.ndim :])
            for place in np.ndindex(here.shape)
            if here[place] >= 0
        ]
    jobs.sort(key=lambda job: job[0])  # what parts of a layer have in common is read once

    def read(job: tuple[int, np.ndarray, Index]) -> None:
        number, out, index = job
        source.read(leaf, None if layers is None else number, index, out)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(read, jobs))
    return shards


def _memory(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """An array of zeros in pages of its own, which a CPU device takes over as they are, where it would copy others."""
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8, size).view(dtype).reshape(shape)


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    whole = index or (slice(None),) * len(shape)
    return tuple(part.indices(size)[:2] for part, size in zip(whole, shape, strict=True))

"""Models in files as configuration and parameters, and back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.config import DType, ModelConfig
from models.pretrained.adapter import ADAPTER_CONFIG, AdapterFolder, Merged, write_adapter
from models.pretrained.gguf import GgufSource
from models.pretrained.hugging_face import HuggingFaceFolder, write_hugging_face
from models.pretrained.llama2c import Llama2cSource
from models.pretrained.source import Index, PretrainedError, WeightSource, fill
from models.pretrained.tree import leaf_name, leaves_of, shapes_of

__all__ = [
    "base_of",
    "fill_tree",
    "load_pretrained",
    "new_folder",
    "open_pretrained",
    "save_adapter",
    "save_pretrained",
    "write_source",
]

PyTree = Any


def open_pretrained(path: str | Path) -> WeightSource:
    """A Hugging Face folder, a GGUF file, a file of llama2.c, or a PEFT adapter of one of these.

    Its parameters are checked, and not yet read.

    Raises:
        PretrainedError: it is absent, damaged, or another model than the decoder can be.
    """
    path = Path(path)
    if (path / ADAPTER_CONFIG).is_file():
        return AdapterFolder(path, open_pretrained)
    if path.is_dir():
        return HuggingFaceFolder(path)
    if path.suffix in _FILES and path.is_file():
        return _FILES[path.suffix](path)
    raise PretrainedError(
        f"{path} {'is no model' if path.exists() else 'does not exist'}; give a Hugging Face folder, a .gguf file, or "
        "a .bin file of llama2.c"
    )


def base_of(path: str | Path) -> Path:
    """The model that an adapter updates; the path itself of anything else.

    Raises:
        PretrainedError: the adapter is damaged, or its model is not here.
    """
    path = Path(path)
    return AdapterFolder(path, open_pretrained).base if (path / ADAPTER_CONFIG).is_file() else path


_FILES: dict[str, Callable[[Path], WeightSource]] = {".gguf": GgufSource, ".bin": Llama2cSource}


def load_pretrained(
    path: str | Path,
    *,
    dtype: DType | None = None,
    param_dtype: DType | None = None,
    shardings: PyTree = None,
) -> tuple[ModelConfig, PyTree]:
    """Reads a model; every device's part of a parameter is read by itself, so the host holds no more than that.

    Args:
        path: a Hugging Face folder, a GGUF file, a file of llama2.c, or a PEFT adapter, which keeps its updates apart.
        dtype: of the computation; float32 by default.
        param_dtype: of the parameters; by default bfloat16 if the file's are, and otherwise float32.
        shardings: a `Sharding` for each parameter, in the tree that `models.Decoder` has, or one for all; the first
            device by default.

    Raises:
        PretrainedError: it is absent, damaged, or another model than the decoder can be.
    """
    source = open_pretrained(path)
    config = replace(
        source.config, dtype=dtype or source.config.dtype, param_dtype=param_dtype or source.config.param_dtype
    )
    shapes = shapes_of(config)
    if shardings is None:
        shardings = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, shapes)
    leaves = leaves_of(config)
    structs = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )
    return config, fill_tree(source, structs, lambda name: leaves[name].layers)


def fill_tree(source: WeightSource, shapes: PyTree, layers: Callable[[str], Any]) -> PyTree:
    """`fill` for every leaf of a tree.

    Args:
        shapes: with shardings.
        layers: for a leaf's name, the layers that its leading axes hold, as `fill` takes them.
    """

    def leaf(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> jax.Array:
        name = leaf_name(path)
        held = layers(name)
        return fill(source, name, shape, None if held is None else np.asarray(held, np.int32))

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def save_pretrained(
    config: ModelConfig, params: PyTree, path: str | Path, *, facts: Mapping[str, Any] | None = None
) -> None:
    """Writes a Hugging Face folder, which transformers loads; low-rank updates are merged into their matrices.

    Args:
        params: in canonical form.
        path: of a new folder; it is there once it is whole.
        facts: see `WeightSource`; without them config.json has no ids of tokens, and no length of a context.

    Raises:
        PretrainedError: there is such a folder, or no family of models in transformers is like the configuration.
    """
    with new_folder(path) as folder:
        write_hugging_face(folder, config, _Params(config, params), facts or {})


def save_adapter(
    config: ModelConfig, params: PyTree, path: str | Path, *, base: str, facts: Mapping[str, Any] | None = None
) -> None:
    """Writes the low-rank updates as a folder that PEFT loads.

    Args:
        params: in canonical form; the model's own are not written.
        path: of a new folder; it is there once it is whole.
        base: path or name of the model that is updated.
        facts: see `WeightSource`.

    Raises:
        PretrainedError: there is such a folder, or no family of models in transformers is like the configuration.
        ValueError: the configuration has no updates.
    """
    if config.lora is None:
        raise ValueError("the model has no low-rank updates; set model.lora, or save all of it")
    with new_folder(path) as folder:
        write_adapter(folder, config, _Params(config, params), facts or {}, base)


def write_source(source: WeightSource, folder: Path, param_dtype: DType | None = None) -> None:
    """Writes a model of any format as a Hugging Face folder, one tensor after the other; updates are merged."""
    source = Merged(source) if source.config.lora else source
    config = replace(source.config, param_dtype=param_dtype or source.config.param_dtype)
    leaves, dtype = leaves_of(config), jnp.dtype(config.param_dtype)

    def take(leaf: str, layer: int | None, expert: int | None) -> np.ndarray:
        index: Index = tuple(slice(0, size) for size in leaves[leaf].shape)
        index = index if expert is None else (slice(expert, expert + 1), *index[1:])
        out = np.empty([part.stop - part.start for part in index], dtype)
        source.read(leaf, layer, index, out)
        return out if expert is None else out[0]

    write_hugging_face(folder, config, take, source.facts)


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A folder to write to, which takes its place at the end, or not at all.

    Raises:
        PretrainedError: the place is taken, or cannot be written to.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise PretrainedError(f"{path} exists; give the path of a new folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise PretrainedError(f"{path} cannot be written: {error.strerror}; give another path") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _Params:
    """Parameters in canonical form, one at a time.

    Raises:
        ValueError: they are not the configuration's.
    """

    def __init__(self, config: ModelConfig, params: PyTree):
        self._config, self._leaves = config, leaves_of(config)
        self._arrays = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        wanted = {leaf_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(shapes_of(config))}
        for name in sorted(wanted.keys() | self._arrays.keys()):
            shape = self._arrays[name].shape if name in self._arrays else None
            if shape != wanted.get(name):
                raise ValueError(f"params: {name} is of shape {shape}, and config says {wanted.get(name)}")

    def __call__(self, leaf: str, layer: int | None, expert: int | None) -> np.ndarray:
        """A layer's parameter on the host, with its low-rank update."""
        layers = self._leaves[leaf].layers
        place = tuple(
            n for n in (layers.index(layer) if layers and layer is not None else None, expert) if n is not None
        )
        matrix, lora = _taken(self._arrays[leaf], place), self._config.lora
        if lora is None or f"{leaf}_lora_a" not in self._arrays:
            return matrix
        first, second = (_taken(self._arrays[f"{leaf}_lora_{end}"], place).astype(np.float32) for end in "ab")
        update = np.tensordot(first, second, 1) * np.float32(lora.alpha / lora.rank)
        return (matrix.astype(np.float32) + update).astype(matrix.dtype)


def _taken(array: jax.Array, place: tuple[int, ...]) -> np.ndarray:
    """`array[place]`, by one compiled program for all places."""
    rest = array.shape[len(place) :]
    start = (*place, *[0] * len(rest))
    return np.asarray(jax.lax.dynamic_slice(array, start, (*[1] * len(place), *rest))).reshape(rest)

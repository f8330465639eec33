"""Hugging Face folders: config.json and safetensors, in and out."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from models.pretrained.config_file import config_keys, read_config
from models.pretrained.layouts import Layout, layouts
from models.pretrained.source import Index, PretrainedError
from models.pretrained.tensor_files import Planned, StoredTensor, open_folder, write_folder
from models.pretrained.tree import Leaf, leaves_of

__all__ = ["HuggingFaceFolder", "Place", "Take", "places", "write_hugging_face"]

SHARD_BYTES = 5 * 10**9
"""The most that a file has, as transformers writes them."""


class HuggingFaceFolder:
    """A folder as a `WeightSource`.

    Raises:
        PretrainedError: it is damaged, or holds another model than the decoder can be.
    """

    def __init__(self, path: Path):
        self.path = path
        self._described = described = read_config(path / "config.json")
        stored = _text_part(open_folder(path)) if described.wrapped else open_folder(path)
        self._leaves = leaves_of(described.config)
        self._layouts = layouts(described.config, described.family, interleaved=described.interleaved)
        self._tensors = self._found(stored)
        self.notes = tuple(self._left_out(stored))
        halves = all(tensor.dtype == "BF16" for tensor in self._tensors.values())
        self.config = replace(described.config, param_dtype="bfloat16" if halves else "float32")
        self.facts: Mapping[str, Any] = described.facts

    def read(self, leaf: str, layer: int | None, index: Index, out: np.ndarray) -> None:
        layout, shape = self._layouts[leaf], self._leaves[leaf].shape
        if not layout.by_expert:
            self._read(layout, layout.tensor.format(layer=layer), shape, index, out)
            return
        experts, *rest = index
        for place, expert in enumerate(range(experts.start, experts.stop)):
            name = layout.tensor.format(layer=layer, expert=expert)
            self._read(layout, name, shape[1:], tuple(rest), out[place])

    def _read(self, layout: Layout, name: str, shape: tuple[int, ...], index: Index, out: np.ndarray) -> None:
        tensor = self._tensors[name]
        for part, target in layout.parts(tensor.view(), shape, index, out):
            tensor.copy(part, target)

    def _found(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The tensors of all parameters, by name."""
        found = {}
        for place in places(self._layouts, self._leaves):
            tensor = stored.get(place.name)
            if tensor is None:
                raise PretrainedError(
                    f"{self.path} has no tensor {place.name}, which config.json asks for; copy it again"
                )
            if tensor.shape != place.shape:
                raise PretrainedError(
                    f"{tensor.file}: {tensor.name} has the shape {list(tensor.shape)}, and config.json asks for "
                    f"{list(place.shape)}; one of them is of another model"
                )
            if not tensor.is_float:
                raise PretrainedError(
                    f"{tensor.file}: {tensor.name} is of {tensor.dtype}, which is quantised; give the weights in "
                    "float32, float16 or bfloat16"
                )
            found[place.name] = tensor
        return found

    def _left_out(self, stored: Mapping[str, StoredTensor]) -> Iterator[str]:
        """Why the other tensors can be left out, a line for each reason."""
        reasons = Counter(self._reason(tensor, name) for name, tensor in stored.items() if name not in self._tensors)
        yield from (f"{self.path}: {count} tensors are left out: they {why}" for why, count in reasons.items())

    def _reason(self, tensor: StoredTensor, name: str) -> str:
        config, family = self._described.config, self._described.family
        for pattern, why in family.extra.items():
            if re.fullmatch(pattern, name):
                return why
        if name == self._layouts["shared.head.kernel"].tensor and config.tie_embeddings:
            return "are the embedding again, as tie_word_embeddings has it"
        if self._described.wrapped and re.match(r"(model\.)?(vision_tower|multi_modal_projector)\.", name):
            return "are for images"
        if config.latent and (found := re.match(r"model\.layers\.(\d+)\.", name)) and int(found[1]) >= config.layers:
            return "predict more than one token ahead"
        raise PretrainedError(
            f"{tensor.file}: {tensor.name} has no place in a model of type {family.model_type}; give another file"
        )


def _text_part(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a model that sees images, by the names that its text part's have in a model of its own."""
    prefixes = (("language_model.", ""), ("model.language_model.", "model."))

    def name(whole: str) -> str:
        return next((new + whole.removeprefix(old) for old, new in prefixes if whole.startswith(old)), whole)

    return {name(whole): tensor for whole, tensor in stored.items()}


# --- Writing ------------------------------------------------------------------------------------------------------


Take = Callable[[str, int | None, int | None], np.ndarray]
"""Gives a parameter of a layer, and of an expert where experts are tensors of their own, in canonical form."""


def write_hugging_face(
    folder: Path,
    config: ModelConfig,
    take: Take,
    facts: Mapping[str, Any],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes config.json and safetensors, one tensor after the other, in the stored dtype of the configuration.

    Args:
        folder: that is there; the files must not be.
        facts: of the `WeightSource`.

    Raises:
        PretrainedError: no family of models is like it.
    """
    config = replace(config, lora=None)
    family, keys = config_keys(config, facts)
    dtype = np.dtype(jnp.dtype(config.param_dtype))
    table, leaves = layouts(config, family, interleaved=True), leaves_of(config)
    planned = [
        (Planned(one.name, dtype, one.shape), partial(_written, table[one.leaf], take, one))
        for one in sorted(places(table, leaves), key=lambda one: one.order)
    ]
    write_folder(folder, planned, shard_bytes)
    (folder / "config.json").write_text(json.dumps(keys, indent=2) + "\n")


def _written(layout: Layout, take: Take, place: Place) -> np.ndarray:
    return layout.written(take(place.leaf, place.layer, place.expert))


# --- Both ---------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A tensor of a file: its name and shape there, and whose it is."""

    name: str
    shape: tuple[int, ...]
    leaf: str
    layer: int | None
    expert: int | None

    @property
    def order(self) -> tuple[float, int]:
        """The order in which a model uses its tensors."""
        if self.layer is not None:
            return self.layer, self.expert or 0
        return (-1, 0) if self.leaf.startswith("shared.embed.") else (float("inf"), self.leaf == "shared.head.kernel")


def places(table: Mapping[str, Layout], leaves: Mapping[str, Leaf]) -> Iterator[Place]:
    """All tensors of a model."""
    for name, leaf in leaves.items():
        layout = table[name]
        experts = range(leaf.shape[0]) if layout.by_expert else (None,)
        shape = layout.stored_shape(leaf.shape[1:] if layout.by_expert else leaf.shape)
        for layer, expert in product(leaf.layers or (None,), experts):
            yield Place(layout.tensor.format(layer=layer, expert=expert), shape, name, layer, expert)

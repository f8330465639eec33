"""The parameters of a model by their names, and as the tree that the decoder takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax

from models.config import ModelConfig
from models.decoder import Decoder

__all__ = ["Leaf", "leaf_name", "leaves_of", "shapes_of"]

PyTree = Any


@dataclass(frozen=True)
class Leaf:
    """A parameter in canonical form.

    Attributes:
        shape: without the axis of layers.
        layers: numbers of those that hold it; None for a parameter that no layer has.
    """

    shape: tuple[int, ...]
    layers: tuple[int, ...] | None


def leaf_name(path: tuple[Any, ...]) -> str:
    """The name of a parameter, as `layers.attention.query`, from its path in the tree."""
    return ".".join(part.key for part in path)


@lru_cache(maxsize=16)  # to trace a model takes longer than to read a small one
def shapes_of(config: ModelConfig) -> PyTree:
    """Shapes and dtypes of all parameters, in canonical form."""
    return jax.eval_shape(Decoder(config).init, jax.eval_shape(jax.random.key, 0))


@lru_cache(maxsize=16)
def leaves_of(config: ModelConfig) -> Mapping[str, Leaf]:
    """All parameters by name."""
    holders = Decoder(config).holders
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes_of(config)):
        in_layers = path[0].key == "layers"
        layers = holders[path[1].key] if in_layers else None
        found[leaf_name(path)] = Leaf(leaf.shape[1:] if in_layers else leaf.shape, layers)
    return found

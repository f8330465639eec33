"""Low-rank updates (Hu et al. 2021, LoRA) added to the matrices that they update, for use without them.

Shapes: L layers, I inputs and O outputs of a matrix, R rank of the update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.parameters import LORA_PARAMETERS

__all__ = ["adapted", "merge"]

PyTree = Any


def merge(config: ModelConfig, params: PyTree) -> tuple[ModelConfig, PyTree]:
    """The same model without updates: each is added in float32 and the sum rounded to the matrix's dtype.

    Args:
        params: in canonical form.
    """
    lora = config.lora
    if lora is None:
        return config, params

    def node(tree: PyTree) -> PyTree:
        if not isinstance(tree, dict):
            return tree
        own = {name: node(leaf) for name, leaf in tree.items() if not name.endswith(LORA_PARAMETERS)}
        for name in adapted(tree):
            first, second = (tree[name + end] for end in LORA_PARAMETERS)
            own[name] = _sum(own[name], first, second, lora.alpha / lora.rank)
        return own

    return replace(config, lora=None), params | {"layers": node(params["layers"])}


def adapted(tree: dict[str, Any]) -> Iterator[str]:
    """The names of the matrices in one part of a model that have an update."""
    first, _ = LORA_PARAMETERS
    yield from (name.removesuffix(first) for name in tree if name.endswith(first))


def _sum(matrix: jax.Array, first: jax.Array, second: jax.Array, scale: float) -> jax.Array:
    layers, rank = first.shape[0], first.shape[-1]
    first_LIR = first.reshape(layers, -1, rank).astype(jnp.float32)
    second_LRO = second.reshape(layers, rank, -1).astype(jnp.float32)
    update = jnp.einsum("LIR,LRO->LIO", first_LIR, second_LRO, precision="highest") * scale
    return (matrix.astype(jnp.float32) + update.reshape(matrix.shape)).astype(matrix.dtype)

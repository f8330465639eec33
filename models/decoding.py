"""Feeding tokens to a decoder whose earlier keys and values are in a cache.

Shapes: B rows, S new tokens of each, D d_model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from models.decoder import Batch, Decoder
from models.kv_cache import KvCache, LayerCache
from models.products import matrix_of, rows_of

__all__ = ["DecodingForm", "extend"]

PyTree = Any


class DecodingForm:
    """Parameters as generation reads them: in the compute dtype, and a tree for each layer.

    A step that took layers out of their stack would copy all weights once more.

    Args:
        is_weights_first: matrices are stored for `models.products.weights_first`.
    """

    def __init__(self, decoder: Decoder, is_weights_first: bool):
        self.decoder = decoder
        shapes = jax.eval_shape(decoder.init, jax.eval_shape(jax.random.key, 0))

        def matrix(names: tuple[str, ...], shape: jax.ShapeDtypeStruct) -> _Matrix:
            stacked = names[0] == "layers"
            inputs = _inputs(names[stacked:]) if is_weights_first else 0
            return _Matrix(shape.shape[stacked:], inputs)

        self._matrices = jax.tree.map(matrix, decoder.logical_axes(), shapes, is_leaf=_is_names)

    def shared(self, shared: PyTree) -> PyTree:
        """The form of embedding and head."""
        return self._stored(shared, self._matrices["shared"])

    def layers(self, stacks: Mapping[str, PyTree], at: Sequence[Mapping[str, jax.Array]]) -> list[PyTree]:
        """The form of some layers: of each part that they have, in canonical form, the entries that are their own."""
        return [self._layer(stacks, one) for one in at]

    def _layer(self, stacks: Mapping[str, PyTree], at: Mapping[str, jax.Array]) -> PyTree:
        own = {
            name: jax.tree.map(lambda leaf, at=at[name]: jax.lax.dynamic_index_in_dim(leaf, at, keepdims=False), stack)
            for name, stack in stacks.items()
        }
        return self._stored(own, {name: self._matrices["layers"][name] for name in own})

    def read_shared(self, shared: PyTree) -> PyTree:
        """Embedding and head as the decoder takes them, from their form; free of cost in a product."""
        return _read(shared, self._matrices["shared"])

    def read_layer(self, layer: PyTree) -> PyTree:
        """The same of a layer."""
        return _read(layer, {name: self._matrices["layers"][name] for name in layer})

    def _stored(self, tree: PyTree, matrices: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf, matrix: matrix.stored(leaf), self.decoder.cast(tree), matrices)


@dataclass(frozen=True)
class _Matrix:
    """How a parameter is stored: as it is, or as the matrix from its first dimensions, `inputs` many, to the others."""

    shape: tuple[int, ...]
    inputs: int

    def stored(self, leaf: jax.Array) -> jax.Array:
        return rows_of(leaf, self.inputs) if self.inputs else leaf

    def read(self, leaf: jax.Array) -> jax.Array:
        return matrix_of(leaf, self.shape) if self.inputs else leaf


def _read(tree: PyTree, matrices: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, matrix: matrix.read(leaf), tree, matrices)


def _inputs(names: tuple[str, ...]) -> int:
    """How many dimensions of a parameter with these axes are inputs of a `product`; 0 if it is in none."""
    if names[0] == "vocab" or {"expert", "router"} & set(names):
        return 0
    inputs = 2 if names[1:2] == ("head_dim",) else 1
    return inputs if len(names) > inputs else 0


def _is_names(leaf: Any) -> bool:
    return isinstance(leaf, tuple)


def extend(
    form: DecodingForm, params: PyTree, cache: KvCache, tokens_BS: jax.Array, count_B: jax.Array
) -> tuple[jax.Array, KvCache]:
    """Runs the layers over new tokens, which go into the cache's next S columns; these must not reach beyond the last.

    Args:
        params: in the form, `{"shared": ..., "layers": (...)}`.
        tokens_BS: int32, padded on the left. Only a row without earlier tokens may have fewer than S and go on later.
        count_B: int32, how many of them each row has.

    Returns:
        The residual stream after the last layer [B, S, D], and the cache.
    """
    decoder, (rows, new) = form.decoder, tokens_BS.shape
    start, length_B = cache.column, cache.length_B + count_B
    cache = cache._replace(column=(start + new) % cache.places, length_B=length_B)
    number_S = jnp.arange(new, dtype=jnp.int32)
    place_BS = length_B[:, None] - new + number_S[None]
    segment_BS = (number_S[None] >= new - count_B[:, None]).astype(jnp.int32)
    weights, sequence = jnp.zeros((rows, new), jnp.float32), jnp.zeros((rows,), jnp.int32)
    batch = Batch(tokens_BS, tokens_BS, jnp.maximum(place_BS, 0), segment_BS, weights, sequence)
    context = decoder.prepare(batch)._replace(mask=cache.mask(place_BS, segment_BS))

    @jax.jit  # traced once for all layers of a kind
    def run(layer: PyTree, x_BSD: jax.Array, part: LayerCache, number: jax.Array) -> tuple[jax.Array, LayerCache]:
        return decoder.layer_with_cache(form.read_layer(layer), x_BSD, context, part, number)

    x_BSD = decoder.embed(form.read_shared(params["shared"]), context)
    keys, values = [], []
    for number, layer in enumerate(params["layers"]):
        part = cache.layer(number)._replace(column=start)
        x_BSD, part = run(layer, x_BSD, part, jnp.asarray(number, jnp.int32))
        keys.append(part.keys_BKTH)
        values.append(part.values_BKTV)
    return x_BSD, cache._replace(keys=tuple(keys), values=tuple(values))

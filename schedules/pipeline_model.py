"""What a schedule's program needs of a network: its blocks as pure functions, and their backwards cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from schedules.backward import SplitBlock, split
from schedules.collectives import is_spec, sum_over
from schedules.remat import Remat

__all__ = ["Part", "PipelineModel", "SplitModel", "cotangent", "split_model"]

PyTree = Any


@dataclass(frozen=True)
class PipelineModel:
    """A network as the program needs it: pure functions, `x` being what travels from stage to stage.

    Attributes:
        prepare: `(microbatch, key) -> context`, what the blocks share and nothing differentiates.
        first: `(shared, context) -> x`.
        layer: `(params, x, context, number) -> (x, loss)`, `number` the global layer number (int32 scalar); `loss` is
            what the layer adds to the loss, a float32 scalar, or None where it adds nothing.
        last: `(shared, x, context) -> loss`, a float32 scalar; losses add up over microbatches. With `has_aux` it is
            `-> (loss, aux)`, aux being arrays [sequences, tokens, ...] in any pytree.
        first_part: `(shared, context, part) -> x`, the rank's share of `first`; the shares add up to the whole. Here
            and in `last_part`, leaves of `shared` that are sharded over `pipe` are the rank's shard of them.
        last_part: `(shared, x, context, scale, part) -> (loss, dx, grads)`: the whole loss, not scaled, and the rank's
            shares of the gradients of `scale * loss`, None for a leaf that is not used. With `has_aux` the loss is a
            pair here too.
        trained: whether a parameter is trained, by the last key of its path; one that is not has no gradient, and the
            blocks must not differentiate by it. None trains all.
        has_aux: whether `last` gives more than the loss, which the program collects.
    """

    prepare: Callable[[PyTree, PyTree], PyTree]
    first: Callable[[PyTree, PyTree], jax.Array]
    layer: Callable[[PyTree, jax.Array, PyTree, jax.Array], tuple[jax.Array, jax.Array | None]]
    last: Callable[[PyTree, jax.Array, PyTree], Any]
    first_part: Callable[[PyTree, PyTree, Part], jax.Array] | None = None
    last_part: Callable[[PyTree, jax.Array, PyTree, jax.Array, Part], tuple[Any, jax.Array, PyTree]] | None = None
    trained: Callable[[str], bool] | None = None
    has_aux: bool = False

    def only_trained(self, params: PyTree) -> PyTree:
        """The tree of parameters, or of specs in their place, with None for what is not trained."""
        is_trained = self.trained
        if is_trained is None:
            return params
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if is_trained(path[-1].key) else None, params, is_leaf=is_spec
        )


@dataclass(frozen=True)
class Part:
    """Which part of embedding and head is the rank's, and how the parts come together."""

    index: jax.Array
    count: int

    def sum(self, array: jax.Array) -> jax.Array:
        return sum_over(array, ("pipe",))

    def max(self, array: jax.Array) -> jax.Array:
        return jax.lax.pmax(array, "pipe")


class SplitModel(NamedTuple):
    """The model's three blocks, their backwards cut; `x` is the shape of what travels, `aux` of what `last` gives
    besides the loss.

    `layer` returns what the layer adds to the loss besides, or None; see `cotangent`.
    """

    first: SplitBlock
    layer: SplitBlock
    last: SplitBlock
    x: jax.ShapeDtypeStruct
    aux: PyTree


def cotangent(layer: SplitBlock, dx: Any, scale: Any) -> tuple[Any, Any]:
    """Of what a layer returns: its stream's, and the scale of the loss where it adds to the loss."""
    return dx, scale if layer.outputs > 1 else None


def split_model(
    model: PipelineModel,
    layer: PyTree,
    shared: PyTree,
    microbatch: PyTree,
    key: PyTree,
    remat: Remat,
    *,
    apart: bool = False,
) -> SplitModel:
    """Cuts the backward of every block; arguments may be `jax.ShapeDtypeStruct`s. Remat applies to layers.

    Args:
        apart: recompute layers in an action of its own, R.
    """
    context = jax.eval_shape(model.prepare, microbatch, key)
    x = jax.eval_shape(model.first, shared, context)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return SplitModel(
        split(lambda shared, _, context: model.first(shared, context), shared, (), context, policy="none"),
        split(lambda p, x, aux: model.layer(p, x, *aux), layer, x, (context, number), policy=remat.policy, apart=apart),
        split(model.last, shared, x, context, policy="none", has_aux=model.has_aux),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.eval_shape(model.last, shared, x, context)[1] if model.has_aux else (),
    )

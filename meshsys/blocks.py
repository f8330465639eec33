"""The model's blocks with their backwards cut, and what each of their actions multiplies, moves and holds.

A block is the embedding ("first"), a layer ("layer") or the head ("last"), for one device's sequences and all of what
`tensor` divides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from meshsys.inputs import abstract_batch, abstract_layer, abstract_params
from meshsys.working_set import working_set
from models import Decoder, ModelConfig
from models.attention import on_platform
from models.parameters import trains
from schedules.actions import Kind
from schedules.backward import SplitBlock
from schedules.flops import product_flops, product_traffic
from schedules.pipeline_model import PipelineModel, SplitModel, cotangent, split_model
from schedules.remat import Remat

__all__ = ["BlockAction", "block_actions", "cut_blocks", "pipeline_model", "tensor_parts"]

PyTree = Any


def pipeline_model(decoder: Decoder) -> PipelineModel:
    """The decoder as a schedule's program needs it."""
    blocks = (decoder.prepare, decoder.embed, decoder.layer, decoder.head, decoder.embed_part, decoder.head_part)
    config = decoder.config
    return PipelineModel(*blocks, trained=(lambda name: trains(config, name)) if config.lora else None)


@lru_cache(maxsize=64)  # a search for a mesh asks for the same few over and over
def cut_blocks(
    model: ModelConfig,
    sequences: int,
    length: int,
    remat: Remat,
    apart: bool = False,
    parts: frozenset[str] = frozenset(),
) -> SplitModel:
    """The blocks' backwards, cut under a policy, for `sequences` of `length` tokens; R apart or not.

    Args:
        parts: what the layer has that others have not, see `schedules.program_tables.Way`.
    """
    decoder = Decoder(model)
    params, key = abstract_params(decoder), jax.eval_shape(jax.random.key, 0)
    layer, batch = abstract_layer(decoder, params, parts), abstract_batch(sequences, length)
    with on_platform("cpu"):  # a plan is made before JAX starts, and kernels keep what their like keeps on CPU
        return split_model(pipeline_model(decoder), layer, params["shared"], batch, key, remat, apart=apart)


def tensor_parts(shape: tuple[int, ...], model: ModelConfig, tensor: int) -> int:
    """Into how many parts XLA is expected to divide a value; what could be either counts as whole."""
    if len(shape) >= 4:  # only what has heads has so many dimensions
        return tensor if model.num_kv_heads % tensor == 0 else 1
    divided = (model.d_ff, model.vocab_size) if model.vocab_size % tensor == 0 else (model.d_ff,)
    wide = shape if len(shape) == 2 else shape[-1:] if len(shape) == 3 else ()
    return tensor if any(side in divided and side != model.d_model for side in wide) else 1


@dataclass(frozen=True, eq=False)
class BlockAction:
    """One action of one block.

    Attributes:
        function: with arguments of the shapes `arguments`: weights and context, what waits in slots, and what arrives.
        arrives: leaves of the last, an activation or a gradient.
        hands_on: how many of its first results go to another rank; the others go to slots, or are added to gradients.
    """

    function: Callable
    arguments: tuple
    arrives: int
    hands_on: int

    @cached_property
    def flops(self) -> float:
        return product_flops(self.function, *self.arguments)

    @cached_property
    def traffic(self) -> float:
        """Bytes that its products read and write."""
        return product_traffic(self.function, *self.arguments)

    def peak(self, size: Callable[[Any], int], *, on_tpu: bool) -> int:
        """Bytes in hand at the worst moment.

        A TPU's products write into a slot or add to a gradient, and take bfloat16; on CPU they are calls to a library,
        and a copy follows.
        """
        kept, operand = (self.hands_on, 2) if on_tpu else (None, None)
        return working_set(self.function, *self.arguments, size=size, held=self.arrives, kept=kept, operand=operand)


@lru_cache(maxsize=64)
def block_actions(
    model: ModelConfig,
    sequences: int,
    length: int,
    remat: Remat,
    apart: bool = False,
    parts: frozenset[str] = frozenset(),
) -> Mapping[tuple[str, Kind], BlockAction]:
    """F, I, W and B of each block, and R of layers where it is apart."""
    decoder = Decoder(model)
    blocks = cut_blocks(model, sequences, length, remat, apart, parts)
    params, key = abstract_params(decoder), jax.eval_shape(jax.random.key, 0)
    context = jax.eval_shape(decoder.prepare, abstract_batch(sequences, length), key)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    scale, layer = jax.ShapeDtypeStruct((), jnp.float32), abstract_layer(decoder, params, parts)
    found: dict[tuple[str, Kind], BlockAction] = {}
    for name, block, own, x, aux, dy in (
        ("first", blocks.first, params["shared"], (), context, blocks.x),
        ("layer", blocks.layer, layer, blocks.x, (context, number), cotangent(blocks.layer, blocks.x, scale)),
        ("last", blocks.last, params["shared"], blocks.x, context, scale),
    ):
        found |= {(name, kind): action for kind, action in _of_block(block, own, x, aux, dy).items()}
    return found


def _of_block(block: SplitBlock, params: PyTree, x: PyTree, aux: PyTree, dy: PyTree) -> dict[Kind, BlockAction]:
    def shapes(crossings: Any) -> list[Any]:
        return [jax.ShapeDtypeStruct(crossing.aval.shape, crossing.aval.dtype) for crossing in crossings]

    def input_gradient(params: PyTree, aux: PyTree, left: list, again: list, dy: PyTree) -> PyTree:
        return block.input_gradient(params, aux, left, dy, again)

    def weight_gradient(params: PyTree, aux: PyTree, left: list, again: list, stash: list, _: PyTree) -> PyTree:
        return block.weight_gradient(params, aux, left, stash, again)

    def backward(params: PyTree, aux: PyTree, left: list, again: list, dy: PyTree) -> PyTree:
        dx, stash = block.input_gradient(params, aux, left, dy, again)
        return dx, block.weight_gradient(params, aux, left, stash, again)

    left, again, stash = shapes(block.residuals), shapes(block.recomputed), shapes(block.stash)

    def action(function: Callable, *waiting: PyTree, arrives: PyTree = (), hands_on: PyTree = ()) -> BlockAction:
        counts = (len(jax.tree.leaves(tree)) for tree in (arrives, hands_on))
        return BlockAction(function, (params, aux, *waiting, arrives), *counts)

    found = {
        Kind.F: action(lambda params, aux, x: block.forward(params, x, aux), arrives=x, hands_on=dy),
        Kind.I: action(input_gradient, left, again, arrives=dy, hands_on=x),
        Kind.W: action(weight_gradient, left, again, stash),
        Kind.B: action(backward, left, again, arrives=dy, hands_on=x),
    }
    if again:
        found[Kind.R] = action(lambda params, aux, left, _: block.recompute(params, aux, left), left)
    return found

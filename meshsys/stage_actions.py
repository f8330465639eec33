"""The actions of one stage as functions of their own: what is measured alone is what a schedule's branches run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from schedules.backward import SplitBlock
from schedules.pipeline_model import PipelineModel, SplitModel, cotangent

__all__ = ["Job", "StageActions"]

PyTree = Any


@dataclass(frozen=True)
class Job:
    """A function and arguments that fit it, arrays or `jax.ShapeDtypeStruct`s; `options` are the compiler's."""

    function: Callable
    arguments: tuple
    options: dict[str, bool] | None = None

    def compile(self) -> Any:
        return jax.jit(self.function, compiler_options=self.options).lower(*self.arguments).compile()


@dataclass(frozen=True)
class StageActions:
    """F, R, I, W and B of a stage.

    Every action makes the microbatch's context itself, as in a schedule, and returns all that it computes. `weights` is
    `{"shared": ..., "layers": ...}`, where the stage's layers are a tuple, or without `unroll` stacked, [count, ...].

    Attributes:
        blocks: the model's blocks, cut for the microbatch's shape; embedding and head are taken from them.
        layers: the stage's layers, cut; the same for all unless they are separate code.
        first: whether it has the embedding.
        last: whether it has the head; its output is then the loss.
        key: of the model's randomness.
        unroll: whether layers are separate code or a scan, as in `schedules.program.Program`.
    """

    model: PipelineModel
    blocks: SplitModel
    layers: tuple[SplitBlock, ...]
    first: bool
    last: bool
    key: PyTree
    unroll: bool = True

    def jobs(self, weights: PyTree, microbatch: PyTree) -> dict[str, Job]:
        """Each action with arguments: what one action leaves for the next is given by its shapes."""
        x: PyTree = () if self.first else self.blocks.x
        y, left = jax.eval_shape(self.forward, weights, x, microbatch)
        again = jax.eval_shape(self.recompute, weights, microbatch, left)
        _, stash = jax.eval_shape(self.input_gradient, weights, microbatch, left, again, y)
        return {
            "F": Job(self.forward, (weights, x, microbatch)),
            "R": Job(self.recompute, (weights, microbatch, left)),
            "I": Job(self.input_gradient, (weights, microbatch, left, again, y)),
            "W": Job(self.weight_gradient, (weights, microbatch, left, again, stash)),
            "B": Job(self.backward, (weights, microbatch, left, again, y)),
        }

    def forward(self, weights: PyTree, x: PyTree, microbatch: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the output and the residuals; a first stage's `x` is `()`."""
        context, left = self._context(microbatch), dict[str, Any]()
        if self.first:
            x, left["first"] = self.blocks.first.forward(weights["shared"], (), context)

        def layer(block: SplitBlock, x: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            (x, loss), residuals = block.forward(params, x, self._aux(context))
            return x, (residuals, loss)

        x, made = self._over_layers(layer, x, weights["layers"])
        left["layers"] = tuple(one[0] for one in made) if self.unroll else made[0]
        if self.last:
            x, left["last"] = self.blocks.last.forward(weights["shared"], x, context)
        return x, left

    def recompute(self, weights: PyTree, microbatch: PyTree, left: PyTree) -> PyTree:
        """Returns, for each layer, the recomputed values; none unless the blocks have R apart."""
        context = self._context(microbatch)

        def layer(block: SplitBlock, _: PyTree, params: PyTree, left: PyTree) -> tuple[PyTree, PyTree]:
            return (), block.recompute(params, self._aux(context), left)

        return self._over_layers(layer, (), weights["layers"], left["layers"])[1]

    def input_gradient(
        self, weights: PyTree, microbatch: PyTree, left: PyTree, again: PyTree, dy: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Returns the gradient of the input and the stash for W; `again` is what R returned."""
        return self._backward(
            weights, microbatch, left, again, dy, lambda block, params, aux, left, stash, again: stash
        )

    def backward(
        self, weights: PyTree, microbatch: PyTree, left: PyTree, again: PyTree, dy: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Returns the gradients of the input and of the weights."""
        return self._backward(weights, microbatch, left, again, dy, SplitBlock.weight_gradient)

    def weight_gradient(
        self, weights: PyTree, microbatch: PyTree, left: PyTree, again: PyTree, stash: PyTree
    ) -> PyTree:
        """Returns the gradients of the weights, a tree for each block that the stage has."""
        context = self._context(microbatch)

        def layer(block: SplitBlock, _: PyTree, *one: PyTree) -> tuple[PyTree, PyTree]:
            params, left, again, stash = one
            return (), block.weight_gradient(params, self._aux(context), left, stash, again)

        _, layers = self._over_layers(layer, (), weights["layers"], left["layers"], again, stash["layers"])
        grads = {"layers": layers}
        for name, has, block in (("first", self.first, self.blocks.first), ("last", self.last, self.blocks.last)):
            if has:
                grads[name] = block.weight_gradient(weights["shared"], context, left[name], stash[name])
        return grads

    def _backward(
        self, weights: PyTree, microbatch: PyTree, left: PyTree, again: PyTree, dy: PyTree, finish: Callable
    ) -> tuple[PyTree, PyTree]:
        context, found = self._context(microbatch), {}

        def one(block: SplitBlock, dy: PyTree, params: PyTree, aux: PyTree, left: PyTree, again: PyTree = ()) -> tuple:
            dx, stash = block.input_gradient(params, aux, left, dy, again)
            return dx, finish(block, params, aux, left, stash, again)

        def layer(block: SplitBlock, dy: PyTree, params: PyTree, left: PyTree, again: PyTree) -> tuple[PyTree, PyTree]:
            dy = cotangent(block, dy, jnp.ones((), jnp.float32))
            return one(block, dy, params, self._aux(context), left, again)

        if self.last:
            dy, found["last"] = one(self.blocks.last, dy, weights["shared"], context, left["last"])
        dy, found["layers"] = self._over_layers(layer, dy, weights["layers"], left["layers"], again, reverse=True)
        if self.first:
            dy, found["first"] = one(self.blocks.first, dy, weights["shared"], context, left["first"])
        return dy, found

    def _context(self, microbatch: PyTree) -> PyTree:
        return self.model.prepare(microbatch, self.key)

    def _aux(self, context: PyTree) -> tuple[PyTree, jax.Array]:
        return context, jnp.zeros((), jnp.int32)  # the layer's number, which only seeds its dropout

    def _over_layers(self, body: Callable, carry: PyTree, *given: PyTree, reverse: bool = False) -> tuple:
        """`carry, out = body(block, carry, *part of given)` for each layer; returns the carry and all that came out."""
        count = len(self.layers)
        if not self.unroll and count:
            each = partial(body, self.layers[0])
            return jax.lax.scan(lambda carry, one: each(carry, *one), carry, given, count, reverse=reverse)
        found: list[PyTree] = [None] * count
        for place in reversed(range(count)) if reverse else range(count):
            carry, found[place] = body(self.layers[place], carry, *(part[place] for part in given))
        return carry, tuple(found)

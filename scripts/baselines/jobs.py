"""The programs that are measured, each with arguments that fit it: one model, one batch, three ways to run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import SAVEABLE_NAMES, Batch, Decoder, ModelConfig
from schedules.actions import split_backward
from schedules.families import make
from schedules.program import PipelineModel, Program, split_model
from schedules.remat import Remat
from scripts.baselines.accumulate import accumulate
from scripts.baselines.autodiff_scan import autodiff_scan

__all__ = ["Job", "Size", "accumulate_job", "autodiff_job", "schedule_job", "stage_jobs"]

PyTree = Any


@dataclass(frozen=True)
class Size:
    """A model, a microbatch of `sequences` of `length` tokens, and the number of ranks."""

    model: ModelConfig
    sequences: int
    length: int
    ranks: int = 4

    def __str__(self) -> str:
        m = self.model
        return (
            f"{m.layers} layers, d_model {m.d_model}, d_ff {m.d_ff}, {m.heads} heads ({m.num_kv_heads} key-value), "
            f"vocabulary {m.vocab_size}, {m.dtype}, microbatch {self.sequences} x {self.length}, P={self.ranks}"
        )

    @property
    def mesh(self) -> Mesh:
        return Mesh(np.array(jax.devices()[: self.ranks]), ("pipe",))


@dataclass(frozen=True)
class Job:
    """A function and its arguments on their devices."""

    function: Callable
    arguments: tuple

    def compile(self) -> Any:
        return jax.jit(self.function).lower(*self.arguments).compile()


def schedule_job(
    size: Size,
    microbatches: int,
    schedule: str = "1f1b",
    *,
    remat: str = "none",
    split: bool = True,
    unroll: bool | None = None,
) -> Job:
    """A compiled schedule; `split` cuts its backwards into I and W."""
    actions = make(schedule, ranks=size.ranks, microbatches=microbatches)
    program = Program(
        split_backward(actions) if split else actions,
        size.model.layers,
        Remat.parse(remat, SAVEABLE_NAMES),
        unroll=unroll,
    )
    params, batch, scale = _values(size, microbatches)
    params = {"shared": params["shared"], "layers": program.layout.to_stages(params["layers"])}
    specs = {
        "shared": jax.tree.map(lambda _: PartitionSpec(), params["shared"]),
        "layers": jax.tree.map(lambda _: PartitionSpec("pipe"), params["layers"]),
    }
    function = program.value_and_grad(_pipeline_model(Decoder(size.model)), size.mesh, specs, batch_axes=())
    rows = jax.device_put(program.rows(), NamedSharding(size.mesh, PartitionSpec(None, "pipe")))
    common = _everywhere(size, (batch, scale, jax.random.key(0)))
    return Job(function, (_over_pipe(size, params), *common, rows))


def autodiff_job(size: Size, microbatches: int, *, remat: str = "none", unroll: bool = True) -> Job:
    """Autodiff of a scan over the same ranks."""
    params, batch, scale = _values(size, microbatches)
    staged = jax.tree.map(lambda a: a.reshape(size.ranks, -1, *a.shape[1:]), params["layers"])
    function = autodiff_scan(Decoder(size.model), size.mesh, remat=remat, unroll=unroll)
    params = {"shared": params["shared"], "layers": staged}
    return Job(function, (_over_pipe(size, params), *_everywhere(size, (batch, scale))))


def accumulate_job(size: Size, microbatches: int, *, remat: str = "none", unroll: bool = True) -> Job:
    """Gradient accumulation on one device."""
    values = jax.device_put(_values(size, microbatches), jax.devices()[0])
    return Job(accumulate(Decoder(size.model), remat=remat, unroll=unroll), values)


def stage_jobs(size: Size, kind: Literal["first", "middle", "last"], remat: str) -> dict[str, Job]:
    """F, I and W of one stage, each a program of its own, and `value_and_grad` of the same stage.

    The stage has `layers / ranks` layers, the first also the embedding, the last also the head. Every job makes
    the microbatch's context itself, as the actions of a schedule do, and returns all that it computes.
    """
    decoder, policy = Decoder(size.model), Remat.parse(remat, SAVEABLE_NAMES)
    params, batch, _ = _values(size, 1)
    microbatch = jax.tree.map(lambda a: a[0], batch)
    shared, number, key = params["shared"], jnp.zeros((), jnp.int32), jax.random.key(0)
    layers = [jax.tree.map(lambda a, i=i: a[i], params["layers"]) for i in range(size.model.layers // size.ranks)]
    blocks = split_model(_pipeline_model(decoder), layers[0], shared, microbatch, key, policy)
    # The stage as a list of its blocks: (cut block, parameters, whether the layer number is an argument).
    parts = [(blocks.layer, layer, True) for layer in layers]
    if kind == "first":
        parts.insert(0, (blocks.first, shared, False))
    if kind == "last":
        parts.append((blocks.last, shared, False))
    weights = [part[1] for part in parts]

    def context(microbatch: Batch) -> list[PyTree]:
        shared_by_all = decoder.prepare(microbatch, key)
        return [(shared_by_all, number) if numbered else shared_by_all for _, _, numbered in parts]

    def forward(weights: list, x: PyTree, microbatch: Batch) -> tuple[PyTree, list]:
        kept = []
        for (block, _, _), one, aux in zip(parts, weights, context(microbatch), strict=True):
            x, residuals = block.forward(one, x, aux)
            kept.append(residuals)
        return x, kept

    def input_gradient(weights: list, microbatch: Batch, kept: list, dy: PyTree) -> tuple[PyTree, list]:
        stashes: list = []
        backwards = list(zip(parts, weights, context(microbatch), kept, strict=True))[::-1]
        for (block, _, _), one, aux, residuals in backwards:
            dy, stash = block.input_gradient(one, aux, residuals, dy)
            stashes.insert(0, stash)
        return dy, stashes

    def weight_gradient(weights: list, microbatch: Batch, kept: list, stashes: list) -> list:
        together = zip(parts, weights, context(microbatch), kept, stashes, strict=True)
        return [
            block.weight_gradient(one, aux, residuals, stash) for (block, _, _), one, aux, residuals, stash in together
        ]

    keep: Any = policy.policy
    layer = decoder.layer if remat == "none" else jax.checkpoint(decoder.layer, policy=keep)

    def both(weights: list, x: PyTree, microbatch: Batch, dy: PyTree) -> PyTree:
        def stage(weights: list, x: PyTree) -> PyTree:
            shared_by_all = decoder.prepare(microbatch, key)
            for position, ((_, _, numbered), one) in enumerate(zip(parts, weights, strict=True)):
                if numbered:
                    x = layer(one, x, shared_by_all, number)
                else:
                    x = decoder.head(one, x, shared_by_all) if position else decoder.embed(one, shared_by_all)
            return x

        y, backward = jax.vjp(stage, weights, x)
        return y, backward(dy)

    x = () if kind == "first" else jnp.zeros(blocks.x.shape, blocks.x.dtype)
    y, kept = jax.eval_shape(forward, weights, x, microbatch)
    _, stashes = jax.eval_shape(input_gradient, weights, microbatch, kept, y)
    return {
        "F": Job(forward, (weights, x, microbatch)),
        "I": Job(input_gradient, (weights, microbatch, kept, y)),
        "W": Job(weight_gradient, (weights, microbatch, kept, stashes)),
        "value_and_grad": Job(both, (weights, x, microbatch, y)),
    }


def _pipeline_model(decoder: Decoder) -> PipelineModel:
    return PipelineModel(decoder.prepare, decoder.embed, decoder.layer, decoder.head)


@cache
def _values(size: Size, microbatches: int) -> tuple[PyTree, Batch, jax.Array]:
    """Parameters with layers [L, ...], a batch [M, sequences, ...], and one over the number of its tokens."""
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(Decoder(size.model).init, jax.random.key(0))
    # Any values of a sane size do; compiling the initialisers would take longer than most benchmarks.
    params = jax.tree.map(lambda a: 0.05 * random.standard_normal(a.shape, np.float32), shapes)
    shape = microbatches, size.sequences, size.length
    tokens, targets = jnp.asarray(random.integers(0, size.model.vocab_size, (2, *shape), np.int32))
    batch = Batch(
        tokens,
        targets,
        positions=jnp.broadcast_to(jnp.arange(size.length, dtype=jnp.int32), shape),
        segment_ids=jnp.ones(shape, jnp.int32),
        weights=jnp.ones(shape, jnp.float32),
        sequence=jnp.arange(microbatches * size.sequences, dtype=jnp.int32).reshape(shape[:2]),
    )
    return params, batch, jnp.float32(1 / tokens.size)


def _everywhere(size: Size, tree: PyTree) -> PyTree:
    return jax.device_put(tree, NamedSharding(size.mesh, PartitionSpec()))


def _over_pipe(size: Size, params: PyTree) -> PyTree:
    layers = jax.device_put(params["layers"], NamedSharding(size.mesh, PartitionSpec("pipe")))
    return {"shared": _everywhere(size, params["shared"]), "layers": layers}

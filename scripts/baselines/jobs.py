"""The programs that are measured, each with arguments that fit it: one model, one batch, three ways to run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshsys.assemble import Assembly
from meshsys.blocks import pipeline_model
from meshsys.inputs import random_batch
from meshsys.sharding import BATCH_AXES
from meshsys.stage_actions import Job, StageActions
from meshsys.step import Step
from models import SAVEABLE_NAMES, Batch, Decoder, ModelConfig
from schedules.actions import Schedule, split_backward
from schedules.families import make
from schedules.pipeline_model import split_model
from schedules.program import Program, compiler_options
from schedules.remat import Remat
from scripts.baselines.accumulate import accumulate
from scripts.baselines.autodiff_scan import autodiff_scan

__all__ = ["Job", "Size", "accumulate_job", "autodiff_job", "autodiff_step", "schedule_job", "stage_jobs"]

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


def schedule_job(
    size: Size,
    microbatches: int,
    schedule: str | Schedule = "1f1b",
    *,
    remat: str | Sequence[Remat] = "none",
    split: bool = True,
    unroll: bool | None = None,
) -> Job:
    """A compiled schedule, a family's, whose backwards `split` cuts into I and W, or one that is given."""
    if isinstance(schedule, str):
        made = make(schedule, ranks=size.ranks, microbatches=microbatches)
        schedule = split_backward(made) if split else made
    policy = Remat.parse(remat, SAVEABLE_NAMES) if isinstance(remat, str) else remat
    program = Program(schedule, size.model.layers, policy, unroll=unroll)
    params, batch, scale = _values(size, microbatches)
    params = {"shared": params["shared"], "layers": program.layout.to_stages(params["layers"])}
    specs = {
        "shared": jax.tree.map(lambda _: PartitionSpec(), params["shared"]),
        "layers": jax.tree.map(lambda _: PartitionSpec("pipe"), params["layers"]),
    }
    function = program.value_and_grad(pipeline_model(Decoder(size.model)), size.mesh, specs, batch_axes=())
    rows = jax.device_put(program.rows(), NamedSharding(size.mesh, PartitionSpec(None, "pipe")))
    common = _everywhere(size, (batch, scale, jax.random.key(0)))
    return Job(function, (_over_pipe(size, params), *common, rows), compiler_options(size.mesh))


def autodiff_job(size: Size, microbatches: int, *, remat: str = "none", unroll: bool = True) -> Job:
    """Autodiff of a scan over the same ranks."""
    params, batch, scale = _values(size, microbatches)
    staged = jax.tree.map(lambda a: a.reshape(size.ranks, -1, *a.shape[1:]), params["layers"])
    function = autodiff_scan(Decoder(size.model), size.mesh, remat=remat, unroll=unroll)
    params = {"shared": params["shared"], "layers": staged}
    return Job(function, (_over_pipe(size, params), *_everywhere(size, (batch, scale))))


def autodiff_step(assembly: Assembly, mesh: Mesh, *, unroll: bool = False) -> Step:
    """The step of a configuration with its gradients by autodiff of a scan: one chunk a rank, remat none or full."""
    decoder, remat = assembly.decoder, assembly.config.pipeline.remat
    gradients = autodiff_scan(decoder, mesh, remat=remat, unroll=unroll, batch_axes=BATCH_AXES)

    def value_and_grad(
        params: PyTree, batch: Batch, scale: jax.Array, key: PyTree, rows: PyTree
    ) -> tuple[jax.Array, PyTree]:
        whole = params | {"layers": jax.tree.map(lambda a: a[:, 0], params["layers"])}
        loss, grads = gradients(whole, batch, scale)
        grads = grads | {"layers": jax.tree.map(lambda a: a[:, None], grads["layers"])}
        return loss, jax.lax.with_sharding_constraint(grads, step.shardings.params)

    step = Step(assembly, mesh, value_and_grad)
    return step


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
    count = size.model.layers // size.ranks
    layers = tuple(jax.tree.map(lambda a, i=i: a[i], params["layers"]) for i in range(count))
    weights = {"shared": shared, "layers": layers}
    model = pipeline_model(decoder)
    blocks = split_model(model, layers[0], shared, microbatch, key, policy)
    first, last = kind == "first", kind == "last"
    jobs = StageActions(model, blocks, (blocks.layer,) * count, first, last, key).jobs(weights, microbatch)

    keep: Any = policy.policy
    layer = decoder.layer if remat == "none" else jax.checkpoint(decoder.layer, policy=keep)

    def both(weights: dict, x: PyTree, microbatch: Batch, dy: PyTree) -> PyTree:
        def stage(weights: dict, x: PyTree) -> PyTree:
            shared_by_all = decoder.prepare(microbatch, key)
            if first:
                x = decoder.embed(weights["shared"], shared_by_all)
            for one in weights["layers"]:
                x, _ = layer(one, x, shared_by_all, number)
            return decoder.head(weights["shared"], x, shared_by_all) if last else x

        y, backward = jax.vjp(stage, weights, x)
        return y, backward(dy)

    *_, y = jobs["I"].arguments
    return {name: jobs[name] for name in "FIW"} | {"value_and_grad": Job(both, (*jobs["F"].arguments, y))}


@cache
def _values(size: Size, microbatches: int) -> tuple[PyTree, Batch, jax.Array]:
    """Parameters with layers [L, ...], a batch [M, sequences, ...], and one over the number of its tokens."""
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(Decoder(size.model).init, jax.random.key(0))
    # Any values of a sane size do; compiling the initialisers would take longer than most benchmarks.
    params = jax.tree.map(lambda a: 0.05 * random.standard_normal(a.shape, np.float32), shapes)
    batch = random_batch(size.model.vocab_size, microbatches, size.sequences, size.length)
    return params, batch, jnp.float32(1 / batch.tokens.size)


def _everywhere(size: Size, tree: PyTree) -> PyTree:
    return jax.device_put(tree, NamedSharding(size.mesh, PartitionSpec()))


def _over_pipe(size: Size, params: PyTree) -> PyTree:
    layers = jax.device_put(params["layers"], NamedSharding(size.mesh, PartitionSpec("pipe")))
    return {"shared": _everywhere(size, params["shared"]), "layers": layers}

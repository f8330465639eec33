"""A schedule compiled into one SPMD program that returns the loss and every gradient.

The program is a `lax.scan` over the ticks of a `TickTable` inside `shard_map`. In each tick a rank reads its row of
the table, runs one branch of a `lax.switch` (a kind of action for a kind of stage, or nothing), and the outputs
travel by one `ppermute` for each distance between successive stages. The table is an input array: the order of the
actions and the number of microbatches are data, not code.

Mesh axes: `pipe`, the batch axes and the context axis are manual, so weight gradients add up on each device and are
reduced once a step; every other axis (tensor) is left to XLA.

Shapes: P ranks, V chunks a rank, J layers a chunk, M microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from schedules.actions import Schedule, ScheduleError
from schedules.collectives import is_spec, manual_part, sum_over
from schedules.pipeline_model import PipelineModel
from schedules.program_tables import ProgramTables
from schedules.rank_step import RankStep
from schedules.remat import Remat

__all__ = ["Program", "compiler_options"]

PyTree = Any


def compiler_options(mesh: Mesh) -> dict[str, bool] | None:
    """For `jax.jit` of a program's functions.

    On CPU, XLA before jax 0.12 does not look into the branches of a tick by itself, and copies every buffer in each.
    """
    old = jax.__version_info__ < (0, 12) and mesh.devices.flat[0].platform == "cpu"
    return {"xla_cpu_copy_insertion_use_region_analysis": True} if old else None


class Program(ProgramTables):
    """One schedule for one number of layers; `value_and_grad` makes the function that runs it.

    Args:
        poison: fill buffers and the outputs of idle ticks with NaN, so that a value read from the wrong
            slot cannot go unnoticed.

    The other arguments are those of `ProgramTables`.
    """

    def __init__(
        self,
        schedule: Schedule,
        layers: int,
        remat: Remat | Sequence[Remat],
        *,
        unroll: bool | None = None,
        vocab_parallel: bool = False,
        holders: Mapping[str, tuple[int, ...]] | None = None,
        poison: bool = False,
    ):
        super().__init__(schedule, layers, remat, unroll=unroll, vocab_parallel=vocab_parallel, holders=holders)
        self._poison = poison

    def value_and_grad(
        self,
        model: PipelineModel,
        mesh: Mesh,
        specs: Mapping[str, PyTree],
        *,
        batch_axes: Sequence[str] = ("data", "fsdp"),
        context_axis: str | None = None,
        keep: Sequence[str] = (),
        gather: str = "step",
    ) -> Callable[[PyTree, PyTree, jax.Array, PyTree, PyTree], tuple[Any, PyTree]]:
        """The function `(params, batch, scale, key, rows) -> (loss, grads)`.

        Args:
            specs: `PartitionSpec`s of the parameters {"shared": ..., "layers": ...}; layers are [P, V, J, ...] and
                lead with `pipe`.
            batch_axes: mesh axes over which the sequences of a microbatch are divided.
            context_axis: mesh axis over which every sequence is divided; the model's blocks know of it.
            keep: batch axes over which layers stay sharded while they run (experts), as the model's blocks expect.
            gather: when weights that are sharded over a batch axis are gathered: once a `step`, or in every
                `tick` for the layers that run in it (less memory, more traffic).

        With `model.has_aux` the function returns `((loss, aux), grads)`, as `jax.value_and_grad` does; `aux` is what
        the head gives besides, [M, sequences, tokens, ...].

        In the function's arguments, `batch` leaves are [M, sequences, ...]; `scale` (float32 scalar) multiplies the
        loss and its gradients; `rows` is `self.rows()`. Gradients are sharded as the parameters are, and added up in
        float32 at least; None for what the model does not train.
        """
        if self.period:
            raise ScheduleError("a schedule without a flush hands what is in flight to the next step; use `stream`")
        shards = _Shards(mesh, specs, tuple(batch_axes), context_axis)
        rank_step = self._rank_step(model, shards, keep, gather)
        trained = model.only_trained(shards.params)

        def body(
            params: PyTree, batch: PyTree, scale: jax.Array, key: PyTree, rows: PyTree
        ) -> tuple[tuple[jax.Array, PyTree], PyTree]:
            run = rank_step([params], batch, scale, key)
            loss, grads, state = run(rows, run.blank())
            return shards.whole(loss, state["aux"]), grads

        def function(params: PyTree, batch: PyTree, scale: jax.Array, key: PyTree, rows: PyTree) -> tuple[Any, PyTree]:
            in_specs = (shards.params, *shards.inputs(batch, key), shards.rows(rows))
            mapped = shards.map(body, in_specs, ((PartitionSpec(), shards.tokens), trained))
            (loss, aux), grads = mapped(params, batch, scale, key, rows)
            return (loss, aux) if model.has_aux else loss, shards.constrain(grads, model)

        return function

    def value(
        self,
        model: PipelineModel,
        mesh: Mesh,
        specs: Mapping[str, PyTree],
        *,
        batch_axes: Sequence[str] = ("data", "fsdp"),
        context_axis: str | None = None,
        keep: Sequence[str] = (),
        gather: str = "step",
    ) -> Callable[[PyTree, PyTree, PyTree, PyTree], tuple[jax.Array, PyTree]]:
        """The function `(params, batch, key, rows) -> (loss, aux)`, for a schedule of forwards alone and a model that
        has `aux`; see `value_and_grad`."""
        if self.has_backward or not model.has_aux:
            raise ScheduleError("the value alone is of a schedule of forwards, and of a model that gives more")
        shards = _Shards(mesh, specs, tuple(batch_axes), context_axis)
        rank_step = self._rank_step(model, shards, keep, gather)

        def body(params: PyTree, batch: PyTree, scale: jax.Array, key: PyTree, rows: PyTree) -> tuple:
            run = rank_step([params], batch, scale, key)
            loss, _, state = run(rows, run.blank())
            return shards.whole(loss, state["aux"])

        def function(params: PyTree, batch: PyTree, key: PyTree, rows: PyTree) -> tuple[jax.Array, PyTree]:
            in_specs = (shards.params, *shards.inputs(batch, key), shards.rows(rows))
            mapped = shards.map(body, in_specs, (PartitionSpec(), shards.tokens))
            return mapped(params, batch, jnp.ones((), jnp.float32), key, rows)

        return function

    def stream(
        self,
        model: PipelineModel,
        mesh: Mesh,
        specs: Mapping[str, PyTree],
        *,
        batch_axes: Sequence[str] = ("data", "fsdp"),
        context_axis: str | None = None,
        keep: Sequence[str] = (),
        gather: str = "step",
    ) -> tuple[Callable[..., PyTree], Callable[..., tuple[jax.Array, PyTree, PyTree]]]:
        """For a schedule without a flush: `start` and `step`, whose arguments are those of `value_and_grad`.

        `start(params, batch, scale, key) -> carry` gives what is in flight before the first step: nothing.
        `step(params, batch, scale, key, rows, carry) -> (loss, grads, carry)` runs one step of the stream and returns
        the loss and the gradients of the *step before*, which this one completes.

        Here `params` is a list of the schedule's `versions`, the newest last; `batch` leaves are [2 M, sequences, ...],
        the step before's and this one's; `scale` is [2]; `key` has a leading axis of 2.
        """
        shards = _Shards(mesh, specs, tuple(batch_axes), context_axis)
        rank_step = self._rank_step(model, shards, keep, gather)
        trained = model.only_trained(shards.params)
        versions = [shards.params] * self.versions

        def begin(params: PyTree, batch: PyTree, scale: jax.Array, key: PyTree) -> PyTree:
            return jax.tree.map(lambda a: a[None], rank_step(params, batch, scale, key).blank())

        def body(
            params: PyTree, batch: PyTree, scale: jax.Array, key: PyTree, rows: PyTree, carry: PyTree
        ) -> tuple[jax.Array, PyTree, PyTree]:
            carry = jax.tree.map(lambda a: a[0], carry)
            loss, grads, carry = rank_step(params, batch, scale, key)(rows, carry)
            return sum_over(loss, shards.manual), grads, jax.tree.map(lambda a: a[None], carry)

        def start(params: PyTree, batch: PyTree, scale: jax.Array, key: PyTree) -> PyTree:
            mapped = shards.map(begin, (versions, *shards.inputs(batch, key)), shards.each_device)
            return mapped(params, batch, scale, key)

        def step(
            params: PyTree, batch: PyTree, scale: jax.Array, key: PyTree, rows: PyTree, carry: PyTree
        ) -> tuple[jax.Array, PyTree, PyTree]:
            in_specs = (versions, *shards.inputs(batch, key), shards.rows(rows), shards.each_device)
            mapped = shards.map(body, in_specs, (PartitionSpec(), trained, shards.each_device))
            loss, grads, carry = mapped(params, batch, scale, key, rows, carry)
            return loss, shards.constrain(grads, model), carry

        return start, step

    def _rank_step(
        self, model: PipelineModel, shards: _Shards, keep: Sequence[str], gather: str
    ) -> Callable[..., RankStep]:
        return partial(
            RankStep,
            self,
            model,
            specs=shards.specs,
            sum_axes=shards.manual[1:],
            keep=keep,
            each_tick=gather == "tick",
            poison=self._poison,
        )


@dataclass(frozen=True)
class _Shards:
    """What of a step's arrays each device has: `pipe` and the batch axes are manual, the others XLA's."""

    mesh: Mesh
    specs: Mapping[str, PyTree]
    batch_axes: tuple[str, ...]
    context_axis: str | None

    @property
    def manual(self) -> tuple[str, ...]:
        return ("pipe", *self.batch_axes, *((self.context_axis,) if self.context_axis else ()))

    @property
    def params(self) -> PyTree:
        return jax.tree.map(partial(manual_part, manual=self.manual), dict(self.specs), is_leaf=is_spec)

    @property
    def each_device(self) -> Any:
        """Of arrays whose leading axis has an entry for every device."""
        return PartitionSpec(self.manual)

    def inputs(self, batch: PyTree, key: PyTree) -> tuple[PyTree, PartitionSpec, PyTree]:
        """Of a batch, the scale and the key."""
        whole = PartitionSpec(None, self.batch_axes)
        sequences = jax.tree.map(lambda leaf: self.tokens if leaf.ndim > 2 else whole, batch)
        return sequences, PartitionSpec(), jax.tree.map(lambda _: PartitionSpec(), key)

    @property
    def tokens(self) -> PartitionSpec:
        """Of arrays [M, sequences, tokens, ...]."""
        return PartitionSpec(None, self.batch_axes, self.context_axis)

    def whole(self, loss: jax.Array, aux: PyTree) -> tuple[jax.Array, PyTree]:
        """The sum of all devices' losses, and what the heads of some ranks gave, on all ranks."""
        return sum_over(loss, self.manual), jax.tree.map(lambda leaf: sum_over(leaf, ("pipe",)), aux)

    def rows(self, rows: PyTree) -> PyTree:
        return jax.tree.map(lambda _: PartitionSpec(None, "pipe"), rows)

    def map(self, body: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.manual),
            check_vma=False,
        )

    def constrain(self, grads: PyTree, model: PipelineModel) -> PyTree:
        """Gradients sharded as the parameters are, over XLA's axes too."""
        specs = model.only_trained(dict(self.specs))
        shardings = jax.tree.map(partial(NamedSharding, self.mesh), specs, is_leaf=is_spec)
        return jax.lax.with_sharding_constraint(grads, shardings)

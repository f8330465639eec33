"""A schedule compiled into one SPMD program that returns the loss and every gradient.

The program is a `lax.scan` over the ticks of a `TickTable` inside `shard_map`. In each tick a rank reads its row of
the table, runs one branch of a `lax.switch` (a kind of action for a kind of stage, or nothing), and the outputs
travel by one `ppermute` for each distance between successive stages. The table is an input array: the order of the
actions and the number of microbatches are data, not code.

Mesh axes: `pipe` and the batch axes are manual, so weight gradients add up on each device and are reduced once
a step; every other axis (tensor) is left to XLA.

Shapes: T ticks, P ranks, V chunks a rank, J layers a chunk, M microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from schedules.actions import Kind, Schedule, ScheduleError
from schedules.backward import SplitBlock, split
from schedules.borrow import borrow, give_back
from schedules.buffers import LIFETIMES, RECOMPUTE_LIFETIMES, Buffers, blank, get, put
from schedules.collectives import gather, is_spec, manual_part, reduce_gradient, scatter, sum_over, without
from schedules.remat import Remat
from schedules.slots import Lifetime, TickTable, build_table
from schedules.stages import StageLayout
from schedules.validate import recomputing_stages

__all__ = ["Part", "PipelineModel", "Program", "SplitModel", "split_model"]

PyTree = Any


@dataclass(frozen=True)
class PipelineModel:
    """A network as the program needs it: pure functions, `x` being what travels from stage to stage.

    Attributes:
        prepare: `(microbatch, key) -> context`, what the blocks share and nothing differentiates.
        first: `(shared, context) -> x`.
        layer: `(params, x, context, number) -> x`, `number` the global layer number (int32 scalar).
        last: `(shared, x, context) -> loss`, a float32 scalar; losses add up over microbatches.
        first_part: `(shared, context, part) -> x`, the rank's share of `first`; the shares add up to the whole. Here
            and in `last_part`, leaves of `shared` that are sharded over `pipe` are the rank's shard of them.
        last_part: `(shared, x, context, scale, part) -> (loss, dx, grads)`: the whole loss, not scaled, and the rank's
            shares of the gradients of `scale * loss`, None for a leaf that is not used.
    """

    prepare: Callable[[PyTree, PyTree], PyTree]
    first: Callable[[PyTree, PyTree], jax.Array]
    layer: Callable[[PyTree, jax.Array, PyTree, jax.Array], jax.Array]
    last: Callable[[PyTree, jax.Array, PyTree], jax.Array]
    first_part: Callable[[PyTree, PyTree, Part], jax.Array] | None = None
    last_part: Callable[[PyTree, jax.Array, PyTree, jax.Array, Part], tuple[jax.Array, jax.Array, PyTree]] | None = None


@dataclass(frozen=True)
class Part:
    """Which part of embedding and head is the rank's, and how the parts come together."""

    index: jax.Array
    count: int

    def sum(self, array: jax.Array) -> jax.Array:
        return jax.lax.psum(array, "pipe")

    def max(self, array: jax.Array) -> jax.Array:
        return jax.lax.pmax(array, "pipe")


class SplitModel(NamedTuple):
    """The model's three blocks, their backwards cut; `x` is the shape of what travels."""

    first: SplitBlock
    layer: SplitBlock
    last: SplitBlock
    x: jax.ShapeDtypeStruct


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
        split(model.last, shared, x, context, policy="none"),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
    )


class Program:
    """One schedule for one number of layers; `value_and_grad` makes the function that runs it.

    Args:
        schedule: validated. A stage that has R for its microbatches recomputes there, otherwise in I or B.
        layers: number of layers of the model.
        remat: applied to every layer, or one for each stage. A buffer is as large on every rank as the busiest one
            needs, and each policy has its own.
        unroll: whether a stage's layers are separate code (faster, compiles longer) or a scan. By default
            they are unrolled up to 8 layers a rank.
        vocab_parallel: every rank runs its part of embedding and head for each microbatch, in the tick of the first
            stage's F and I and of the last stage's F; the model's `first_part` and `last_part`. Otherwise the first
            stage runs the embedding and the last one the head.
        poison: fill buffers and the outputs of idle ticks with NaN, so that a value read from the wrong
            slot cannot go unnoticed.
    """

    def __init__(
        self,
        schedule: Schedule,
        layers: int,
        remat: Remat | Sequence[Remat],
        *,
        unroll: bool | None = None,
        vocab_parallel: bool = False,
        poison: bool = False,
    ):
        self.vocab_parallel = vocab_parallel
        self.period, self.versions = schedule.period, schedule.versions
        self._end_ranks = [
            (schedule.placement[first], schedule.placement[first + schedule.depth - 1])
            for first in range(0, schedule.stages, schedule.depth)
        ]
        self.layout = StageLayout.of(schedule, layers)
        apart = recomputing_stages(schedule)
        remats = [remat] * schedule.stages if isinstance(remat, Remat) else remat
        ways = [(one, stage in apart) for stage, one in enumerate(remats)]
        # Every way to treat a layer is a block of its own: "layer", "layer1", ...
        self.ways = {f"layer{n or ''}": way for n, way in enumerate(dict.fromkeys(ways))}
        self._block_of = [next(name for name, one in self.ways.items() if one == way) for way in ways]
        self._ranks, self._chunks, self._places = self.layout.numbers.shape
        self.unroll = self._chunks * self._places <= 8 if unroll is None else unroll
        self.empty = jnp.nan if poison else 0.0
        kinds = self.layout.kinds()
        if vocab_parallel:
            kinds = [(False, count, False) for _, count, _ in kinds]
        self._with = {
            "first": frozenset(stage for stage, (has_first, _, _) in enumerate(kinds) if has_first),
            **{
                name: frozenset(s for s, (_, count, _) in enumerate(kinds) if count and self._block_of[s] == name)
                for name in self.ways
            },
            "last": frozenset(stage for stage, (_, _, has_last) in enumerate(kinds) if has_last),
        }
        self.lifetimes = {
            (block, start, end): Lifetime(stages, start, end)
            for block, stages in self._with.items()
            for start, end in (*LIFETIMES, *(RECOMPUTE_LIFETIMES if self._apart(block) else ()))
        }
        self.table = build_table(schedule, self.lifetimes.values(), ends=vocab_parallel)
        # A branch is an action for a kind of stage and, where code is specific to it, a chunk.
        chunks = self.layout.chunk_of if self.unroll else (0,) * len(kinds)
        variant = list(zip(kinds, chunks, self._block_of, strict=True))
        wanted = {
            (int(action), variant[stage])
            for action, stage in zip(self.table.kind.reshape(-1), self.table.stage.reshape(-1), strict=True)
            if action
        }
        self._branches = sorted(wanted)
        index = {key: 1 + position for position, key in enumerate(self._branches)}
        self._branch = np.array(
            [
                [index[int(action), variant[stage]] if action else 0 for action, stage in zip(*row, strict=True)]
                for row in zip(self.table.kind, self.table.stage, strict=True)
            ],
            np.int32,
        )

    def _apart(self, block: str) -> bool:
        return block in self.ways and self.ways[block][1]

    @property
    def branch_count(self) -> int:
        """Branches of the switch, the idle one included."""
        return 1 + len(self._branches)

    def rows(self) -> dict[str, Any]:
        """The tick table as the arrays that the program scans over, [T, P] each; an input of the program."""
        table = self.table
        return {
            "branch": self._branch,
            "microbatch": table.microbatch,
            "chunk": np.asarray(self.layout.chunk_of, np.int32)[table.stage],
            "read": table.read,
            "receive": list(table.receive),
            "slots": [table.slots[lifetime] for lifetime in self.lifetimes.values()],
            "ends": asdict(table.ends) if table.ends else {},
        }

    def value_and_grad(
        self,
        model: PipelineModel,
        mesh: Mesh,
        specs: Mapping[str, PyTree],
        *,
        batch_axes: Sequence[str] = ("data", "fsdp"),
        gather: str = "step",
    ) -> Callable[[PyTree, PyTree, jax.Array, PyTree, PyTree], tuple[jax.Array, PyTree]]:
        """The function `(params, batch, scale, key, rows) -> (loss, grads)`.

        Args:
            specs: `PartitionSpec`s of the parameters {"shared": ..., "layers": ...}; layers are [P, V, J, ...] and
                lead with `pipe`.
            batch_axes: mesh axes over which the sequences of a microbatch are divided.
            gather: when weights that are sharded over a batch axis are gathered: once a `step`, or in every
                `tick` for the layers that run in it (less memory, more traffic).

        In the function's arguments, `batch` leaves are [M, sequences, ...]; `scale` (float32 scalar) multiplies the
        loss and its gradients; `rows` is `self.rows()`. Gradients are sharded as the parameters are, and added up in
        float32 at least.
        """
        if self.period:
            raise ScheduleError("a schedule without a flush hands what is in flight to the next step; use `stream`")
        manual = ("pipe", *batch_axes)
        local = jax.tree.map(partial(manual_part, manual=manual), dict(specs), is_leaf=is_spec)

        def body(
            params: PyTree, batch: PyTree, scale: jax.Array, key: PyTree, rows: PyTree
        ) -> tuple[jax.Array, PyTree]:
            run = _Run(self, model, batch, scale, key, [params], specs, batch_axes, gather)
            loss, grads, _ = run(rows, run.blank())
            return sum_over(loss, manual), grads

        def function(
            params: PyTree, batch: PyTree, scale: jax.Array, key: PyTree, rows: PyTree
        ) -> tuple[jax.Array, PyTree]:
            in_specs = (local, *_specs(batch, key, batch_axes), _over_ranks(rows))
            out_specs = (PartitionSpec(), local)
            loss, grads = _mapped(body, mesh, in_specs, out_specs, manual)(params, batch, scale, key, rows)
            return loss, _constrained(grads, specs, mesh)

        return function

    def stream(
        self,
        model: PipelineModel,
        mesh: Mesh,
        specs: Mapping[str, PyTree],
        *,
        batch_axes: Sequence[str] = ("data", "fsdp"),
        gather: str = "step",
    ) -> tuple[Callable[..., PyTree], Callable[..., tuple[jax.Array, PyTree, PyTree]]]:
        """For a schedule without a flush: `start` and `step`, whose arguments are those of `value_and_grad`.

        `start(params, batch, scale, key) -> carry` gives what is in flight before the first step: nothing.
        `step(params, batch, scale, key, rows, carry) -> (loss, grads, carry)` runs one step of the stream and returns
        the loss and the gradients of the *step before*, which this one completes.

        Here `params` is a list of the schedule's `versions`, the newest last; `batch` leaves are [2 M, sequences, ...],
        the step before's and this one's; `scale` is [2]; `key` has a leading axis of 2.
        """
        manual = ("pipe", *batch_axes)
        local = jax.tree.map(partial(manual_part, manual=manual), dict(specs), is_leaf=is_spec)
        everywhere: Any = PartitionSpec(manual)  # every device has its own

        def run_of(params: PyTree, batch: PyTree, scale: jax.Array, key: PyTree) -> _Run:
            return _Run(self, model, batch, scale, key, params, specs, batch_axes, gather)

        def begin(params: PyTree, batch: PyTree, scale: jax.Array, key: PyTree) -> PyTree:
            return jax.tree.map(lambda a: a[None], run_of(params, batch, scale, key).blank())

        def body(
            params: PyTree, batch: PyTree, scale: jax.Array, key: PyTree, rows: PyTree, carry: PyTree
        ) -> tuple[jax.Array, PyTree, PyTree]:
            carry = jax.tree.map(lambda a: a[0], carry)
            loss, grads, carry = run_of(params, batch, scale, key)(rows, carry)
            return sum_over(loss, manual), grads, jax.tree.map(lambda a: a[None], carry)

        def start(params: PyTree, batch: PyTree, scale: jax.Array, key: PyTree) -> PyTree:
            in_specs = ([local] * self.versions, *_specs(batch, key, batch_axes))
            return _mapped(begin, mesh, in_specs, everywhere, manual)(params, batch, scale, key)

        def step(
            params: PyTree, batch: PyTree, scale: jax.Array, key: PyTree, rows: PyTree, carry: PyTree
        ) -> tuple[jax.Array, PyTree, PyTree]:
            in_specs = ([local] * self.versions, *_specs(batch, key, batch_axes), _over_ranks(rows), everywhere)
            mapped = _mapped(body, mesh, in_specs, (PartitionSpec(), local, everywhere), manual)
            loss, grads, carry = mapped(params, batch, scale, key, rows, carry)
            return loss, _constrained(grads, specs, mesh), carry

        return start, step


def _mapped(body: Callable, mesh: Mesh, in_specs: Any, out_specs: Any, manual: Sequence[str]) -> Callable:
    return jax.shard_map(
        body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(manual), check_vma=False
    )


def _specs(batch: PyTree, key: PyTree, batch_axes: Sequence[str]) -> tuple[PyTree, PartitionSpec, PyTree]:
    """Of a batch, the scale and the key."""
    sequences = jax.tree.map(lambda _: PartitionSpec(None, tuple(batch_axes)), batch)
    return sequences, PartitionSpec(), jax.tree.map(lambda _: PartitionSpec(), key)


def _over_ranks(rows: PyTree) -> PyTree:
    return jax.tree.map(lambda _: PartitionSpec(None, "pipe"), rows)


def _constrained(grads: PyTree, specs: Mapping[str, PyTree], mesh: Mesh) -> PyTree:
    shardings = jax.tree.map(partial(NamedSharding, mesh), dict(specs), is_leaf=is_spec)
    return jax.lax.with_sharding_constraint(grads, shardings)


class _Run:
    """One rank's share of one step, while it is traced; `params` are the versions of the weights, the newest last."""

    def __init__(
        self,
        program: Program,
        model: PipelineModel,
        batch: PyTree,
        scale: jax.Array,
        key: PyTree,
        params: Sequence[PyTree],
        specs: Mapping[str, PyTree],
        batch_axes: Sequence[str],
        gathered_each: str,
    ):
        self.program, self.model, self.batch, self.scale, self.key = program, model, batch, scale, key
        self.batch_axes, self.specs = tuple(batch_axes), specs
        self.each_tick = gathered_each == "tick"
        self.unroll = program.unroll
        self.shared_specs = specs["shared"]
        if program.vocab_parallel:
            self.shared_specs = jax.tree.map(partial(without, axis="pipe"), specs["shared"], is_leaf=is_spec)
        self.shared = [jax.tree.map(gather, version["shared"], self.shared_specs) for version in params]
        self.layer_specs = jax.tree.map(lambda spec: PartitionSpec(*spec[3:]), specs["layers"], is_leaf=is_spec)
        self.layers = [self._by_place(self._staged(version["layers"])) for version in params]
        layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[3:], a.dtype), params[0]["layers"])
        layer = jax.eval_shape(lambda p: jax.tree.map(gather, p, self.layer_specs), layer)
        microbatch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batch)
        whole = jax.eval_shape(lambda p: jax.tree.map(gather, p, specs["shared"]), params[0]["shared"])
        key = jax.tree.map(lambda k: k[0], key) if program.period else key
        splits = {
            name: split_model(model, layer, whole, microbatch, key, remat, apart=apart)
            for name, (remat, apart) in program.ways.items()
        }
        any_split = splits["layer"]
        self.x = any_split.x
        self.blocks = {"first": any_split.first, "last": any_split.last}
        self.blocks |= {name: split.layer for name, split in splits.items()}
        self.slots = Buffers(self.blocks, program.lifetimes, program.table, program._places, self.unroll, program.empty)
        rank = jax.lax.axis_index("pipe")
        self.numbers = jnp.asarray(program.layout.numbers)[rank].reshape(-1)

    # --- What differs between the steps whose microbatches run together, where no flush keeps them apart ------

    def _step_of(self, microbatch: jax.Array) -> tuple[jax.Array, ...]:
        """An index: 0 for the step before, 1 for this one; with a flush there is only one, and none."""
        period = self.program.period
        return ((microbatch >= period).astype(jnp.int32),) if period else ()

    def _of_step(self, tree: PyTree, microbatch: jax.Array) -> PyTree:
        return jax.tree.map(lambda a: get(a, *self._step_of(microbatch)), tree) if self.program.period else tree

    def _version(self, versions: Sequence[PyTree], microbatch: jax.Array) -> PyTree:
        if len(versions) == 1:
            return versions[0]
        (is_new,) = self._step_of(microbatch)
        old, new = versions
        return jax.tree.map(lambda a, b: jnp.where(is_new == 1, b, a), old, new)

    # --- Storage that has one entry a layer place -----------------------------------------------------------

    def _staged(self, layers: PyTree) -> PyTree:
        """[1, V, J, ...] -> [V * J, ...], V with the borrowed chunks from here on."""
        layers = jax.tree.map(lambda a: borrow(a[0], self.program.layout), layers)
        layers = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), layers)
        if self.each_tick:
            return layers
        return jax.tree.map(lambda a, spec: gather(a, spec, skip=1), layers, self.layer_specs)

    def _by_place(self, tree: PyTree) -> PyTree:
        """Leading axis V * J; unrolled, a tuple of the entries."""
        if not self.unroll:
            return tree
        size = self.program._chunks * self.program._places
        return tuple(jax.tree.map(lambda a, i=i: a[i], tree) for i in range(size))

    def _stacked(self, stored: PyTree) -> PyTree:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *stored) if self.unroll else stored

    def _shared(self, row: dict) -> PyTree:
        return self._version(self.shared, row["microbatch"])

    def _params(self, chunk: Any, j: Any, row: dict) -> PyTree:
        place = chunk * self.program._places + j
        if self.unroll:
            versions = [layers[place] for layers in self.layers]
        else:
            take = partial(jax.tree.map, lambda a: jax.lax.dynamic_index_in_dim(a, place, keepdims=False))
            versions = [take(layers) for layers in self.layers]
        params = self._version(versions, row["microbatch"])
        return jax.tree.map(gather, params, self.layer_specs) if self.each_tick else params

    def _add_grads(self, stored: PyTree, chunk: Any, j: Any, row: dict, grads: PyTree) -> PyTree:
        step = self._step_of(row["microbatch"])
        place = chunk * self.program._places + j
        if self.each_tick:
            grads = jax.tree.map(
                lambda grad, spec: None if grad is None else scatter(_widened(grad), spec),
                grads,
                self.layer_specs,
                is_leaf=_is_none,
            )
        if self.unroll:
            return (*stored[:place], _add(stored[place], grads, *step), *stored[place + 1 :])
        return _add(stored, grads, *step, place)

    # --- Actions --------------------------------------------------------------------------------------------

    def _receive(self, state: dict, row: dict) -> jax.Array:
        value, state["inbox"] = jax.lax.optimization_barrier((get(state["inbox"], row["read"]), state["inbox"]))
        return value

    def _loop(self, count: int, body: Callable[[Any, PyTree], PyTree], carry: PyTree) -> PyTree:
        if self.unroll:
            for j in range(count):
                carry = body(j, carry)
            return carry
        return jax.lax.fori_loop(0, count, body, carry) if count else carry

    def _aux(self, context: PyTree, chunk: Any, j: Any) -> tuple[PyTree, jax.Array]:
        return context, self.numbers[chunk * self.program._places + j]

    def _forward(
        self, stage: tuple, chunk: Any, layer: str, row: dict, state: dict, context: PyTree
    ) -> tuple[Any, dict]:
        has_first, count, has_last = stage
        if has_first:
            x, residuals = self.blocks["first"].forward(self._shared(row), (), context)
            self.slots.write(state, row, "first", Kind.F, residuals)
        else:
            x = self._receive(state, row)

        def body(j: Any, carry: tuple) -> tuple:
            x, buffers = carry
            inner = {"buffers": buffers}
            x, residuals = self.blocks[layer].forward(self._params(chunk, j, row), x, self._aux(context, chunk, j))
            self.slots.write(inner, row, layer, Kind.F, residuals, j)
            return x, inner["buffers"]

        x, state["buffers"] = self._loop(count, body, (x, state["buffers"]))
        if not has_last:
            return x, state
        loss, residuals = self.blocks["last"].forward(self._shared(row), x, context)
        self.slots.write(state, row, "last", Kind.F, residuals)
        scale = self._of_step(self.scale, row["microbatch"])
        state["loss"] = _add(state["loss"], scale * loss, *self._step_of(row["microbatch"]))
        return None, state

    def _recompute(
        self, stage: tuple, chunk: Any, layer: str, row: dict, state: dict, context: PyTree
    ) -> tuple[Any, dict]:
        def body(j: Any, inner: dict) -> dict:
            inner = dict(inner)
            params, aux = self._params(chunk, j, row), self._aux(context, chunk, j)
            residuals, places = self.slots.read(inner, row, layer, Kind.F, Kind.R, j)
            made = self.slots.settle(inner, places, self.blocks[layer].recompute(params, aux, residuals))
            self.slots.write(inner, row, layer, Kind.R, made, j)
            return inner

        return None, self._loop(stage[1], body, state)

    def _backward(
        self, stage: tuple, chunk: Any, layer: str, row: dict, state: dict, context: PyTree, *, fused: bool
    ) -> tuple[Any, dict]:
        """I, or with `fused` I and W in one, so that nothing is stashed in slots between them."""
        has_first, count, has_last = stage
        blocks = self.blocks

        def finish(block: str, params: PyTree, aux: PyTree, stash: list, inner: dict, j: Any = None) -> None:
            if not fused:
                self.slots.write(inner, row, block, Kind.I, stash, j)
                return
            residuals, places = self.slots.read(inner, row, block, Kind.F, Kind.W, j)
            again, more = self.slots.read(inner, row, block, Kind.R, Kind.W, j)
            grads = blocks[block].weight_gradient(params, aux, residuals, stash, again)
            self._accumulate(block, chunk, j, row, self.slots.settle(inner, [*places, *more], grads), inner)

        if has_last:
            residuals, places = self.slots.read(state, row, "last", Kind.F, Kind.I)
            scale = self._of_step(self.scale, row["microbatch"])
            out = blocks["last"].input_gradient(self._shared(row), context, residuals, scale)
            dx, stash = self.slots.settle(state, places, out)
            finish("last", self._shared(row), context, stash, state)
        else:
            dx = self._receive(state, row)

        def body(i: Any, carry: tuple) -> tuple:
            j = count - 1 - i
            dx, inner = carry
            inner = dict(inner)
            params, aux = self._params(chunk, j, row), self._aux(context, chunk, j)
            residuals, places = self.slots.read(inner, row, layer, Kind.F, Kind.I, j)
            again, more = self.slots.read(inner, row, layer, Kind.R, Kind.I, j)
            # Without this XLA recomputes every layer of the stage before it needs the first.
            dx, inner["layers"], residuals = jax.lax.optimization_barrier((dx, inner["layers"], residuals))
            out = blocks[layer].input_gradient(params, aux, residuals, dx, again)
            dx, stash = self.slots.settle(inner, [*places, *more], out)
            finish(layer, params, aux, stash, inner, j)
            return dx, inner

        dx, state = self._loop(count, body, (dx, state))
        if not has_first:
            return dx, state
        state = dict(state)
        residuals, places = self.slots.read(state, row, "first", Kind.F, Kind.I)
        out = blocks["first"].input_gradient(self._shared(row), context, residuals, dx)
        _, stash = self.slots.settle(state, places, out)
        finish("first", self._shared(row), context, stash, state)
        return None, state

    def _weight(
        self, stage: tuple, chunk: Any, layer: str, row: dict, state: dict, context: PyTree
    ) -> tuple[Any, dict]:
        has_first, count, has_last = stage

        def gradient(block: str, params: PyTree, aux: PyTree, inner: dict, j: Any = None) -> None:
            residuals, places = self.slots.read(inner, row, block, Kind.F, Kind.W, j)
            again, more = self.slots.read(inner, row, block, Kind.R, Kind.W, j)
            stash, most = self.slots.read(inner, row, block, Kind.I, Kind.W, j)
            inner["layers"], residuals, again, stash = jax.lax.optimization_barrier(
                (inner["layers"], residuals, again, stash)
            )
            grads = self.blocks[block].weight_gradient(params, aux, residuals, stash, again)
            self._accumulate(block, chunk, j, row, self.slots.settle(inner, [*places, *more, *most], grads), inner)

        def body(j: Any, inner: dict) -> dict:
            inner = dict(inner)
            gradient(layer, self._params(chunk, j, row), self._aux(context, chunk, j), inner, j)
            return inner

        if has_last:
            gradient("last", self._shared(row), context, state)
        state = dict(self._loop(count, body, state))
        if has_first:
            gradient("first", self._shared(row), context, state)
        return None, state

    def _accumulate(self, block: str, chunk: Any, j: Any, row: dict, grads: PyTree, state: dict) -> None:
        if block in ("first", "last"):
            state["shared"] = _add(state["shared"], grads, *self._step_of(row["microbatch"]))
        else:
            state["layers"] = self._add_grads(state["layers"], chunk, j, row, grads)

    def _branch(self, key: tuple | None) -> Callable[[dict, dict], tuple[jax.Array, dict]]:
        run: dict[Kind | None, Callable] = {
            Kind.F: self._forward,
            Kind.R: self._recompute,
            Kind.I: partial(self._backward, fused=False),
            Kind.B: partial(self._backward, fused=True),
            Kind.W: self._weight,
        }

        def branch(row: dict, state: dict) -> tuple[jax.Array, dict]:
            output = None
            if key is not None:
                kind, (stage, chunk, layer) = key
                context = self._context(row["microbatch"])
                chunk = chunk if self.unroll else row["chunk"]
                output, state = run[TickTable.KINDS[kind]](stage, chunk, layer, row, dict(state), context)
            if output is None:
                output = blank(self.x.shape, self.x, self.program.empty)
            return output, state

        return branch

    def _context(self, number: jax.Array) -> PyTree:
        microbatch = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, number, keepdims=False), self.batch)
        return self.model.prepare(microbatch, self._of_step(self.key, number))

    # --- Embedding and head on every rank -------------------------------------------------------------------

    # All ranks have the same number in a row, so they agree on whether to take part in the collectives.

    def _from(self, rank: int, value: jax.Array) -> jax.Array:
        """The rank's value, on every rank."""
        mine = jax.lax.axis_index("pipe") == rank
        return jax.lax.psum(jnp.where(mine, value, jnp.zeros_like(value)), "pipe")

    def _part(self) -> Part:
        return Part(jax.lax.axis_index("pipe"), self.program._ranks)

    def _embed(self, state: dict, row: dict, pipeline: int) -> dict:
        number, slot = row["ends"]["embed"][pipeline], row["ends"]["embed_to"][pipeline]

        def run(inbox: jax.Array) -> jax.Array:
            share = self.model.first_part(self.shared[0], self._context(number), self._part())  # type: ignore[misc]
            return put(inbox, slot, None, jax.lax.psum(share, "pipe"))

        return state | {"inbox": jax.lax.cond(number >= 0, run, lambda inbox: inbox, state["inbox"])}

    def _embed_gradient(self, state: dict, row: dict, pipeline: int, output: jax.Array) -> dict:
        number, rank = row["ends"]["embed_gradient"][pipeline], self.program._end_ranks[pipeline][0]

        def run(shared: PyTree) -> PyTree:
            context, part = self._context(number), self._part()
            share, backward = jax.vjp(lambda weights: self.model.first_part(weights, context, part), self.shared[0])  # type: ignore[misc]
            (grads,) = backward(self._from(rank, output).astype(share.dtype))
            return _add(shared, grads)

        return state | {"shared": jax.lax.cond(number >= 0, run, lambda shared: shared, state["shared"])}

    def _head(self, state: dict, row: dict, pipeline: int, output: jax.Array) -> dict:
        number, slot = row["ends"]["head"][pipeline], row["ends"]["head_to"][pipeline]
        rank = self.program._end_ranks[pipeline][1]

        def run(carry: tuple) -> tuple:
            inbox, shared, total = carry
            x = self._from(rank, output)
            context, part = self._context(number), self._part()
            loss, dx, grads = self.model.last_part(self.shared[0], x, context, self.scale, part)  # type: ignore[misc]
            # Every rank has the whole loss, and the ranks' losses are added up after the last tick.
            total = total + jnp.where(part.index == 0, self.scale * loss, 0.0)
            dx = jax.lax.psum(_widened(dx), "pipe").astype(x.dtype)
            return put(inbox, slot, None, dx), _add(shared, grads), total

        names = ("inbox", "shared", "loss")
        carry = jax.lax.cond(number >= 0, run, lambda carry: carry, tuple(state[name] for name in names))
        return state | dict(zip(names, carry, strict=True))

    # --- The step -------------------------------------------------------------------------------------------

    def blank(self) -> dict:
        """The state before the first tick; without a flush, sums have a leading axis of 2 (see `_step_of`)."""
        x, steps = self.x, (2,) if self.program.period else ()
        zeros = partial(jax.tree.map, lambda a: _widened(jnp.zeros((*steps, *a.shape), a.dtype)))
        return {
            "inbox": blank((self.program.table.inbox_slots + 1, *x.shape), x, self.program.empty),
            "buffers": self.slots.init(),
            "layers": zeros(self.layers[0]),
            "shared": zeros(self.shared[0]),
            "loss": jnp.zeros(steps, jnp.float32),
        }

    def __call__(self, rows: PyTree, state: dict) -> tuple[jax.Array, PyTree, dict]:
        """Loss, gradients, and the state for the next step where there is no flush."""
        program, table = self.program, self.program.table
        rows = jax.tree.map(lambda column: column[:, 0], rows)
        branches = [self._branch(None), *(self._branch(key) for key in program._branches)]

        def tick(state: dict, row: dict) -> tuple[dict, None]:
            pipelines = range(len(program._end_ranks)) if program.vocab_parallel else ()
            for pipeline in pipelines:
                state = self._embed(state, row, pipeline)
            output, state = jax.lax.switch(row["branch"], branches, row, state)
            for pipeline in pipelines:
                state = self._head(state, row, pipeline, output)
                state = self._embed_gradient(state, row, pipeline, output)
            for offset, slot in zip(table.offsets, row["receive"], strict=True):
                arrived = output
                if offset:
                    pairs = [(rank, (rank + offset) % program._ranks) for rank in range(program._ranks)]
                    arrived = jax.lax.ppermute(output, "pipe", pairs)
                state = state | {"inbox": put(state["inbox"], slot, None, arrived)}
            return state, None

        state, _ = jax.lax.scan(tick, state, rows)
        carry = state
        if program.period:
            sums = {name: state[name] for name in ("layers", "shared", "loss")}
            carry = state | jax.tree.map(lambda a: jnp.stack([a[1], jnp.zeros_like(a[1])]), sums)
            state = jax.tree.map(lambda a: a[0], sums)
        if program.vocab_parallel:

            def reduce_shared(grad: jax.Array, spec: PartitionSpec, whole: PartitionSpec) -> jax.Array:
                axes = self.batch_axes if spec != whole else ("pipe", *self.batch_axes)
                return reduce_gradient(grad, spec, axes)

            shared = jax.tree.map(reduce_shared, state["shared"], self.shared_specs, self.specs["shared"])
        else:
            reduce_shared = partial(reduce_gradient, axes=("pipe", *self.batch_axes))
            shared = jax.tree.map(reduce_shared, state["shared"], self.specs["shared"])
        done = self.batch_axes if self.each_tick else ()
        reduce_layers = partial(reduce_gradient, axes=self.batch_axes, skip=1, done=done)
        layers = jax.tree.map(reduce_layers, self._stacked(state["layers"]), self.layer_specs)
        shape = (program._chunks, program._places)
        layers = jax.tree.map(lambda a: give_back(a.reshape(*shape, *a.shape[1:]), program.layout)[None], layers)
        return state["loss"], {"shared": shared, "layers": layers}, carry


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _widened(array: jax.Array) -> jax.Array:
    """Gradients add up in float32 at least."""
    return array if jnp.finfo(array.dtype).bits >= 32 else array.astype(jnp.float32)


def _add(total: PyTree, grads: PyTree, *index: Any) -> PyTree:
    """Adds in place, at the entry of each total that the index names."""

    def leaf(total: jax.Array, grad: jax.Array | None) -> jax.Array:
        if grad is None:
            return total
        if not index:
            return total + grad.astype(total.dtype)
        slot, j = index if len(index) == 2 else (*index, None)
        return put(total, slot, j, get(total, slot, j) + grad.astype(total.dtype))

    return jax.tree.map(leaf, total, grads, is_leaf=_is_none)

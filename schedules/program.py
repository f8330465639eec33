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
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from schedules.actions import Kind, Schedule
from schedules.backward import Crossing, SplitBlock, split
from schedules.remat import Remat
from schedules.slots import Lifetime, TickTable, build_table
from schedules.stages import StageLayout

__all__ = ["PipelineModel", "Program", "SplitModel", "split_model"]

PyTree = Any


@dataclass(frozen=True)
class PipelineModel:
    """A network as the program needs it: pure functions, `x` being what travels from stage to stage.

    Attributes:
        prepare: `(microbatch, key) -> context`, what the blocks share and nothing differentiates.
        first: `(shared, context) -> x`.
        layer: `(params, x, context, number) -> x`, `number` the global layer number (int32 scalar).
        last: `(shared, x, context) -> loss`, a float32 scalar; losses add up over microbatches.
    """

    prepare: Callable[[PyTree, PyTree], PyTree]
    first: Callable[[PyTree, PyTree], jax.Array]
    layer: Callable[[PyTree, jax.Array, PyTree, jax.Array], jax.Array]
    last: Callable[[PyTree, jax.Array, PyTree], jax.Array]


class SplitModel(NamedTuple):
    """The model's three blocks, their backwards cut; `x` is the shape of what travels."""

    first: SplitBlock
    layer: SplitBlock
    last: SplitBlock
    x: jax.ShapeDtypeStruct


def split_model(
    model: PipelineModel, layer: PyTree, shared: PyTree, microbatch: PyTree, key: PyTree, remat: Remat
) -> SplitModel:
    """Cuts the backward of every block; arguments may be `jax.ShapeDtypeStruct`s. Remat applies to layers."""
    context = jax.eval_shape(model.prepare, microbatch, key)
    x = jax.eval_shape(model.first, shared, context)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return SplitModel(
        split(lambda shared, _, context: model.first(shared, context), shared, (), context, policy="none"),
        split(lambda p, x, aux: model.layer(p, x, *aux), layer, x, (context, number), policy=remat.policy),
        split(model.last, shared, x, context, policy="none"),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
    )


# What waits in slots between the actions of a block: residuals that I ends, residuals that W ends, stash.
_WAITS = ((Kind.F, Kind.I), (Kind.F, Kind.W), (Kind.I, Kind.W))


class Program:
    """One schedule for one number of layers; `value_and_grad` makes the function that runs it.

    Args:
        schedule: validated; actions F, I, W and B.
        layers: number of layers of the model.
        remat: applied to every layer.
        unroll: whether a stage's layers are separate code (faster, compiles longer) or a scan. By default
            they are unrolled up to 8 layers a rank.
        poison: fill buffers and the outputs of idle ticks with NaN, so that a value read from the wrong
            slot cannot go unnoticed.
    """

    def __init__(
        self,
        schedule: Schedule,
        layers: int,
        remat: Remat,
        *,
        unroll: bool | None = None,
        poison: bool = False,
    ):
        self.layout = StageLayout.of(schedule, layers)
        self.remat = remat
        self._ranks, self._chunks, self._places = self.layout.table.shape
        self.unroll = self._chunks * self._places <= 8 if unroll is None else unroll
        self._empty = jnp.nan if poison else 0.0
        kinds = self.layout.kinds()
        self._with = {
            "first": frozenset({0}),
            "layer": frozenset(stage for stage, (_, count, _) in enumerate(kinds) if count),
            "last": frozenset({len(kinds) - 1}),
        }
        self.lifetimes = {
            (block, start, end): Lifetime(stages, start, end)
            for block, stages in self._with.items()
            for start, end in _WAITS
        }
        self.table = build_table(schedule, self.lifetimes.values())
        # A branch is an action for a kind of stage and, where code is specific to it, a chunk.
        chunks = self.layout.chunk_of if self.unroll else (0,) * len(kinds)
        variant = [(kind, chunk) for kind, chunk in zip(kinds, chunks, strict=True)]
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
        manual = ("pipe", *batch_axes)
        local = jax.tree.map(partial(_manual_part, manual=manual), dict(specs), is_leaf=_is_spec)

        def body(
            params: PyTree, batch: PyTree, scale: jax.Array, key: PyTree, rows: PyTree
        ) -> tuple[jax.Array, PyTree]:
            rows = jax.tree.map(lambda column: column[:, 0], rows)
            run = _Run(self, model, batch, scale, key, params, local, specs, batch_axes, gather)
            loss, grads = run(rows)
            return jax.lax.psum(loss, manual), grads

        def function(
            params: PyTree, batch: PyTree, scale: jax.Array, key: PyTree, rows: PyTree
        ) -> tuple[jax.Array, PyTree]:
            everywhere = PartitionSpec()
            in_specs = (
                local,
                jax.tree.map(lambda _: PartitionSpec(None, tuple(batch_axes)), batch),
                everywhere,
                jax.tree.map(lambda _: everywhere, key),
                jax.tree.map(lambda _: PartitionSpec(None, "pipe"), rows),
            )
            mapped = jax.shard_map(
                body,
                mesh=mesh,
                in_specs=in_specs,
                out_specs=(everywhere, local),
                axis_names=set(manual),
                check_vma=False,
            )
            return mapped(params, batch, scale, key, rows)

        return function


class _Run:
    """One rank's share of one step, while it is traced."""

    def __init__(
        self,
        program: Program,
        model: PipelineModel,
        batch: PyTree,
        scale: jax.Array,
        key: PyTree,
        params: PyTree,
        local_specs: PyTree,
        specs: Mapping[str, PyTree],
        batch_axes: Sequence[str],
        gather: str,
    ):
        self.program, self.model, self.batch, self.scale, self.key = program, model, batch, scale, key
        self.batch_axes, self.specs, self.local = tuple(batch_axes), specs, local_specs
        self.each_tick = gather == "tick"
        self.unroll = program.unroll
        # Shared leaves [...]; layer leaves [1, V, J, ...] -> [V * J, ...].
        self.shared = jax.tree.map(_gather, params["shared"], local_specs["shared"])
        staged = jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), params["layers"])
        self.layer_specs = jax.tree.map(lambda spec: PartitionSpec(*spec[3:]), local_specs["layers"], is_leaf=_is_spec)
        if not self.each_tick:
            staged = jax.tree.map(lambda a, spec: _gather(a, spec, skip=1), staged, self.layer_specs)
        self.layers = self._by_place(staged)
        layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), staged)
        if self.each_tick:
            layer = jax.eval_shape(lambda p: jax.tree.map(_gather, p, self.layer_specs), layer)
        microbatch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batch)
        self.blocks = split_model(model, layer, self.shared, microbatch, key, program.remat)
        rank = jax.lax.axis_index("pipe")
        self.numbers = jnp.asarray(program.layout.table)[rank].reshape(-1)

    # --- Storage that has one entry a layer place -----------------------------------------------------------

    def _by_place(self, tree: PyTree) -> PyTree:
        """Leading axis V * J; unrolled, a tuple of the entries."""
        if not self.unroll:
            return tree
        size = self.program._chunks * self.program._places
        return tuple(jax.tree.map(lambda a, i=i: a[i], tree) for i in range(size))

    def _stacked(self, stored: PyTree) -> PyTree:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *stored) if self.unroll else stored

    def _params(self, chunk: Any, j: Any) -> PyTree:
        place = chunk * self.program._places + j
        if self.unroll:
            params = self.layers[place]
        else:
            params = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, place, keepdims=False), self.layers)
        return jax.tree.map(_gather, params, self.layer_specs) if self.each_tick else params

    def _add_grads(self, stored: PyTree, chunk: Any, j: Any, grads: PyTree) -> PyTree:
        place = chunk * self.program._places + j
        if self.each_tick:
            grads = jax.tree.map(_widened, grads, is_leaf=_is_none)
            grads = jax.tree.map(_scatter, grads, self.layer_specs, is_leaf=_is_none)
        if self.unroll:
            return (*stored[:place], _add(stored[place], grads), *stored[place + 1 :])

        def leaf(total: jax.Array, grad: jax.Array | None) -> jax.Array:
            if grad is None:
                return total
            old = jax.lax.dynamic_index_in_dim(total, place, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(total, old + grad.astype(total.dtype), place, 0)

        return jax.tree.map(leaf, stored, grads, is_leaf=_is_none)

    # --- Slots ----------------------------------------------------------------------------------------------

    def _buffers(self) -> dict[tuple[str, Kind, Kind], list[Any]]:
        """Per block and lifetime, a buffer for each value that waits: [slots, ...], for layers [slots, J, ...]."""
        buffers: dict[tuple[str, Kind, Kind], list[Any]] = {}
        for (block, start, end), lifetime in self.program.lifetimes.items():
            count = self.program.table.counts[lifetime]
            crossings = _waiting(getattr(self.blocks, block), start, end)
            if block != "layer":
                buffers[block, start, end] = [self._blank((count, *c.aval.shape), c.aval) for c in crossings]
            elif self.unroll:
                places = range(self.program._places)
                buffers[block, start, end] = [
                    tuple(self._blank((count, *c.aval.shape), c.aval) for _ in places) for c in crossings
                ]
            else:
                shape = (count, self.program._places)
                buffers[block, start, end] = [self._blank((*shape, *c.aval.shape), c.aval) for c in crossings]
        return buffers

    def _blank(self, shape: tuple[int, ...], like: Any) -> jax.Array:
        inexact = jnp.issubdtype(like.dtype, jnp.inexact)
        blank = jnp.full(shape, self.program._empty if inexact else 0, like.dtype)
        return jax.device_put(blank, jax.memory.Space.Host) if Crossing(like, "", True, True).on_host else blank

    def _write(self, state: dict, row: dict, block: str, start: Kind, values: Sequence[Any], j: Any = None) -> None:
        """Puts what F (residuals) or I (stash) leaves into its slots."""
        for key, slot in zip(self.program.lifetimes, row["slots"], strict=True):
            if key[:2] != (block, start):
                continue
            leaves = zip(values, self._leaves(block, start), strict=True)
            mine = [value for value, crossing in leaves if _ends(crossing, start) is key[2]]
            buffers = state["buffers"][key]
            state["buffers"] = state["buffers"] | {
                key: [_put(buffer, slot, j, value) for buffer, value in zip(buffers, mine, strict=True)]
            }

    def _read(
        self, state: dict, row: dict, block: str, start: Kind, reader: Kind, j: Any = None
    ) -> tuple[list[Any], list[tuple]]:
        """What the reader (I or W) takes of what F or I left, None for what it does not read; and where it was."""
        values: list[Any] = [None] * len(self._leaves(block, start))
        places = []
        for key, slot in zip(self.program.lifetimes, row["slots"], strict=True):
            if key[:2] != (block, start):
                continue
            mine = [i for i, crossing in enumerate(self._leaves(block, start)) if _ends(crossing, start) is key[2]]
            for position, i in enumerate(mine):
                crossing = self._leaves(block, start)[i]
                if crossing.for_input if reader is Kind.I else crossing.for_weight:
                    values[i] = _get(state["buffers"][key][position], slot, j)
                    places.append((key, position, j))
        return values, places

    def _settle(self, state: dict, places: Sequence[tuple], outputs: PyTree) -> PyTree:
        """Orders what was computed from buffers before whatever becomes of them.

        Without this barrier XLA copies every buffer in every branch of the switch, since it cannot tell that the
        reads come first.
        """
        entries = []
        for key, position, j in places:
            buffer = state["buffers"][key][position]
            entries.append(buffer[j] if isinstance(buffer, tuple) else buffer)
        outputs, entries = jax.lax.optimization_barrier((outputs, entries))
        for (key, position, j), entry in zip(places, entries, strict=True):
            buffers = list(state["buffers"][key])
            buffer = buffers[position]
            buffers[position] = (*buffer[:j], entry, *buffer[j + 1 :]) if isinstance(buffer, tuple) else entry
            state["buffers"] = state["buffers"] | {key: buffers}
        return outputs

    def _leaves(self, block: str, start: Kind) -> tuple[Crossing, ...]:
        split_block: SplitBlock = getattr(self.blocks, block)
        return split_block.residuals if start is Kind.F else split_block.stash

    def _receive(self, state: dict, row: dict) -> jax.Array:
        value, state["inbox"] = jax.lax.optimization_barrier((_get(state["inbox"], row["read"]), state["inbox"]))
        return value

    # --- Actions --------------------------------------------------------------------------------------------

    def _loop(self, count: int, body: Callable[[Any, PyTree], PyTree], carry: PyTree) -> PyTree:
        if self.unroll:
            for j in range(count):
                carry = body(j, carry)
            return carry
        return jax.lax.fori_loop(0, count, body, carry) if count else carry

    def _aux(self, context: PyTree, chunk: Any, j: Any) -> tuple[PyTree, jax.Array]:
        return context, self.numbers[chunk * self.program._places + j]

    def _forward(self, stage: tuple, chunk: Any, row: dict, state: dict, context: PyTree) -> tuple[Any, dict]:
        has_first, count, has_last = stage
        if has_first:
            x, residuals = self.blocks.first.forward(self.shared, (), context)
            self._write(state, row, "first", Kind.F, residuals)
        else:
            x = self._receive(state, row)

        def body(j: Any, carry: tuple) -> tuple:
            x, buffers = carry
            inner = {"buffers": buffers}
            x, residuals = self.blocks.layer.forward(self._params(chunk, j), x, self._aux(context, chunk, j))
            self._write(inner, row, "layer", Kind.F, residuals, j)
            return x, inner["buffers"]

        x, state["buffers"] = self._loop(count, body, (x, state["buffers"]))
        if not has_last:
            return x, state
        loss, residuals = self.blocks.last.forward(self.shared, x, context)
        self._write(state, row, "last", Kind.F, residuals)
        state["loss"] = state["loss"] + self.scale * loss
        return None, state

    def _backward(
        self, stage: tuple, chunk: Any, row: dict, state: dict, context: PyTree, *, fused: bool
    ) -> tuple[Any, dict]:
        """I, or with `fused` I and W in one, so that nothing is stashed in slots between them."""
        has_first, count, has_last = stage
        blocks = self.blocks

        def finish(block: str, params: PyTree, aux: PyTree, stash: list, inner: dict, j: Any = None) -> None:
            if not fused:
                self._write(inner, row, block, Kind.I, stash, j)
                return
            split_block: SplitBlock = getattr(blocks, block)
            residuals, places = self._read(inner, row, block, Kind.F, Kind.W, j)
            grads = split_block.weight_gradient(params, aux, residuals, stash)
            self._accumulate(block, chunk, j, self._settle(inner, places, grads), inner)

        if has_last:
            residuals, places = self._read(state, row, "last", Kind.F, Kind.I)
            out = blocks.last.input_gradient(self.shared, context, residuals, self.scale)
            dx, stash = self._settle(state, places, out)
            finish("last", self.shared, context, stash, state)
        else:
            dx = self._receive(state, row)

        def body(i: Any, carry: tuple) -> tuple:
            j = count - 1 - i
            dx, inner = carry
            inner = dict(inner)
            params, aux = self._params(chunk, j), self._aux(context, chunk, j)
            residuals, places = self._read(inner, row, "layer", Kind.F, Kind.I, j)
            dx, stash = self._settle(inner, places, blocks.layer.input_gradient(params, aux, residuals, dx))
            finish("layer", params, aux, stash, inner, j)
            return dx, inner

        dx, state = self._loop(count, body, (dx, state))
        if not has_first:
            return dx, state
        state = dict(state)
        residuals, places = self._read(state, row, "first", Kind.F, Kind.I)
        _, stash = self._settle(state, places, blocks.first.input_gradient(self.shared, context, residuals, dx))
        finish("first", self.shared, context, stash, state)
        return None, state

    def _weight(self, stage: tuple, chunk: Any, row: dict, state: dict, context: PyTree) -> tuple[Any, dict]:
        has_first, count, has_last = stage

        def gradient(block: str, params: PyTree, aux: PyTree, inner: dict, j: Any = None) -> None:
            residuals, places = self._read(inner, row, block, Kind.F, Kind.W, j)
            stash, more = self._read(inner, row, block, Kind.I, Kind.W, j)
            split_block: SplitBlock = getattr(self.blocks, block)
            grads = split_block.weight_gradient(params, aux, residuals, stash)
            self._accumulate(block, chunk, j, self._settle(inner, [*places, *more], grads), inner)

        def body(j: Any, inner: dict) -> dict:
            inner = dict(inner)
            gradient("layer", self._params(chunk, j), self._aux(context, chunk, j), inner, j)
            return inner

        if has_last:
            gradient("last", self.shared, context, state)
        state = dict(self._loop(count, body, state))
        if has_first:
            gradient("first", self.shared, context, state)
        return None, state

    def _accumulate(self, block: str, chunk: Any, j: Any, grads: PyTree, state: dict) -> None:
        if block == "layer":
            state["layers"] = self._add_grads(state["layers"], chunk, j, grads)
        else:
            state["shared"] = _add(state["shared"], grads)

    def _branch(self, key: tuple | None) -> Callable[[dict, dict], tuple[jax.Array, dict]]:
        run: dict[Kind | None, Callable] = {
            Kind.F: self._forward,
            Kind.I: partial(self._backward, fused=False),
            Kind.B: partial(self._backward, fused=True),
            Kind.W: self._weight,
        }

        def branch(row: dict, state: dict) -> tuple[jax.Array, dict]:
            output = None
            if key is not None:
                kind, (stage, chunk) = key
                microbatch = jax.tree.map(
                    lambda a: jax.lax.dynamic_index_in_dim(a, row["microbatch"], keepdims=False), self.batch
                )
                context = self.model.prepare(microbatch, self.key)
                chunk = chunk if self.unroll else row["chunk"]
                output, state = run[TickTable.KINDS[kind]](stage, chunk, row, dict(state), context)
            if output is None:
                output = self._blank(self.blocks.x.shape, self.blocks.x)
            return output, state

        return branch

    # --- The step -------------------------------------------------------------------------------------------

    def __call__(self, rows: PyTree) -> tuple[jax.Array, PyTree]:
        program, table, x = self.program, self.program.table, self.blocks.x
        zeros = partial(jax.tree.map, lambda a: _widened(jnp.zeros(a.shape, a.dtype)))
        state = {
            "inbox": self._blank((table.inbox_slots + 1, *x.shape), x),
            "buffers": self._buffers(),
            "layers": zeros(self.layers),
            "shared": zeros(self.shared),
            "loss": jnp.zeros((), jnp.float32),
        }
        branches = [self._branch(None), *(self._branch(key) for key in program._branches)]

        def tick(state: dict, row: dict) -> tuple[dict, None]:
            output, state = jax.lax.switch(row["branch"], branches, row, state)
            for offset, slot in zip(table.offsets, row["receive"], strict=True):
                arrived = output
                if offset:
                    pairs = [(rank, (rank + offset) % program._ranks) for rank in range(program._ranks)]
                    arrived = jax.lax.ppermute(output, "pipe", pairs)
                state = state | {"inbox": _put(state["inbox"], slot, None, arrived)}
            return state, None

        state, _ = jax.lax.scan(tick, state, rows)
        shared = jax.tree.map(partial(_reduce, axes=("pipe", *self.batch_axes)), state["shared"], self.local["shared"])
        skip = self.batch_axes if self.each_tick else ()
        layers = jax.tree.map(
            partial(_reduce, axes=self.batch_axes, skip=1, done=skip), self._stacked(state["layers"]), self.layer_specs
        )
        shape = (1, program._chunks, program._places)
        layers = jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), layers)
        return state["loss"], {"shared": shared, "layers": layers}


# --- Values in buffers ----------------------------------------------------------------------------------------


def _waiting(block: SplitBlock, start: Kind, end: Kind) -> list[Crossing]:
    leaves = block.residuals if start is Kind.F else block.stash
    return [crossing for crossing in leaves if _ends(crossing, start) is end]


def _ends(crossing: Crossing, start: Kind) -> Kind:
    return Kind.W if crossing.for_weight or start is Kind.I else Kind.I


def _put(buffer: Any, slot: jax.Array, j: Any, value: jax.Array) -> Any:
    if isinstance(buffer, tuple):
        return (*buffer[:j], _put(buffer[j], slot, None, value), *buffer[j + 1 :])
    index = (slot,) if j is None else (slot, j)
    zero = jnp.zeros((), jnp.int32)
    start = (*(jnp.asarray(i, jnp.int32) for i in index), *(zero for _ in value.shape))
    return jax.lax.dynamic_update_slice(buffer, value.reshape((1,) * len(index) + value.shape), start)


def _get(buffer: Any, slot: jax.Array, j: Any = None) -> jax.Array:
    if isinstance(buffer, tuple):
        return _get(buffer[j], slot)
    index = (slot,) if j is None else (slot, j)
    shape = buffer.shape[len(index) :]
    zero = jnp.zeros((), jnp.int32)
    start = (*(jnp.asarray(i, jnp.int32) for i in index), *(zero for _ in shape))
    return jax.lax.dynamic_slice(buffer, start, (1,) * len(index) + shape).reshape(shape)


def _widened(array: jax.Array | None) -> jax.Array | None:
    """Gradients add up in float32 at least."""
    if array is None or jnp.finfo(array.dtype).bits >= 32:
        return array
    return array.astype(jnp.float32)


def _add(total: PyTree, grads: PyTree) -> PyTree:
    return jax.tree.map(lambda t, g: t if g is None else t + g.astype(t.dtype), total, grads, is_leaf=_is_none)


# --- Shardings over manual axes -------------------------------------------------------------------------------


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _manual_part(spec: PartitionSpec, manual: Sequence[str]) -> PartitionSpec:
    """The spec without the axes that are left to XLA."""
    kept = (tuple(name for name in _names(entry) if name in manual) for entry in spec)
    return PartitionSpec(*(names or None for names in kept))


def _gather(array: jax.Array, spec: PartitionSpec, skip: int = 0) -> jax.Array:
    """Gathers every sharded dimension; the spec starts at dimension `skip`."""
    for dimension, entry in enumerate(spec):
        if names := _names(entry):
            array = jax.lax.all_gather(array, names, axis=dimension + skip, tiled=True)
    return array


def _scatter(array: jax.Array | None, spec: PartitionSpec, skip: int = 0) -> jax.Array | None:
    """Sums over the axes of every sharded dimension, leaving each device its shard: the transpose of `_gather`."""
    for dimension, entry in enumerate(spec):
        if array is not None and (names := _names(entry)):
            array = jax.lax.psum_scatter(array, names, scatter_dimension=dimension + skip, tiled=True)
    return array


def _reduce(
    array: jax.Array, spec: PartitionSpec, axes: Sequence[str], skip: int = 0, done: Sequence[str] = ()
) -> jax.Array:
    """Sums a gradient over the axes and leaves it sharded as its parameter is; `done` axes that shard it are summed."""
    sharded = {name for entry in spec for name in _names(entry)}
    if not sharded & set(done):
        array = _scatter(array, spec, skip)  # type: ignore[assignment]
    rest = tuple(name for name in axes if name not in sharded)
    return jax.lax.psum(array, rest) if rest else array

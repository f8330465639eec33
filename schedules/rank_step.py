"""One rank's share of one step, while it is traced: the branches of the switch, and the scan over ticks.

Shapes: T ticks, P ranks, V chunks a rank, J layers a chunk, M microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from schedules.actions import Kind
from schedules.borrow import borrow, give_back
from schedules.buffers import Buffers, blank, get, put
from schedules.collectives import gather, is_spec, reduce_gradient, scatter, sum_over, widened
from schedules.pipeline_model import Part, PipelineModel, cotangent, split_model
from schedules.program_tables import Branch, ProgramTables, StageCode
from schedules.slots import TickTable
from schedules.stages import LayerRun

__all__ = ["RankStep"]

PyTree = Any


class RankStep:
    """`(rows, state) -> (loss, grads, state)`, to be called inside `shard_map`.

    `state["aux"]` has what the head gives besides the loss, [M, ...], on the rank that ran it, and zeros elsewhere.

    Args:
        params: the versions of the weights, the newest last; with a flush there is one.
        specs: of the parameters, see `schedules.program.Program.value_and_grad`.
        sum_axes: manual axes, `pipe` apart, over which gradients add up.
        keep: of these, those over which layers that are sharded stay so while they run.
        each_tick: gather weights that are sharded over batch axes in every tick, not once.
        poison: fill buffers and the outputs of idle ticks with NaN.
    """

    def __init__(
        self,
        program: ProgramTables,
        model: PipelineModel,
        params: Sequence[PyTree],
        batch: PyTree,
        scale: jax.Array,
        key: PyTree,
        *,
        specs: Mapping[str, PyTree],
        sum_axes: Sequence[str],
        keep: Sequence[str],
        each_tick: bool,
        poison: bool,
    ):
        self.program, self.model, self.batch, self.scale, self.key = program, model, batch, scale, key
        self.specs, self.sum_axes, self.each_tick = specs, tuple(sum_axes), each_tick
        self.keep = tuple(keep)
        self.empty = jnp.nan if poison else 0.0
        self.unroll = program.unroll
        # Axes over which embedding and head stay divided.
        self.parts = ("pipe",) if program.vocab_parallel else ()
        own = partial(gather, keep=self.parts)
        self.shared = [jax.tree.map(own, version["shared"], specs["shared"]) for version in params]
        self.layer_specs = jax.tree.map(lambda spec: PartitionSpec(*spec[3:]), specs["layers"], is_leaf=is_spec)
        self.layers = [self._by_place(self._staged(version["layers"])) for version in params]
        gather_layer = partial(gather, keep=self.keep)
        layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[3:], a.dtype), params[0]["layers"])
        layer = jax.eval_shape(lambda p: jax.tree.map(gather_layer, p, self.layer_specs), layer)
        microbatch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batch)
        whole = jax.eval_shape(lambda p: jax.tree.map(gather, p, specs["shared"]), params[0]["shared"])
        key = jax.tree.map(lambda k: k[0], key) if program.period else key
        splits = {
            name: split_model(
                model,
                program.layout.held(layer, way.parts),
                whole,
                microbatch,
                key,
                way.remat,
                apart=way.apart,
            )
            for name, way in program.ways.items()
        }
        any_split = splits["layer"]
        self.x, self.aux = any_split.x, any_split.aux
        self.blocks = {"first": any_split.first, "last": any_split.last}
        self.blocks |= {name: split.layer for name, split in splits.items()}
        self.slots = Buffers(
            self.blocks, program.lifetimes, program.table, program.block_places, self.unroll, self.empty
        )
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

    def _staged(self, layers: dict[str, PyTree]) -> dict[str, PyTree]:
        """[1, V, J, ...] -> [V * J, ...], V with the borrowed chunks from here on; J of each part its own."""

        def leaf(name: str, array: jax.Array, spec: PartitionSpec) -> jax.Array:
            array = borrow(array[0], self.program.layout.part(name))
            array = array.reshape(-1, *array.shape[2:])
            return array if self.each_tick else gather(array, spec, skip=1, keep=self.keep)

        return {name: jax.tree.map(partial(leaf, name), tree, self.layer_specs[name]) for name, tree in layers.items()}

    def _places(self, name: str) -> int:
        """J of a part."""
        return self.program.layout.part_places.get(name, self.program.places)

    def _by_place(self, layers: dict[str, PyTree]) -> dict[str, PyTree]:
        """Leading axis V * J; unrolled, a tuple of the entries."""
        if not self.unroll:
            return layers

        def entries(name: str, tree: PyTree) -> tuple[PyTree, ...]:
            size = self.program.chunks * self._places(name)
            return tuple(jax.tree.map(lambda a, i=i: a[i], tree) for i in range(size))

        return {name: entries(name, tree) for name, tree in layers.items()}

    def _stacked(self, stored: dict[str, PyTree]) -> dict[str, PyTree]:
        if not self.unroll:
            return stored
        return {name: jax.tree.map(lambda *leaves: jnp.stack(leaves), *entries) for name, entries in stored.items()}

    def _shared(self, row: dict) -> PyTree:
        return self._version(self.shared, row["microbatch"])

    def _entries(self, chunk: Any, run: LayerRun, j: Any) -> dict[str, Any]:
        """Where a run's layer j is stored, by part."""
        at = dict(run.parts_at)
        names = self.program.layout.held(self.layer_specs, frozenset(at))
        return {name: chunk * self._places(name) + at.get(name, run.at) + j for name in names}

    def _params(self, chunk: Any, run: LayerRun, j: Any, row: dict) -> PyTree:
        def take(layers: dict[str, PyTree], name: str, entry: Any) -> PyTree:
            if self.unroll:
                return layers[name][entry]
            return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, entry, keepdims=False), layers[name])

        entries = self._entries(chunk, run, j)
        versions = [{name: take(layers, name, entry) for name, entry in entries.items()} for layers in self.layers]
        params = self._version(versions, row["microbatch"])
        if not self.each_tick:
            return params
        specs = {name: self.layer_specs[name] for name in params}
        return jax.tree.map(partial(gather, keep=self.keep), params, specs)

    def _add_grads(self, stored: PyTree, chunk: Any, run: LayerRun, j: Any, row: dict, grads: PyTree) -> PyTree:
        step, stored = self._step_of(row["microbatch"]), dict(stored)
        for name, entry in self._entries(chunk, run, j).items():
            part = grads[name]
            if self.each_tick:
                part = jax.tree.map(
                    lambda grad, spec: None if grad is None else scatter(widened(grad), spec, keep=self.keep),
                    part,
                    self.layer_specs[name],
                    is_leaf=_is_none,
                )
            if self.unroll:
                held = stored[name]
                stored[name] = (*held[:entry], _add(held[entry], part, *step), *held[entry + 1 :])
            else:
                stored[name] = _add(stored[name], part, *step, entry)
        return stored

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

    def _aux(self, context: PyTree, chunk: Any, run: LayerRun, j: Any) -> tuple[PyTree, jax.Array]:
        return context, self.numbers[chunk * self.program.places + run.at + j]

    def _add_loss(self, state: dict, row: dict, loss: jax.Array | None) -> None:
        if loss is not None:
            scale = self._of_step(self.scale, row["microbatch"])
            state["loss"] = _add(state["loss"], scale * loss, *self._step_of(row["microbatch"]))

    def _forward(self, code: StageCode, chunk: Any, row: dict, state: dict, context: PyTree) -> tuple[Any, dict]:
        if code.first:
            x, residuals = self.blocks["first"].forward(self._shared(row), (), context)
            self.slots.write(state, row, "first", Kind.F, residuals)
        else:
            x = self._receive(state, row)

        def body(run: LayerRun, j: Any, carry: tuple) -> tuple:
            x, inner = carry
            inner, params, aux = dict(inner), self._params(chunk, run, j, row), self._aux(context, chunk, run, j)
            (x, loss), residuals = self.blocks[run.block].forward(params, x, aux)
            self._add_loss(inner, row, loss)
            self.slots.write(inner, row, run.block, Kind.F, residuals, run.block_at + j)
            return x, inner

        inner = {name: state[name] for name in ("buffers", "loss")}
        for run in code.runs:
            x, inner = self._loop(run.count, partial(body, run), (x, inner))
        state |= inner
        if not code.last:
            return x, state
        out, residuals = self.blocks["last"].forward(self._shared(row), x, context)
        self.slots.write(state, row, "last", Kind.F, residuals)
        loss, aux = self._loss_and_aux(out)
        self._add_loss(state, row, loss)
        state["aux"] = _collected(state["aux"], row["microbatch"], aux)
        return None, state

    def _loss_and_aux(self, out: Any) -> tuple[jax.Array, PyTree]:
        return out if self.model.has_aux else (out, ())

    def _recompute(self, code: StageCode, chunk: Any, row: dict, state: dict, context: PyTree) -> tuple[Any, dict]:
        def body(run: LayerRun, j: Any, inner: dict) -> dict:
            inner, at = dict(inner), run.block_at + j
            params, aux = self._params(chunk, run, j, row), self._aux(context, chunk, run, j)
            residuals, places = self.slots.read(inner, row, run.block, Kind.F, Kind.R, at)
            made = self.slots.settle(inner, places, self.blocks[run.block].recompute(params, aux, residuals))
            self.slots.write(inner, row, run.block, Kind.R, made, at)
            return inner

        for run in code.runs:
            if self.program.ways[run.block].apart:
                state = self._loop(run.count, partial(body, run), state)
        return None, state

    def _backward(
        self, code: StageCode, chunk: Any, row: dict, state: dict, context: PyTree, *, fused: bool
    ) -> tuple[Any, dict]:
        """I, or with `fused` I and W in one, so that nothing is stashed in slots between them."""
        blocks, scale = self.blocks, self._of_step(self.scale, row["microbatch"])

        def finish(
            block: str,
            params: PyTree,
            aux: PyTree,
            stash: list,
            inner: dict,
            run: LayerRun | None = None,
            j: Any = None,
        ) -> None:
            at = None if run is None else run.block_at + j
            if not fused:
                self.slots.write(inner, row, block, Kind.I, stash, at)
                return
            residuals, places = self.slots.read(inner, row, block, Kind.F, Kind.W, at)
            again, more = self.slots.read(inner, row, block, Kind.R, Kind.W, at)
            grads = blocks[block].weight_gradient(params, aux, residuals, stash, again)
            self._accumulate(chunk, run, j, row, self.slots.settle(inner, [*places, *more], grads), inner)

        if code.last:
            residuals, places = self.slots.read(state, row, "last", Kind.F, Kind.I)
            out = blocks["last"].input_gradient(self._shared(row), context, residuals, scale)
            dx, stash = self.slots.settle(state, places, out)
            finish("last", self._shared(row), context, stash, state)
        else:
            dx = self._receive(state, row)

        def body(run: LayerRun, i: Any, carry: tuple) -> tuple:
            j, block = run.count - 1 - i, blocks[run.block]
            dx, inner = carry
            inner, at = dict(inner), run.block_at + j
            params, aux = self._params(chunk, run, j, row), self._aux(context, chunk, run, j)
            residuals, places = self.slots.read(inner, row, run.block, Kind.F, Kind.I, at)
            again, more = self.slots.read(inner, row, run.block, Kind.R, Kind.I, at)
            # Without this XLA recomputes every layer of the stage before it needs the first.
            dx, inner["layers"], residuals = jax.lax.optimization_barrier((dx, inner["layers"], residuals))
            out = block.input_gradient(params, aux, residuals, cotangent(block, dx, scale), again)
            dx, stash = self.slots.settle(inner, [*places, *more], out)
            finish(run.block, params, aux, stash, inner, run, j)
            return dx, inner

        for run in reversed(code.runs):
            dx, state = self._loop(run.count, partial(body, run), (dx, state))
        if not code.first:
            return dx, state
        state = dict(state)
        residuals, places = self.slots.read(state, row, "first", Kind.F, Kind.I)
        out = blocks["first"].input_gradient(self._shared(row), context, residuals, dx)
        _, stash = self.slots.settle(state, places, out)
        finish("first", self._shared(row), context, stash, state)
        return None, state

    def _weight(self, code: StageCode, chunk: Any, row: dict, state: dict, context: PyTree) -> tuple[Any, dict]:
        def gradient(
            block: str, params: PyTree, aux: PyTree, inner: dict, run: LayerRun | None = None, j: Any = None
        ) -> None:
            at = None if run is None else run.block_at + j
            residuals, places = self.slots.read(inner, row, block, Kind.F, Kind.W, at)
            again, more = self.slots.read(inner, row, block, Kind.R, Kind.W, at)
            stash, most = self.slots.read(inner, row, block, Kind.I, Kind.W, at)
            inner["layers"], residuals, again, stash = jax.lax.optimization_barrier(
                (inner["layers"], residuals, again, stash)
            )
            grads = self.blocks[block].weight_gradient(params, aux, residuals, stash, again)
            self._accumulate(chunk, run, j, row, self.slots.settle(inner, [*places, *more, *most], grads), inner)

        def body(run: LayerRun, j: Any, inner: dict) -> dict:
            inner, aux = dict(inner), self._aux(context, chunk, run, j)
            gradient(run.block, self._params(chunk, run, j, row), aux, inner, run, j)
            return inner

        if code.last:
            gradient("last", self._shared(row), context, state)
        for run in code.runs:
            state = self._loop(run.count, partial(body, run), state)
        state = dict(state)
        if code.first:
            gradient("first", self._shared(row), context, state)
        return None, state

    def _accumulate(self, chunk: Any, run: LayerRun | None, j: Any, row: dict, grads: PyTree, state: dict) -> None:
        """Adds the gradients of a run's layer j, or without a run those of embedding or head."""
        if run is None:
            state["shared"] = _add(state["shared"], grads, *self._step_of(row["microbatch"]))
        else:
            state["layers"] = self._add_grads(state["layers"], chunk, run, j, row, grads)

    def _branch(self, key: Branch | None) -> Callable[[dict, dict], tuple[jax.Array, dict]]:
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
                kind, code = key
                context = self._context(row["microbatch"])
                chunk = code.chunk if self.unroll else row["chunk"]
                output, state = run[TickTable.KINDS[kind]](code, chunk, row, dict(state), context)
            if output is None:
                output = blank(self.x.shape, self.x, self.empty)
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
        return sum_over(jnp.where(mine, value, jnp.zeros_like(value)), ("pipe",))

    def _part(self) -> Part:
        return Part(jax.lax.axis_index("pipe"), self.program.ranks)

    def _embed(self, state: dict, row: dict, pipeline: int) -> dict:
        number, slot = row["ends"]["embed"][pipeline], row["ends"]["embed_to"][pipeline]

        def run(inbox: jax.Array) -> jax.Array:
            share = self.model.first_part(self.shared[0], self._context(number), self._part())  # type: ignore[misc]
            return put(inbox, slot, None, self._part().sum(share))

        return state | {"inbox": jax.lax.cond(number >= 0, run, lambda inbox: inbox, state["inbox"])}

    def _embed_gradient(self, state: dict, row: dict, pipeline: int, output: jax.Array) -> dict:
        number, rank = row["ends"]["embed_gradient"][pipeline], self.program.end_ranks[pipeline][0]

        def run(shared: PyTree) -> PyTree:
            context, part = self._context(number), self._part()
            share, backward = jax.vjp(lambda weights: self.model.first_part(weights, context, part), self.shared[0])  # type: ignore[misc]
            (grads,) = backward(self._from(rank, output).astype(share.dtype))
            return _add(shared, grads)

        return state | {"shared": jax.lax.cond(number >= 0, run, lambda shared: shared, state["shared"])}

    def _head(self, state: dict, row: dict, pipeline: int, output: jax.Array) -> dict:
        number, slot = row["ends"]["head"][pipeline], row["ends"]["head_to"][pipeline]
        rank = self.program.end_ranks[pipeline][1]

        def run(carry: tuple) -> tuple:
            inbox, shared, total, collected = carry
            x = self._from(rank, output)
            context, part = self._context(number), self._part()
            out, dx, grads = self.model.last_part(self.shared[0], x, context, self.scale, part)  # type: ignore[misc]
            loss, aux = self._loss_and_aux(out)
            # Every rank has the whole loss, and the ranks' losses are added up after the last tick.
            loss, aux = jax.tree.map(lambda a: jnp.where(part.index == 0, a, jnp.zeros_like(a)), (loss, aux))
            total, collected = total + self.scale * loss, _collected(collected, number, aux)
            inbox = put(inbox, slot, None, part.sum(widened(dx)).astype(x.dtype))
            return inbox, _add(shared, grads), total, collected

        names = ("inbox", "shared", "loss", "aux")
        carry = jax.lax.cond(number >= 0, run, lambda carry: carry, tuple(state[name] for name in names))
        return state | dict(zip(names, carry, strict=True))

    # --- The step -------------------------------------------------------------------------------------------

    def blank(self) -> dict:
        """The state before the first tick; without a flush, sums have a leading axis of 2 (see `_step_of`)."""
        x, steps = self.x, (2,) if self.program.period else ()
        count = jax.tree.leaves(self.batch)[0].shape[0]

        def zeros(params: PyTree) -> PyTree:
            trained = self.model.only_trained(params) if self.program.has_backward else ()
            return jax.tree.map(lambda a: widened(jnp.zeros((*steps, *a.shape), a.dtype)), trained)

        return {
            "inbox": blank((self.program.table.inbox_slots + 1, *x.shape), x, self.empty),
            "buffers": self.slots.init(),
            "layers": zeros(self.layers[0]),
            "shared": zeros(self.shared[0]),
            "loss": jnp.zeros(steps, jnp.float32),
            "aux": jax.tree.map(lambda aux: jnp.zeros((count, *aux.shape), aux.dtype), self.aux),
        }

    def __call__(self, rows: PyTree, state: dict) -> tuple[jax.Array, PyTree, dict]:
        """Loss, gradients, and the state for the next step where there is no flush."""
        program, table = self.program, self.program.table
        rows = jax.tree.map(lambda column: column[:, 0], rows)
        branches = [self._branch(None), *(self._branch(key) for key in program.branches)]

        def tick(state: dict, row: dict) -> tuple[dict, None]:
            pipelines = range(len(program.end_ranks)) if program.vocab_parallel else ()
            for pipeline in pipelines:
                state = self._embed(state, row, pipeline)
            output, state = jax.lax.switch(row["branch"], branches, row, state)
            for pipeline in pipelines:
                state = self._head(state, row, pipeline, output)
                state = self._embed_gradient(state, row, pipeline, output)
            for offset, slot in zip(table.offsets, row["receive"], strict=True):
                arrived = output
                if offset:
                    pairs = [(rank, (rank + offset) % program.ranks) for rank in range(program.ranks)]
                    arrived = jax.lax.ppermute(output, "pipe", pairs)
                state = state | {"inbox": put(state["inbox"], slot, None, arrived)}
            return state, None

        state, _ = jax.lax.scan(tick, state, rows)
        carry = state
        if program.period:
            sums = {name: state[name] for name in ("layers", "shared", "loss")}
            carry = state | jax.tree.map(lambda a: jnp.stack([a[1], jnp.zeros_like(a[1])]), sums)
            state = jax.tree.map(lambda a: a[0], sums)
        if not program.has_backward:
            return state["loss"], (), carry
        done = self.sum_axes if self.each_tick else ()
        reduce_shared = partial(reduce_gradient, axes=("pipe", *self.sum_axes), done=self.parts)

        def finished(name: str, grad: jax.Array, spec: PartitionSpec) -> jax.Array:
            grad = reduce_gradient(grad, spec, self.sum_axes, skip=1, done=(*done, *self.keep))
            grad = grad.reshape(program.chunks, self._places(name), *grad.shape[1:])
            return give_back(grad, program.layout.part(name))[None]

        specs = self.model.only_trained({"shared": dict(self.specs["shared"]), "layers": self.layer_specs})
        shared = jax.tree.map(reduce_shared, state["shared"], specs["shared"])
        layers = {
            name: jax.tree.map(partial(finished, name), tree, specs["layers"][name])
            for name, tree in self._stacked(state["layers"]).items()
        }
        return state["loss"], {"shared": shared, "layers": layers}, carry


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _add(total: PyTree, grads: PyTree, *index: Any) -> PyTree:
    """Adds in place, at the entry of each total that the index names."""

    def leaf(total: jax.Array | None, grad: jax.Array | None) -> jax.Array | None:
        if total is None or grad is None:
            return total
        if not index:
            return total + grad.astype(total.dtype)
        slot, j = index if len(index) == 2 else (*index, None)
        return put(total, slot, j, get(total, slot, j) + grad.astype(total.dtype))

    return jax.tree.map(leaf, total, grads, is_leaf=_is_none)


def _collected(collected: PyTree, microbatch: Any, aux: PyTree) -> PyTree:
    """With a microbatch's arrays at their place."""
    return jax.tree.map(lambda whole, one: put(whole, microbatch, None, one), collected, aux)

"""One optimizer step as one XLA program: the pipeline's gradients, clipping, AdamW.

Shapes: M microbatches, B sequences of a microbatch, S sequence; layer leaves [P, V, J, ...] (`schedules.stages`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshsys import data
from meshsys.assemble import Assembly
from meshsys.inputs import abstract_batch
from meshsys.rows import Rows
from meshsys.sharding import BATCH_AXES, named
from meshsys.state import Metrics, State, StateForms, structs
from models import Batch
from schedules.program import compiler_options

__all__ = ["Step"]

PyTree = Any


class Step(StateForms):
    """The compiled step of an assembly on a mesh, and the shardings of its state.

    Without a flush a step has two programs: the pipeline's, which needs the next step's batch too and keeps what is in
    flight in this object, and the optimizer's. What is in flight is not saved: the first call runs the step before
    without its update, which brings the same microbatches to the same places.

    Args:
        gradients: what computes loss and gradients in place of the assembly's program, a function as
            `Program.value_and_grad` returns it.
    """

    def __init__(self, assembly: Assembly, mesh: Mesh, gradients: Callable | None = None):
        super().__init__(assembly, mesh)
        replicated = NamedSharding(mesh, PartitionSpec())
        config = assembly.config
        self._batches = Rows(mesh, config.pipeline.microbatches, config.data.sequence_length)
        self._rows_sharding = NamedSharding(mesh, PartitionSpec(None, "pipe"))
        self._compiled: dict[str, jax.stages.Compiled] = {}
        jit = partial(jax.jit, compiler_options=compiler_options(mesh))
        options = self.program_options
        if self._streams:
            start, run = assembly.program.stream(assembly.model, mesh, self.specs, **options)
            self._carry: PyTree = None
            self._in_flight: Batch | None = None
            context = ("context",) if assembly.axes["context"] > 1 else ()
            self._carry_sharding = NamedSharding(mesh, PartitionSpec(("pipe", *BATCH_AXES, *context)))
            self._start = jit(self._on_both(start), out_shardings=self._carry_sharding)
            results = replicated, named(mesh, self._trained(self.specs)), self._carry_sharding
            self._run = jit(self._on_both(run), donate_argnums=4, out_shardings=results)
            self._optimize = jax.jit(self._update, donate_argnums=0, out_shardings=(self.shardings, replicated))
        else:
            self._gradients = gradients or assembly.program.value_and_grad(assembly.model, mesh, self.specs, **options)
            self._run = jit(self._step, donate_argnums=0, out_shardings=(self.shardings, replicated))

    # --- Step -----------------------------------------------------------------------------------------------

    @cached_property
    def _rows(self) -> PyTree:
        return jax.device_put(self.assembly.program.rows(), self._rows_sharding)

    def __call__(self, state: State, batch: data.Batch, following: data.Batch) -> tuple[State, Metrics]:
        """Takes one step; the state given is consumed.

        Args:
            following: the next step's batch, which is read where the schedule has no flush.
        """
        run: Callable = self._compiled.get("run", self._run)
        if not self._streams:
            return run(state, self.put(batch), self._rows)
        start: Callable = self._compiled.get("start", self._start)
        optimize: Callable = self._compiled.get("optimize", self._optimize)
        if self._carry is None:
            self._in_flight = self.put(batch)
            begun = state._replace(step=state.step - 1, params=state.previous)
            arguments = begun, self._in_flight, self._in_flight
            *_, self._carry = run(*arguments, self._rows, start(*arguments))
        before, self._in_flight = self._in_flight, self.put(following)
        loss, grads, self._carry = run(state, before, self._in_flight, self._rows, self._carry)
        return optimize(state, loss, grads, before)

    def compile(self) -> None:
        """Compiles the step, so that the first one takes no longer than the others."""
        self._compiled["run"] = self.lower().compile()
        if self._streams:
            state, batch, *rest = self.abstract_arguments()
            loss, grads, _ = jax.eval_shape(self._run, state, batch, *rest)
            grads = structs(grads, named(self.mesh, self._trained(self.specs)))
            loss = structs(loss, NamedSharding(self.mesh, PartitionSpec()))
            self._compiled["start"] = self._start.lower(state, batch, batch).compile()
            self._compiled["optimize"] = self._optimize.lower(state, loss, grads, batch).compile()

    def lower(self) -> jax.stages.Lowered:
        """The step (without a flush, its pipeline) for abstract arguments, for its compiler figures."""
        return self._run.lower(*self.abstract_arguments())

    def abstract_arguments(self) -> tuple:
        """Shapes and shardings of the step's arguments."""
        state = self.abstract_state()
        config = self.assembly.config
        shape = config.pipeline.microbatches, self.assembly.microbatch_size, config.data.sequence_length
        batch = abstract_batch(*shape)
        batch = structs(batch, jax.tree.map(lambda leaf: self._batches.sharding(leaf.ndim), batch))
        rows = structs(self.assembly.program.rows(), self._rows_sharding)
        if not self._streams:
            return state, batch, rows
        carry = jax.eval_shape(self._start, state, batch, batch)
        return state, batch, batch, rows, structs(carry, self._carry_sharding)

    def put(self, batch: data.Batch) -> Batch:
        """The global batch [rows, S], the same on every host, as the step's arrays [M, B, S]."""
        fields = (
            batch.tokens_BS,
            batch.targets_BS,
            batch.positions_BS,
            batch.segment_ids_BS,
            batch.weights_BS,
            batch.index_B,
        )
        return Batch(*self._batches.put(fields))

    def _step(self, state: State, batch: Batch, rows: PyTree) -> tuple[State, Metrics]:
        params = self.assembly.decoder.cast(state.params)
        loss, grads = self._gradients(params, batch, _scale(batch), self._dropout_key(state.step), rows)
        return self._update(state, loss, grads, batch)

    def _update(self, state: State, loss: jax.Array, grads: PyTree, batch: Batch) -> tuple[State, Metrics]:
        return self.updated(state, loss, grads, jnp.sum(batch.weights > 0, dtype=jnp.int32))

    def _on_both(self, function: Callable) -> Callable:
        """`function(versions, batch, scale, key, ...)` of `Program.stream`, of a state and two steps' batches."""

        def on_both(state: State, before: Batch, now: Batch, *rest: PyTree) -> Any:
            versions = [state.previous, state.params][-self.assembly.program.versions :]
            both = jax.tree.map(lambda one, other: jnp.concatenate([one, other]), before, now)
            keys = [self._dropout_key(state.step + later) for later in (0, 1)]
            key = jax.tree.map(lambda *pair: jnp.stack(pair), *keys)
            scale = jnp.stack([_scale(before), _scale(now)])
            return function([self.assembly.decoder.cast(one) for one in versions], both, scale, key, *rest)

        return on_both

    def _dropout_key(self, step: jax.Array) -> jax.Array | None:
        config, lora = self.assembly.config, self.assembly.config.model.lora
        drops = config.model.dropout or (lora and lora.dropout)
        key = jax.random.fold_in(jax.random.key(config.run.seed), 1) if drops else None
        return None if key is None else jax.random.fold_in(key, step)


def _scale(batch: Batch) -> jax.Array:
    return 1.0 / jnp.maximum(batch.weights.sum(), 1.0)

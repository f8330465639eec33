"""One optimizer step as one XLA program: the pipeline's gradients, clipping, AdamW.

Shapes: M microbatches, B sequences of a microbatch, S sequence; layer leaves [P, V, J, ...] (`schedules.stages`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshsys import data
from meshsys.assemble import Assembly
from meshsys.optimizer import learning_rate, make_optimizer
from meshsys.sharding import BATCH_AXES, canonical_specs, named, training_specs
from models import Batch

__all__ = ["Metrics", "State", "Step"]

PyTree = Any


class State(NamedTuple):
    """What a step changes and a checkpoint keeps; `step` is the number of steps taken (int32 scalar)."""

    step: jax.Array
    params: PyTree
    opt_state: PyTree


class Metrics(NamedTuple):
    """Scalars of a step, float32; `squares` are the gradients' sums of squares, one a layer and parameter."""

    loss: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    tokens: jax.Array
    finite: jax.Array
    squares: PyTree


class Step:
    """The compiled step of an assembly on a mesh, and the shardings of its state.

    Nothing is put on a device before the first step is taken, so a mesh of devices that are not there
    (`jax.experimental.topologies`) will do for `lower`.
    """

    def __init__(self, assembly: Assembly, mesh: Mesh):
        self.assembly, self.mesh = assembly, mesh
        config = assembly.config
        self._optimizer = make_optimizer(config.train)
        decoder, layout = assembly.decoder, assembly.program.layout
        axes = decoder.logical_axes()
        shapes = jax.eval_shape(decoder.init, jax.eval_shape(jax.random.key, 0))
        self._specs = training_specs(axes, shapes, assembly.axes)
        self._layout = layout
        self.shardings = self._state_shardings(
            self._specs, jax.eval_shape(lambda params: self._staged(params), shapes)
        )
        self.canonical_shardings = self._state_shardings(canonical_specs(axes, shapes, assembly.axes), shapes)
        self.canonical_shapes = jax.eval_shape(self._new_state, shapes)
        self._gradients = assembly.program.value_and_grad(
            assembly.model, mesh, self._specs, batch_axes=BATCH_AXES, gather=config.pipeline.fsdp_gather
        )
        replicated = NamedSharding(mesh, PartitionSpec())
        self._batch_sharding = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))
        self._rows_sharding = NamedSharding(mesh, PartitionSpec(None, "pipe"))
        self._compiled: jax.stages.Compiled | None = None
        self._run = jax.jit(
            self._step,
            donate_argnums=0,
            out_shardings=(self.shardings, replicated),
        )

    # --- State ----------------------------------------------------------------------------------------------

    def init(self) -> State:
        """The state at step 0; parameters depend on the seed and the model alone."""
        key = jax.random.key(self.assembly.config.run.seed)

        def make() -> State:
            return self._new_state(self._staged(self.assembly.decoder.init(jax.random.fold_in(key, 0))))

        # Random numbers are most of what XLA compiles on CPU, and it runs once: do not optimise it.
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        options = {"xla_backend_optimization_level": 0} if on_cpu else None
        return jax.jit(make, out_shardings=self.shardings, compiler_options=options)()

    def to_canonical(self, state: State) -> State:
        """The state by global layer, as checkpoints hold it."""
        return jax.jit(
            lambda state: _on_layers(state, self._layout.to_layers), out_shardings=self.canonical_shardings
        )(state)

    def from_canonical(self, state: State) -> State:
        return jax.jit(lambda state: _on_layers(state, self._layout.to_stages), out_shardings=self.shardings)(state)

    def _staged(self, params: PyTree) -> PyTree:
        return _on_layers(params, self._layout.to_stages)

    def _new_state(self, params: PyTree) -> State:
        return State(jnp.zeros((), jnp.int32), params, self._optimizer.init(params))

    def _state_shardings(self, specs: PyTree, params: PyTree) -> State:
        replicated: Any = PartitionSpec()
        opt_state = jax.eval_shape(self._optimizer.init, params)
        opt_specs = optax.tree.map_params(
            self._optimizer,
            lambda _, spec: spec,
            opt_state,
            specs,
            transform_non_params=lambda _: replicated,
        )
        return named(self.mesh, State(replicated, specs, opt_specs))

    # --- Step -----------------------------------------------------------------------------------------------

    @cached_property
    def _rows(self) -> PyTree:
        return jax.device_put(self.assembly.program.rows(), self._rows_sharding)

    def __call__(self, state: State, batch: data.Batch) -> tuple[State, Metrics]:
        """Takes one step; the state given is consumed."""
        run = self._run if self._compiled is None else self._compiled
        return run(state, self.put(batch), self._rows)

    def compile(self) -> None:
        """Compiles the step, so that the first one takes no longer than the others."""
        self._compiled = self.lower().compile()

    def lower(self) -> jax.stages.Lowered:
        """The step for abstract arguments, for its compiler figures."""
        return self._run.lower(*self.abstract_arguments())

    def abstract_arguments(self) -> tuple[State, Batch, PyTree]:
        """Shapes and shardings of the step's arguments."""
        state = jax.eval_shape(lambda params: self._new_state(self._staged(params)), self.canonical_shapes.params)
        state = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            state,
            self.shardings,
        )
        config = self.assembly.config
        shape = (config.pipeline.microbatches, self.assembly.microbatch_size)

        def struct(dtype: Any, *rest: int) -> Any:
            return jax.ShapeDtypeStruct((*shape, *rest), dtype, sharding=self._batch_sharding)

        length = config.data.sequence_length
        ints = struct(jnp.int32, length)
        batch = Batch(ints, ints, ints, ints, struct(jnp.float32, length), struct(jnp.int32))
        rows = jax.tree.map(
            lambda column: jax.ShapeDtypeStruct(column.shape, column.dtype, sharding=self._rows_sharding),
            self.assembly.program.rows(),
        )
        return state, batch, rows

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
        microbatches = self.assembly.config.pipeline.microbatches

        def one(field: np.ndarray) -> jax.Array:
            whole = field.reshape(microbatches, -1, *field.shape[1:])
            return jax.make_array_from_callback(whole.shape, self._batch_sharding, lambda index: whole[index])

        return Batch(*map(one, fields))

    def _step(self, state: State, batch: Batch, rows: PyTree) -> tuple[State, Metrics]:
        config = self.assembly.config
        key = jax.random.fold_in(jax.random.key(config.run.seed), 1) if config.model.dropout else None
        key = None if key is None else jax.random.fold_in(key, state.step)
        scale = 1.0 / jnp.maximum(batch.weights.sum(), 1.0)
        loss, grads = self._gradients(self.assembly.decoder.cast(state.params), batch, scale, key, rows)
        squares = _on_layers(grads, _squares_by_layer, otherwise=lambda grad: jnp.sum(jnp.square(grad)))
        grad_norm = jnp.sqrt(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(squares)))
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        grads = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, state.params)
        rate = jnp.asarray(learning_rate(config.train)(state.step.astype(jnp.float32)), jnp.float32)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
            updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
        updates = jax.tree.map(lambda update: -rate.astype(update.dtype) * update, updates)
        updated = State(state.step, optax.apply_updates(state.params, updates), opt_state)
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
        metrics = Metrics(
            loss,
            grad_norm,
            rate,
            jnp.sum(batch.weights > 0, dtype=jnp.int32),
            finite,
            squares,
        )
        return kept._replace(step=state.step + 1), metrics

    def first_nonfinite(self, metrics: Metrics) -> str:
        """The loss where it is not finite, and the first parameter whose gradient is not: "layers.3.mlp.gate"."""
        found = [] if np.isfinite(metrics.loss) else ["the loss"]
        layers = _on_layers(metrics.squares, self._layout.to_layers)
        for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(layers)):
            name = [part.key for part in path]
            bad = np.flatnonzero(~np.isfinite(np.asarray(leaf).reshape(-1)))
            if bad.size:
                where = ".".join(["layers", str(bad[0]), *name[1:]] if name[0] == "layers" else name[1:])
                found.append(f"the gradient of {where}")
                break
        return ", ".join(found) or "the norm of the gradient"


def _squares_by_layer(grads: PyTree) -> PyTree:
    return jax.tree.map(lambda grad: jnp.sum(jnp.square(grad), axis=tuple(range(3, grad.ndim))), grads)


def _on_layers(tree: PyTree, on_layers: Callable[[PyTree], PyTree], otherwise: Callable | None = None) -> PyTree:
    """Applies a function to every leaf below a "layers" key, of parameters or of an optimizer's state."""

    def leaf(path: tuple, value: Any) -> Any:
        if any(getattr(part, "key", None) == "layers" for part in path):
            return on_layers(value)
        return value if otherwise is None else otherwise(value)

    return jax.tree_util.tree_map_with_path(leaf, tree)

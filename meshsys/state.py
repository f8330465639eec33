"""What training changes: its state in training form and in that of checkpoints, and how gradients change it.

Layer leaves are [P, V, J, ...] in training form (`schedules.stages`) and [L, ...] in canonical form.
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

from meshsys.assemble import Assembly
from meshsys.errors import ConfigError
from meshsys.optimizer import learning_rate, make_optimizer
from meshsys.pretrained import open_model
from meshsys.sharding import BATCH_AXES, KEPT_AXES, canonical_specs, named, training_specs
from models.parameters import LORA_PARAMETERS, VALUE_HEAD
from models.pretrained import PretrainedError, fill
from schedules.collectives import is_spec

__all__ = ["Metrics", "State", "StateForms", "structs"]

PyTree = Any


class State(NamedTuple):
    """What a step changes and a checkpoint keeps.

    Attributes:
        step: the number of steps taken, an int32 scalar.
        previous: without a flush, the parameters before the last step, which the microbatches in flight began with.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    previous: PyTree = None


class Metrics(NamedTuple):
    """Scalars of a step, float32; `squares` are the gradients' sums of squares, one a layer and parameter."""

    loss: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    tokens: jax.Array
    finite: jax.Array
    squares: PyTree


class StateForms:
    """The state of an assembly on a mesh: its forms, its shardings, its beginning and its updates.

    Nothing is put on a device before it is asked for, so a mesh of devices that are not there
    (`jax.experimental.topologies`) will do for shapes.

    Attributes:
        specs: `PartitionSpec`s of the parameters in training form.
        shardings: of the state in training form.
    """

    def __init__(self, assembly: Assembly, mesh: Mesh):
        self.assembly, self.mesh = assembly, mesh
        self._optimizer = make_optimizer(assembly.config.train)
        self._streams = bool(assembly.program.period)
        decoder = assembly.decoder
        axes = decoder.logical_axes()
        shapes = jax.eval_shape(decoder.init, jax.eval_shape(jax.random.key, 0))
        self.specs = training_specs(axes, shapes, assembly.axes)
        self._layout = assembly.program.layout
        self.shardings = self._state_shardings(self.specs, jax.eval_shape(lambda params: self._staged(params), shapes))
        self._canonical_shardings = self._state_shardings(canonical_specs(axes, shapes, assembly.axes), shapes)
        self._canonical_shapes = jax.eval_shape(self._new_state, shapes)

    @property
    def program_options(self) -> dict[str, Any]:
        """How the mesh's axes divide a program's batch and weights, as arguments of `schedules.program.Program`'s."""
        gather, context = self.assembly.config.pipeline.fsdp_gather, self.assembly.axes["context"]
        axes = {"batch_axes": BATCH_AXES, "keep": KEPT_AXES, "context_axis": "context" if context > 1 else None}
        return axes | {"gather": gather}

    def init(self) -> State:
        """The state at step 0; parameters depend on the seed and the model alone, or are those of `model.pretrained`.

        Raises:
            ConfigError: its file is damaged.
        """
        key = jax.random.key(self.assembly.config.run.seed)

        def make(read: PyTree) -> State:
            params = self._staged(self.assembly.decoder.init(jax.random.fold_in(key, 0)))
            return self._new_state(params if read is None else _replaced(params, read))

        # Random numbers are most of what XLA compiles on CPU, and it runs once: do not optimise it.
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        options = {"xla_backend_optimization_level": 0} if on_cpu else None
        run = jax.jit(make, out_shardings=self.shardings, donate_argnums=0, compiler_options=options)
        return run(self._pretrained())

    def _pretrained(self) -> PyTree:
        """The parameters of `model.pretrained` in training form, None for those that its file does not have."""
        source = open_model(self.assembly.config)
        if source is None:
            return None

        def leaf(path: tuple, shape: jax.ShapeDtypeStruct) -> jax.Array | None:
            name = ".".join(part.key for part in path)
            if name.endswith(LORA_PARAMETERS) and source.config.lora is None or name.endswith(f".{VALUE_HEAD}"):
                return None
            layers = self._layout.part(path[1].key).table if path[0].key == "layers" else None
            return fill(source, name, shape, layers)

        shapes = jax.eval_shape(self._staged, self._canonical_shapes.params)
        shapes = structs(shapes, self.shardings.params)
        try:
            return jax.tree_util.tree_map_with_path(leaf, shapes)
        except PretrainedError as error:
            raise ConfigError(f"model.pretrained={self.assembly.config.model.pretrained}: {error}") from None

    def to_canonical(self, state: State) -> State:
        """The state by global layer, as checkpoints hold it."""
        return self._canonically(state)

    @cached_property
    def _canonically(self) -> Callable[[State], State]:  # compiled once, and run at every checkpoint
        return jax.jit(lambda state: _on_layers(state, self._to_layers), out_shardings=self._canonical_shardings)

    def canonical_programs(self, dtypes: PyTree) -> PyTree:
        """For each parameter a program that brings it into canonical form and a dtype, as checkpoints shard it.

        They are apart so that no more than one parameter is held twice.
        """

        def program(path: tuple, dtype: np.dtype, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
            def run(leaf: jax.Array) -> jax.Array:
                whole = self._to_layers(path[1].key, leaf) if path[0].key == "layers" else leaf
                return whole.astype(dtype)

            return jax.jit(run, out_shardings=sharding)

        return jax.tree_util.tree_map_with_path(program, dtypes, self._canonical_shardings.params)

    def canonical(self, *, previous: bool) -> State:
        """Shapes and shardings of a state by global layer, with or without what a schedule without a flush adds."""
        shapes, shardings = self._canonical_shapes, self._canonical_shardings
        shapes = shapes._replace(previous=shapes.params if previous else None)
        return structs(shapes, shardings._replace(previous=shardings.params if previous else None))

    def from_canonical(self, state: State) -> State:
        """The state in training form; what was in flight under another schedule is left out."""
        last = state.params if state.previous is None else state.previous
        state = state._replace(previous=last if self._streams else None)
        return jax.jit(lambda state: _on_layers(state, self._to_stages), out_shardings=self.shardings)(state)

    def _staged(self, params: PyTree) -> PyTree:
        return _on_layers(params, self._to_stages)

    def _to_stages(self, part: str, leaf: jax.Array) -> jax.Array:
        return self._layout.part(part).to_stages(leaf)

    def _to_layers(self, part: str, leaf: jax.Array) -> jax.Array:
        return self._layout.part(part).to_layers(leaf)

    def _new_state(self, params: PyTree) -> State:
        previous = params if self._streams else None
        return State(jnp.zeros((), jnp.int32), params, self._optimizer.init(self._optimized(params)), previous)

    def _trained(self, params: PyTree) -> PyTree:
        """The parameters, or what stands in their place, that have gradients; None for the others."""
        return self.assembly.model.only_trained(params)

    def _optimized(self, params: PyTree) -> PyTree:
        """Of these, those that the optimizer moves: routers' biases follow their load instead."""
        return _without(self._trained(params), "router_bias")

    def _state_shardings(self, specs: PyTree, params: PyTree) -> State:
        replicated: Any = PartitionSpec()
        opt_state = jax.eval_shape(self._optimizer.init, self._optimized(params))
        opt_specs = optax.tree.map_params(
            self._optimizer,
            lambda _, spec: spec,
            opt_state,
            self._optimized(specs),
            transform_non_params=lambda _: replicated,
        )
        return named(self.mesh, State(replicated, specs, opt_specs, specs if self._streams else None))

    def abstract_state(self) -> State:
        """Shapes and shardings of a state in training form."""
        state = jax.eval_shape(lambda params: self._new_state(self._staged(params)), self._canonical_shapes.params)
        return structs(state, self.shardings)

    def updated(
        self, state: State, loss: jax.Array, grads: PyTree, tokens: jax.Array, allowed: jax.Array | None = None
    ) -> tuple[State, Metrics]:
        """The state after a step with these gradients, which is not taken where one is not finite.

        Args:
            tokens: that the loss is of.
            allowed: a bool; the step is not taken where it is false either.
        """
        config = self.assembly.config
        loads, grads = grads, _without(grads, "router_bias")
        squares = _on_layers(grads, _squares_by_layer, otherwise=lambda grad: jnp.sum(jnp.square(grad)))
        grad_norm = jnp.sqrt(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(squares)))
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        params = self._optimized(state.params)
        grads = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, params)
        rate = jnp.asarray(learning_rate(config.train)(state.step.astype(jnp.float32)), jnp.float32)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
            updates, opt_state = self._optimizer.update(grads, state.opt_state, params)
        updates = jax.tree.map(lambda update: -rate.astype(update.dtype) * update, updates)
        if config.model.moe and config.model.moe.router_bias:
            updates = _balanced(updates, loads, config.model.moe.bias_rate)
        updated = state._replace(params=_updated(state.params, updates), opt_state=opt_state)
        taken = finite if allowed is None else finite & allowed
        kept = jax.tree.map(lambda new, old: jnp.where(taken, new, old), updated, state)
        kept = kept._replace(previous=state.params if self._streams else None)
        metrics = Metrics(
            loss,
            grad_norm,
            rate,
            tokens,
            finite,
            squares,
        )
        return kept._replace(step=state.step + 1), metrics

    def first_nonfinite(self, metrics: Metrics) -> str:
        """The loss where it is not finite, and the first parameter whose gradient is not: "layers.3.mlp.gate"."""
        found = [] if np.isfinite(metrics.loss) else ["the loss"]
        layers = _on_layers(metrics.squares, self._to_layers)
        for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(layers)):
            name = [part.key for part in path]
            bad = np.flatnonzero(~np.isfinite(np.asarray(leaf).reshape(-1)))
            if bad.size:
                where = ".".join(["layers", str(bad[0]), *name[1:]] if name[0] == "layers" else name[1:])
                found.append(f"the gradient of {where}")
                break
        return ", ".join(found) or "the norm of the gradient"


def structs(tree: PyTree, shardings: PyTree) -> PyTree:
    """Shapes and dtypes with their shardings: one for each leaf, or one for all."""
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings
    )


def _squares_by_layer(_: str, grad: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(grad), axis=tuple(range(3, grad.ndim)))


def _without(params: PyTree, name: str) -> PyTree:
    """The tree with None in place of parameters of this name."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: None if path[-1].key == name else leaf, params, is_leaf=is_spec
    )


def _balanced(updates: PyTree, loads: PyTree, rate: float) -> PyTree:
    """Updates with those of the routers' biases: against the sign of the load's excess (Wang et al. 2024)."""

    def leaf(path: tuple, update: jax.Array | None, load: jax.Array | None) -> jax.Array | None:
        return -rate * jnp.sign(load) if load is not None and path[-1].key == "router_bias" else update

    return jax.tree_util.tree_map_with_path(leaf, updates, loads, is_leaf=_is_none)


def _updated(params: PyTree, updates: PyTree) -> PyTree:
    """Parameters with their updates added; those without one stay."""

    def leaf(update: jax.Array | None, param: jax.Array) -> jax.Array:
        return param if update is None else param + update.astype(param.dtype)

    return jax.tree.map(leaf, updates, params, is_leaf=_is_none)


def _replaced(params: PyTree, others: PyTree) -> PyTree:
    """Parameters, with others in place of those that there are others for."""
    return jax.tree.map(lambda other, own: own if other is None else other, others, params, is_leaf=_is_none)


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _on_layers(
    tree: PyTree, on_layers: Callable[[str, Any], Any], otherwise: Callable[[Any], Any] | None = None
) -> PyTree:
    """Applies a function of its part's name and itself to every leaf below a "layers" key.

    The tree is of parameters or an optimizer's state.
    """

    def leaf(path: tuple, value: Any) -> Any:
        keys: list[Any] = [getattr(part, "key", None) for part in path]
        if "layers" in keys:
            return on_layers(keys[keys.index("layers") + 1], value)
        return value if otherwise is None else otherwise(value)

    return jax.tree_util.tree_map_with_path(leaf, tree)

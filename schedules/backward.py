"""The backward of one block, cut into recomputation R, input gradient I and weight gradient W.

`jax.vjp` gives the forward and the backward of a block (a layer, the embedding, the head) as jaxprs.
Both are inlined into one flat list of equations, which is then cut twice, each time where the fewest bytes cross:

- between F and the backward: the values that cross are the *residuals*;
- between I and W: W gets the matmuls that only the parameters' gradients need, I gets the rest, and what
  W needs of it is the *stash* (or a residual that is kept until W).

Recomputation is a part of I, or cut off as an action of its own (`apart`): R makes what the policy did not keep, and
the values that cross to I and W are the *recomputed* ones.

Only cheap equations (elementwise, rearrangements) may be repeated on the far side of a cut; a matmul runs
once. So F + I + W has the FLOPs of one plain backward, where calling the VJP twice, once for each half,
repeats the chain of input gradients. Values that depend on parameters and auxiliary inputs alone (a cast
weight, a mask) never cross: every action has those inputs.

What F keeps and what is recomputed is JAX's own partial evaluation under the block's `jax.checkpoint` policy. The
cut itself is the minimum vertex cut of rematerialising compilers (Chen et al. 2016; AOTAutograd's
partitioner), here with up to three boundaries instead of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import networkx as nx

from schedules.actions import Kind

__all__ = ["Crossing", "SplitBlock", "split"]

PyTree = Any

# Calls whose body is inlined; anything else with a sub-jaxpr (scan, while, cond) stays one equation.
_CALLS = frozenset({"pjit", "jit", "remat", "remat2", "checkpoint", "closed_call", "core_call", "custom_jvp_call"})
# Elementwise or mere rearrangement: cheaper to repeat than to hand over, where that takes fewer bytes.
_CHEAP = frozenset(
    """
    add add_any and broadcast_in_dim convert_element_type copy div eq expand_dims gather ge gt integer_pow le lt max min
    mul name ne neg not one_minus_square or reduce_precision reshape select_n sign square squeeze sub transpose
    """.split()
)
# Cheap enough to run in I or in W, whichever hands over fewer bytes, but not twice.
_LIGHT = _CHEAP | frozenset(
    """
    concatenate cos cumsum dynamic_slice erf exp exp2 expm1 log log1p logistic max pad pow reduce_and reduce_max
    reduce_min reduce_or reduce_sum rev rsqrt sin slice sort split sqrt tanh
    """.split()
)
# What a policy wraps around a value that it keeps.
_SAME_VALUE = frozenset({"device_put", "name", "reduce_precision"})


@dataclass(frozen=True)
class Crossing:
    """A value that one action leaves for another.

    Attributes:
        aval: shape, dtype and memory space.
        name: the model's name for it (`jax.ad_checkpoint.checkpoint_name`), or what computed it.
        for_input: I reads it.
        for_weight: W reads it.
        for_recompute: R reads it.
    """

    aval: Any
    name: str
    for_input: bool
    for_weight: bool
    for_recompute: bool = False

    def read_by(self, reader: Kind) -> bool:
        return {Kind.R: self.for_recompute, Kind.I: self.for_input, Kind.W: self.for_weight}[reader]

    @property
    def until(self) -> Kind:
        """The last action that reads it."""
        return next(kind for kind in (Kind.W, Kind.I, Kind.R) if self.read_by(kind))

    @property
    def bytes(self) -> int:
        return math.prod(self.aval.shape) * self.aval.dtype.itemsize

    @property
    def on_host(self) -> bool:
        return _on_host(self.aval)


@dataclass(frozen=True)
class SplitBlock:
    """The programs of a block; made by `split`.

    Attributes:
        residuals: what F leaves for R, I and W.
        recomputed: what R leaves for I and W; nothing unless it is apart.
        stash: what I leaves for W.
    """

    residuals: tuple[Crossing, ...]
    recomputed: tuple[Crossing, ...]
    stash: tuple[Crossing, ...]
    _forward: _Program
    _recompute: _Program
    _input: _Program
    _weight: _Program
    _output: Any
    _input_tree: Any
    _weight_tree: Any
    _weight_used: tuple[bool, ...]

    @property
    def outputs(self) -> int:
        """Leaves of what the block returns."""
        return self._output.num_leaves

    def forward(self, params: PyTree, x: PyTree, aux: PyTree) -> tuple[PyTree, list[jax.Array]]:
        """Returns the block's output and the residuals."""
        out = self._forward(params=params, x=x, aux=aux)
        count = self._output.num_leaves
        return jax.tree.unflatten(self._output, out[:count]), out[count:]

    def recompute(self, params: PyTree, aux: PyTree, residuals: Sequence[jax.Array | None]) -> list[jax.Array]:
        """Returns the recomputed values. Here and below, values that the action does not read may be None."""
        return self._recompute(params=params, aux=aux, residuals=residuals)

    def input_gradient(
        self,
        params: PyTree,
        aux: PyTree,
        residuals: Sequence[jax.Array | None],
        dy: PyTree,
        recomputed: Sequence[jax.Array | None] = (),
    ) -> tuple[PyTree, list[jax.Array]]:
        """Returns the gradient of the input and the stash."""
        out = self._input(params=params, aux=aux, residuals=residuals, recomputed=recomputed, dy=dy)
        count = self._input_tree.num_leaves
        return jax.tree.unflatten(self._input_tree, out[:count]), out[count:]

    def weight_gradient(
        self,
        params: PyTree,
        aux: PyTree,
        residuals: Sequence[jax.Array | None],
        stash: Sequence[jax.Array],
        recomputed: Sequence[jax.Array | None] = (),
    ) -> PyTree:
        """Returns the gradient of the parameters, None for one that the block does not use."""
        out = iter(self._weight(params=params, aux=aux, residuals=residuals, recomputed=recomputed, stash=stash))
        return jax.tree.unflatten(self._weight_tree, [next(out) if used else None for used in self._weight_used])


@dataclass(frozen=True)
class _Program:
    """Equations with named groups of input variables."""

    inputs: dict[str, tuple[Any, ...]]
    equations: tuple[Any, ...]
    outputs: tuple[Any, ...]
    constants: dict[Any, Any]

    def __call__(self, **values: PyTree) -> list[jax.Array]:
        env = dict(self.constants)
        for group, variables in self.inputs.items():
            # A value that this program does not read may be None, which is no leaf of a pytree.
            leaves = values[group] if group in ("residuals", "recomputed") else jax.tree.leaves(values[group])
            env.update(zip(variables, leaves, strict=True))
        _run(self.equations, env)
        return [_read(atom, env) for atom in self.outputs]


def split(
    block: Callable,
    params: PyTree,
    x: PyTree,
    aux: PyTree,
    *,
    policy: Callable | None | str,
    apart: bool = False,
    has_aux: bool = False,
) -> SplitBlock:
    """Cuts a block's backward.

    Args:
        block: `block(params, x, aux) -> y`, pure; `params` and `x` are pytrees of floating arrays,
            `x` may be empty (`()`), `aux` is anything that needs no gradient.
        params, x, aux: arrays or `jax.ShapeDtypeStruct`s.
        policy: "none" keeps every residual, None recomputes everything (`jax.checkpoint`'s default),
            otherwise a `jax.checkpoint` policy.
        apart: cut off R from I and W.
        has_aux: the block returns `(y, more)`, and nothing differentiates `more`; `forward` returns the pair.
    """
    params, x, aux = jax.tree.map(_abstract, (params, x, aux))
    function = block if isinstance(policy, str) else jax.checkpoint(block, policy=policy)

    def both(params: PyTree, x: PyTree, aux: PyTree, dy: PyTree) -> PyTree:
        trees: dict[str, Any] = {}

        def forward(params: PyTree, x: PyTree, aux: PyTree) -> PyTree:
            y, vjp, *more = jax.vjp(lambda params, x: function(params, x, aux), params, x, has_aux=has_aux)  # type: ignore[call-overload]
            leaves, trees["vjp"] = jax.tree.flatten(vjp)
            return (y, *more), leaves

        out, leaves = _inline(forward, params, x, aux)
        d_params, d_x = _inline(lambda leaves, dy: jax.tree.unflatten(trees["vjp"], leaves)(dy), leaves, dy)
        return out, leaves, d_x, d_params

    out = jax.eval_shape(block, params, x, aux)
    y = out[0] if has_aux else out
    closed, shapes = jax.make_jaxpr(both, return_shape=True)(params, x, aux, y)
    inputs = _take(closed.jaxpr.invars, [len(jax.tree.leaves(part)) for part in (params, x, aux, y)])
    outputs = _take(closed.jaxpr.outvars, [len(jax.tree.leaves(part)) for part in shapes])
    return _cut(
        _Graph(closed.jaxpr.eqns, closed.jaxpr.invars),
        dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)),
        **dict(zip(("params", "x", "aux", "dy"), inputs, strict=True)),
        **dict(zip(("y", "leaves", "dx", "dparams"), outputs, strict=True)),
        trees=tuple(jax.tree.structure(part) for part in (out, x, params)),
        apart=apart,
    )


def _cut(
    graph: _Graph,
    constants: dict[Any, Any],
    *,
    params: tuple,
    x: tuple,
    aux: tuple,
    dy: tuple,
    y: tuple,
    leaves: tuple,
    dx: tuple,
    dparams: tuple,
    trees: tuple,
    apart: bool,
) -> SplitBlock:
    """`params`, `x`, `aux`, `dy` are input variables; `y`, `leaves` (of the VJP), `dx`, `dparams` are outputs."""
    known = graph.descendants_only([*params, *aux, *constants])
    from_dy = graph.descendants(dy)
    # A gradient that depends on no cotangent is zero.
    used = tuple(atom in from_dy for atom in map(_variable_or_none, dparams))
    dparams = tuple(atom for atom, is_used in zip(dparams, used, strict=True) if is_used)

    forward = graph.ancestors([*y, *leaves])
    made_by_forward = graph.outputs(forward) | set(x)
    backward = graph.ancestors([*dx, *dparams]) - forward
    residuals = graph.minimum_cut(
        graph.reads(backward, dx, dparams) & made_by_forward - known, known=known, repeatable=graph.among(_CHEAP)
    )

    # R runs what depends on no cotangent.
    left = residuals
    if apart:
        after = {index for index in backward if graph.outputs({index}) & from_dy}
        left = graph.minimum_cut(
            graph.reads(after, dx, dparams) - from_dy - known,
            known=known,
            repeatable=graph.among(_CHEAP),
            fixed=residuals,
        )
    recomputed = [v for v in left if v not in residuals]

    # W runs the heavy equations that only parameters need, and whatever follows from them.
    for_weight = graph.ancestors(dparams) - forward - graph.ancestors(dx)
    from_dy_only = {index for index in for_weight if graph.outputs({index}) & from_dy}
    heavy = from_dy_only - graph.among(_LIGHT)
    weight = {index for index in from_dy_only if graph.outputs({index}) & graph.descendants(graph.outputs(heavy))}
    crossing = graph.minimum_cut(
        graph.reads(weight, dparams) - graph.outputs(weight) - known,
        known=known,
        repeatable=(graph.among(_CHEAP) | from_dy_only) - weight,
        fixed=[*residuals, *left],
    )
    stash = [v for v in crossing if v not in residuals and v not in left]

    def program(inputs: dict[str, tuple[Any, ...]], outputs: Sequence[Any]) -> _Program:
        given = {v for group in inputs.values() for v in group}
        equations = graph.ancestors(outputs, stop=given)
        return _Program(inputs, tuple(graph.equations[index] for index in sorted(equations)), tuple(outputs), constants)

    inputs = {"params": params, "aux": aux}
    kept = inputs | {"residuals": tuple(residuals)}
    again = kept | {"recomputed": tuple(recomputed)}
    stop = {*residuals, *recomputed}
    for_input = graph.reads(graph.ancestors([*dx, *stash], stop=stop), dx, stash)
    for_recompute = graph.reads(graph.ancestors(recomputed, stop=residuals))

    def crossings(variables: Sequence[Any]) -> tuple[Crossing, ...]:
        return tuple(
            Crossing(v.aval, graph.name(v), v in for_input, v in crossing, v in for_recompute) for v in variables
        )

    return SplitBlock(
        residuals=crossings(residuals),
        recomputed=crossings(recomputed),
        stash=tuple(Crossing(v.aval, graph.name(v), False, True) for v in stash),
        _forward=program(inputs | {"x": x}, [*y, *residuals]),
        _recompute=program(kept, recomputed),
        _input=program(again | {"dy": dy}, [*dx, *stash]),
        _weight=program(again | {"stash": tuple(stash)}, dparams),
        _output=trees[0],
        _input_tree=trees[1],
        _weight_tree=trees[2],
        _weight_used=used,
    )


class _Graph:
    """A flat list of equations, addressed by index, with their producers."""

    def __init__(self, equations: Sequence[Any], inputs: Sequence[Any]):
        self.equations = list(equations)
        everything = [*inputs, *(v for equation in self.equations for v in equation.outvars)]
        self._order = {v: position for position, v in enumerate(everything)}
        self._producer = {v: index for index, equation in enumerate(self.equations) for v in equation.outvars}
        self._names: dict[Any, str] = {}
        for equation in self.equations:
            source = next((atom for atom in equation.invars if _is_variable(atom)), None)
            if equation.primitive.name == "name":
                self._names[source] = equation.params["name"]
            if equation.primitive.name in _SAME_VALUE and source in self._names:
                self._names[equation.outvars[0]] = self._names[source]

    def _inputs(self, index: int) -> list[Any]:
        return [atom for atom in self.equations[index].invars if _is_variable(atom)]

    def among(self, primitives: frozenset[str]) -> set[int]:
        return {index for index, equation in enumerate(self.equations) if equation.primitive.name in primitives}

    def reads(self, equations: Iterable[int], *outputs: Iterable[Any]) -> set[Any]:
        """What the equations read, and the output variables themselves."""
        read = {v for index in equations for v in self._inputs(index)}
        return read | {atom for group in outputs for atom in group if _is_variable(atom)}

    def outputs(self, equations: Iterable[int]) -> set[Any]:
        return {v for index in equations for v in self.equations[index].outvars}

    def descendants(self, variables: Iterable[Any]) -> set[Any]:
        """The given variables and all that depend on one of them."""
        found = set(variables)
        for index, equation in enumerate(self.equations):
            if any(v in found for v in self._inputs(index)):
                found.update(equation.outvars)
        return found

    def descendants_only(self, variables: Iterable[Any]) -> set[Any]:
        """The given variables and all that depend on them alone."""
        found = set(variables)
        for index, equation in enumerate(self.equations):
            if all(v in found for v in self._inputs(index)):
                found.update(equation.outvars)
        return found

    def ancestors(self, atoms: Iterable[Any], *, stop: Iterable[Any] = ()) -> set[int]:
        """The equations that the atoms need, not looking behind `stop`."""
        found: set[int] = set()
        stop = set(stop)
        todo = [atom for atom in atoms if _is_variable(atom)]
        while todo:
            variable = todo.pop()
            index = self._producer.get(variable)
            if variable in stop or index is None or index in found:
                continue
            found.add(index)
            todo.extend(self._inputs(index))
        return found

    def minimum_cut(
        self, wanted: set[Any], *, known: set[Any], repeatable: set[int], fixed: Iterable[Any] = ()
    ) -> list[Any]:
        """The variables to hand over, fewest bytes, from which repeatable equations give all that is wanted.

        Args:
            wanted: what must be there on the far side.
            known: there already.
            repeatable: equations that may run on the far side.
            fixed: variables at which to stop, whatever made them.
        """
        # Nodes are integers, so that the cut does not depend on hashes, which differ from process to process.
        near, far = -1, -2
        network = nx.DiGraph()
        network.add_nodes_from([near, far])
        fixed = set(fixed)
        todo, seen = self._sorted(wanted), set(wanted)
        for variable in todo:
            network.add_edge(2 * self._order[variable] + 1, far)
        while todo:
            variable = todo.pop()
            node = 2 * self._order[variable]
            # One byte more for each value, so that of equal cuts the one with fewer values wins.
            network.add_edge(node, node + 1, capacity=_bytes(variable.aval) + 1)
            index = self._producer.get(variable)
            if index is None or variable in fixed or index not in repeatable:
                network.add_edge(near, node)
                continue
            for source in self._inputs(index):
                if source in known:
                    continue
                network.add_edge(2 * self._order[source] + 1, node)
                if source not in seen:
                    seen.add(source)
                    todo.append(source)
        _, (reached, _) = nx.minimum_cut(network, near, far)
        return self._sorted(v for v in seen if 2 * self._order[v] in reached and 2 * self._order[v] + 1 not in reached)

    def _sorted(self, variables: Iterable[Any]) -> list[Any]:
        return sorted(variables, key=self._order.__getitem__)

    def name(self, variable: Any) -> str:
        """The model's name for a value, else the primitive that made it, else "input"."""
        while variable not in self._names:
            index = self._producer.get(variable)
            if index is None:
                return "input"
            if self.equations[index].primitive.name not in _SAME_VALUE:
                return self.equations[index].primitive.name
            variable = self._inputs(index)[0]
        return self._names[variable]


def _inline(function: Callable, *args: PyTree) -> PyTree:
    """Runs a function with every call in it (jit, remat, ...) replaced by the call's body."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(closed.jaxpr.invars, jax.tree.leaves(args), strict=True))
    _run(closed.jaxpr.eqns, env, inline=True)
    return jax.tree.unflatten(jax.tree.structure(shape), [_read(atom, env) for atom in closed.jaxpr.outvars])


def _run(equations: Iterable[Any], env: dict[Any, Any], *, inline: bool = False) -> None:
    for equation in equations:
        values = [_read(atom, env) for atom in equation.invars]
        if inline and equation.primitive.name in _CALLS:
            outputs = _call(equation, values)
        else:
            with equation.ctx.manager:
                outputs = equation.primitive.bind(*values, **equation.primitive.get_bind_params(equation.params))
        if not equation.primitive.multiple_results:
            outputs = [outputs]
        env.update(zip(equation.outvars, outputs, strict=True))


def _call(equation: Any, values: Sequence[Any]) -> list[Any]:
    body = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    jaxpr, constants = (body.jaxpr, body.consts) if isinstance(body, jex.ClosedJaxpr) else (body, ())
    env = dict(zip(jaxpr.constvars, constants, strict=True))
    env.update(zip(jaxpr.invars, values, strict=True))
    _run(jaxpr.eqns, env, inline=True)
    return [_read(atom, env) for atom in jaxpr.outvars]


def _read(atom: Any, env: dict[Any, Any]) -> Any:
    return atom.val if isinstance(atom, jex.Literal) else env[atom]


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, jex.Literal)


def _variable_or_none(atom: Any) -> Any:
    return atom if _is_variable(atom) else None


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def _on_host(aval: Any) -> bool:
    return "host" in str(getattr(aval, "memory_space", "")).lower()


def _take(items: Sequence[Any], sizes: Sequence[int]) -> list[tuple[Any, ...]]:
    items, parts, start = list(items), [], 0
    for size in sizes:
        parts.append(tuple(items[start : start + size]))
        start += size
    return parts

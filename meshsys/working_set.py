"""The most bytes that a function has in hand while it runs, by liveness over its jaxpr.

XLA fuses elementwise operations, so not every value of a jaxpr is ever in memory. Here a value is if a matrix product,
a reduction or a scatter makes it or reads it, or if it is a result; all others are computed where they are read, from
the values in memory that they depend on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

__all__ = ["working_set"]

# What a fusion takes in: elementwise, and rearrangements that read each element once.
_FUSED = frozenset(
    """
    abs add add_any and broadcast_in_dim clamp concatenate convert_element_type copy cos div dynamic_slice eq exp exp2
    expand_dims expm1 ge gt integer_pow iota is_finite le log log1p logistic lt max min mul name ne neg not
    optimization_barrier or pad pow reduce_precision rem reshape rev rsqrt select_n sign sin slice split sqrt square
    squeeze stop_gradient sub tan tanh transpose
    """.split()
)


def working_set(
    function: Callable,
    *args: Any,
    size: Callable[[Any], int],
    held: int = 0,
    kept: int | None = None,
    operand: int | None = None,
) -> int:
    """Bytes at the worst moment, of what the function computes and of its last `held` argument leaves.

    Args:
        args: arrays or `jax.ShapeDtypeStruct`s.
        size: bytes of a value, given its shape and dtype.
        held: how many of the last argument leaves count, until they are last read. The others are in memory anyway.
        kept: how many of the first results count, all if None. The others are made where they stay.
        operand: the most bytes of an element of what only matrix products read, None for as many as it has.
    """
    closed = jax.make_jaxpr(function)(*args)
    equations, outputs = _flat(closed.jaxpr, {})
    given = closed.jaxpr.invars
    counted = set(given[len(given) - held :])
    away = {variable for variable in outputs[len(outputs) if kept is None else kept :] if _is_variable(variable)}
    results = [variable for variable in outputs if _is_variable(variable)]
    narrow = set() if operand is None else _only_multiplied(equations) - set(results) - set(given)

    def bytes_of(variable: Any) -> int:
        if variable in away:
            return 0
        whole, width = size(variable.aval), variable.aval.dtype.itemsize
        return whole * min(width, operand) // width if operand is not None and variable in narrow else whole

    return _peak(equations, counted, set(given), results, bytes_of)


def _only_multiplied(equations: list[tuple[Any, list, list]]) -> set[Any]:
    """What elementwise operations make and only matrix products read."""
    multiplied: set[Any] = set()
    others: set[Any] = set()
    made: set[Any] = set()
    for equation, inputs, outputs in equations:
        product = equation.primitive.name == "dot_general"
        (multiplied if product else others).update(filter(_is_variable, inputs))
        made.update(outputs if equation.primitive.name in _FUSED else ())
    return multiplied & made - others


def _flat(jaxpr: Any, names: dict[Any, Any]) -> tuple[list[tuple[Any, list, list]], list]:
    """(equation, inputs, outputs) with calls inlined."""
    found: list[tuple[Any, list, list]] = []

    def read(atom: Any) -> Any:
        return names.get(atom, atom) if _is_variable(atom) else atom

    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if inner is not None and equation.primitive.name not in ("scan", "while", "cond", "shard_map"):
            body = getattr(inner, "jaxpr", inner)
            below = dict(zip(body.invars, map(read, equation.invars), strict=False))
            equations, outputs = _flat(body, below)
            found += equations
            names.update(zip(equation.outvars, outputs, strict=False))
        else:
            found.append((equation, [read(a) for a in equation.invars], list(equation.outvars)))
    return found, [read(a) for a in jaxpr.outvars]


def _peak(
    equations: list[tuple[Any, list, list]], given: set, arguments: set, outputs: list, size: Callable[[Any], int]
) -> int:
    heavy_inputs = {
        atom
        for equation, inputs, _ in equations
        if equation.primitive.name not in _FUSED
        for atom in inputs
        if _is_variable(atom)
    }
    # For each value the values in memory that it is computed from; itself if it is in memory.
    sources: dict[Any, frozenset] = {variable: frozenset([variable]) for variable in arguments}
    steps: list[tuple[list, frozenset]] = []
    for equation, inputs, made in equations:
        read: frozenset = frozenset().union(*(sources.get(a, frozenset()) for a in inputs if _is_variable(a)))
        stored = []
        for variable in made:
            kept = equation.primitive.name not in _FUSED or variable in outputs
            kept = kept or (variable in heavy_inputs and not _is_view(equation))
            sources[variable] = frozenset([variable]) if kept else read
            stored += [variable] if kept else []
        if stored:
            steps.append((stored, read))
    last: dict[Any, int] = {}
    for place, (stored, read) in enumerate(steps):
        for variable in (*read, *stored):
            last[variable] = place
    for variable in outputs:
        for source in sources.get(variable, ()):
            last[source] = len(steps)
    counted = given | {variable for stored, _ in steps for variable in stored}
    live = sum(size(v) for v in given if v in last)
    peak = live
    ends: dict[int, list] = {}
    for variable, place in last.items():
        ends.setdefault(place, []).append(variable)
    for place, (stored, _) in enumerate(steps):
        live += sum(map(size, stored))
        peak = max(peak, live)
        live -= sum(size(variable) for variable in ends.get(place, ()) if variable in counted)
    return peak


def _is_view(equation: Any) -> bool:
    """A rearrangement that XLA gives as another layout of the same bytes, or reads through."""
    name = equation.primitive.name
    if name == "convert_element_type":
        return False
    return name in ("reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim", "name", "copy", "slice")


def _is_variable(atom: Any) -> bool:
    return not hasattr(atom, "val")


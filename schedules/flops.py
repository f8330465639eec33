"""What the matrix products of a function multiply and move, from its jaxpr."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

__all__ = ["product_flops", "product_traffic"]


def product_flops(function: Callable, *args: Any) -> float:
    """FLOPs of the matrix products of a function, two for each multiplication and addition.

    A conditional counts as its largest branch, a kernel as often as it has steps. A loop whose length is data counts
    as often as `jax.lax.min` with a constant bounds it, and once without a bound.
    """
    return _sum(jax.make_jaxpr(function)(*args).jaxpr, _flops)


def product_traffic(function: Callable, *args: Any) -> float:
    """Bytes of the operands and results of its matrix products, each read or written once."""
    return _sum(jax.make_jaxpr(function)(*args).jaxpr, _bytes)


def _flops(equation: Any) -> float:
    left, right, out = equation.invars[0].aval, equation.invars[1].aval, equation.outvars[0].aval
    ragged = equation.params.get("ragged_dot_dimension_numbers")
    (contracted, _), _ = ragged.dot_dimension_numbers if ragged else equation.params["dimension_numbers"]
    length = float(np.prod([left.shape[i] for i in contracted]))
    if ragged and not ragged.rhs_group_dimensions:  # each row of the contracted dimension is in one group
        return 2.0 * left.size * right.size / length
    return 2.0 * out.size * length


def _bytes(equation: Any) -> float:
    return float(sum(v.aval.size * v.aval.dtype.itemsize for v in (*equation.invars, *equation.outvars)))


def _sum(jaxpr: Any, of_product: Callable[[Any], float]) -> float:
    total = 0.0
    makers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "ragged_dot_general"):
            total += of_product(equation)
        inner = [_sum(inner, of_product) for inner in _inner(equation.params.values())]
        if equation.primitive.name == "cond":
            total += max(inner)  # one branch runs
        else:
            total += sum(inner) * _rounds(equation, makers)
    return total


def _rounds(equation: Any, makers: Mapping[Any, Any]) -> int:
    """How often what is inside of an equation runs, at most; `makers` has the equation of each variable."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return params["length"]
    if name == "pallas_call":
        return math.prod(params["grid_mapping"].grid)
    if name == "while":
        # A `fori_loop` carries its first and last number before anything else.
        carried = equation.invars[params["cond_nconsts"] + params["body_nconsts"] :]
        last = carried[1] if len(carried) > 1 and isinstance(carried[1], jex.Var) else None
        if last in makers and makers[last].primitive.name == "min":
            return min((int(atom.val) for atom in makers[last].invars if isinstance(atom, jex.Literal)), default=1)
    return 1


def _inner(values: Iterable[Any]) -> Iterator[Any]:
    """The jaxprs among an equation's parameters."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _inner(value)
        elif hasattr(value, "eqns"):
            yield getattr(value, "jaxpr", value)

"""What the matrix products of a function multiply and move, from its jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

__all__ = ["product_flops", "product_traffic"]


def product_flops(function: Callable, *args: Any) -> float:
    """FLOPs of the matrix products of a function, two for each multiplication and addition.

    A loop of unknown length counts once, a conditional as its largest branch.
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
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "ragged_dot_general"):
            total += of_product(equation)
        inner = [_sum(inner, of_product) for inner in _inner(equation.params.values())]
        if equation.primitive.name == "cond":
            total += max(inner)  # one branch runs
        else:
            total += sum(inner) * (equation.params["length"] if equation.primitive.name == "scan" else 1)
    return total


def _inner(values: Iterable[Any]) -> Iterator[Any]:
    """The jaxprs among an equation's parameters."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _inner(value)
        elif hasattr(value, "eqns"):
            yield getattr(value, "jaxpr", value)

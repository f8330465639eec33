"""What the matrix products of a function multiply and move, from its jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

__all__ = ["product_flops", "product_traffic"]


def product_flops(function: Callable, *args: Any) -> float:
    """FLOPs of the matrix products of a function, two for each multiplication and addition."""
    return _sum(jax.make_jaxpr(function)(*args).jaxpr, _flops)


def product_traffic(function: Callable, *args: Any) -> float:
    """Bytes of the operands and results of its matrix products, each read or written once."""
    return _sum(jax.make_jaxpr(function)(*args).jaxpr, _bytes)



def _flops(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2.0 * equation.outvars[0].aval.size * float(np.prod([left[i] for i in contracted]))


def _bytes(equation: Any) -> float:
    return float(sum(v.aval.size * v.aval.dtype.itemsize for v in (*equation.invars, *equation.outvars)))


def _sum(jaxpr: Any, of_product: Callable[[Any], float]) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += of_product(equation)
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        total += times * sum(_sum(inner, of_product) for inner in _inner(equation.params.values()))
    return total


def _inner(values: Iterable[Any]) -> Iterator[Any]:
    """The jaxprs among an equation's parameters."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _inner(value)
        elif hasattr(value, "eqns"):
            yield getattr(value, "jaxpr", value)

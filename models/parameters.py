"""Parameters of a module, and products with matrices that may have a low-rank update.

With `ModelConfig.lora` every parameter but the updates and a value head is frozen: no gradient goes to it.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.dropout import Noise
from models.products import product

__all__ = ["LORA_PARAMETERS", "VALUE_HEAD", "parameter", "projected", "trains"]

LORA_PARAMETERS = ("_lora_a", "_lora_b")
"""How the names of an update's two factors end."""

VALUE_HEAD = "value_head"
"""The name of the vector that `Decoder.values` multiplies by."""


def trains(config: ModelConfig, name: str) -> bool:
    """Whether a parameter of this name (the last part of its path) has a gradient."""
    return config.lora is None or name.endswith((*LORA_PARAMETERS, VALUE_HEAD))


def parameter(module: Any, name: str, init: Any, shape: tuple[int, ...], axes: tuple[str, ...]) -> jax.Array:
    """A module's parameter with its logical axis names, in the configured dtype."""
    config: ModelConfig = module.config
    dtype = jnp.dtype(config.param_dtype)
    value = module.param(name, nn.with_logical_partitioning(init, axes), shape, dtype)
    return value if trains(config, name) else jax.lax.stop_gradient(value)


def projected(
    module: Any,
    name: str,
    x: jax.Array,
    sizes: tuple[tuple[int, ...], tuple[int, ...]],
    axes: tuple[tuple[str, ...], tuple[str, ...]],
    noise: Noise | None = None,
) -> jax.Array:
    """`x` [B, S, *inputs] times the module's matrix `name` [*inputs, *outputs], with its bias and low-rank update.

    Args:
        sizes: of the inputs and of the outputs.
        axes: their logical names.
        noise: of the update's dropout; None leaves it out.
    """
    config: ModelConfig = module.config
    dtype, (inputs, outputs) = x.dtype, sizes
    init = nn.initializers.variance_scaling(
        1.0, "fan_in", "truncated_normal", in_axis=tuple(range(len(inputs))), out_axis=tuple(range(-len(outputs), 0))
    )
    matrix = parameter(module, name, init, (*inputs, *outputs), (*axes[0], *axes[1]))
    y = product(x, matrix.astype(dtype), len(inputs))
    lora = config.lora
    if lora is None or name not in lora.targets:
        return y
    uniform = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", in_axis=tuple(range(len(inputs))))
    first = parameter(module, f"{name}_lora_a", uniform, (*inputs, lora.rank), (*axes[0], "lora"))
    zeros = nn.initializers.zeros_init()
    second = parameter(module, f"{name}_lora_b", zeros, (lora.rank, *outputs), ("lora", *axes[1]))
    if noise is not None:
        x = noise.drop(x, lora.dropout, name)
    update = product(product(x, first.astype(dtype), len(inputs)), second.astype(dtype), 1)
    return y + update * jnp.asarray(lora.alpha / lora.rank, dtype)

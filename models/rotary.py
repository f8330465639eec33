"""Rotary positions: the frequencies of a configuration, tables of angles, and the rotation.

Shapes: B batch, S sequence, N heads, H dimensions that are rotated.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig, RopeScaling

__all__ = ["Rotary", "rotary_table", "rotate"]

Rotary = tuple[jax.Array, jax.Array]
"""Cosines and sines, [B, S, H/2] each, float32."""


def rotary_table(positions_BS: jax.Array, config: ModelConfig, *, local: bool = False) -> Rotary:
    """Cosines and sines of the rotary angles (Su et al. 2021).

    Args:
        local: for the layers with a window, where `rope_local_theta` gives them a base of their own.
    """
    theta = config.rope_local_theta if local else config.rope_theta
    frequency, factor = _frequencies(theta, config.rotary_dim, None if local else config.rope_scaling)
    angle = positions_BS[..., None].astype(jnp.float32) * jnp.asarray(frequency, jnp.float32)[None, None]
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x_BSNH: jax.Array, rotary: Rotary) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of each head, the halves convention of Hugging Face checkpoints."""
    cos, sin = (table[:, :, None].astype(x_BSNH.dtype) for table in rotary)
    first, second = jnp.split(x_BSNH, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _frequencies(theta: float, dim: int, scaling: RopeScaling | None) -> tuple[np.ndarray, float]:
    """The angle a position adds to each pair, [dim / 2], and what multiplies cosines and sines."""
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        rotations = scaling.original_length * plain / (2 * math.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept = np.clip((rotations - low) / (high - low), 0.0, 1.0)
        return plain * (kept + (1 - kept) / scaling.factor), 1.0
    return _yarn(plain, theta, dim, scaling)


def _yarn(plain: np.ndarray, theta: float, dim: int, scaling: RopeScaling) -> tuple[np.ndarray, float]:
    """Peng et al. 2023, sections 3.2 to 3.4: fast dimensions keep their frequency, slow ones are stretched."""

    def dimension(rotations: float) -> float:
        """Which pair turns so often within the original context."""
        return dim * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    stretched = np.clip((np.arange(dim // 2) - first) / (last - first or 0.001), 0.0, 1.0)
    frequency = plain * (1 - stretched) + plain / scaling.factor * stretched

    def temperature(exponent: float) -> float:
        return 0.1 * exponent * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    factor = scaling.attention_factor
    if not factor and scaling.mscale and scaling.mscale_all_dim:
        factor = temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return frequency, factor or temperature(1.0)

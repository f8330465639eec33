"""How many parameters a configuration has, and how many of a layer's a token multiplies with."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import jax

from models.config import ModelConfig
from models.decoder import Decoder

__all__ = ["LayerWeights", "count_parameters", "layer_weights"]


class LayerWeights(NamedTuple):
    """Elements of a layer's matrices (norms and biases are left out).

    Attributes:
        always: of those that every token multiplies with.
        experts: of all routed experts.
        share: how much of `experts` a token multiplies with.
    """

    always: int
    experts: int
    share: float

    @property
    def active(self) -> float:
        """Elements that a token multiplies with."""
        return self.always + self.experts * self.share


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters, tied ones once."""
    return sum(leaf.size for leaf in jax.tree.leaves(_shapes(config)))


@lru_cache(maxsize=64)
def layer_weights(config: ModelConfig) -> tuple[LayerWeights, ...]:
    """Of every layer."""
    moe = config.moe
    share = moe.experts_per_token / moe.experts if moe else 0.0
    always, experts = [0] * config.layers, [0] * config.layers
    holders = Decoder(config).holders
    for path, leaf in jax.tree_util.tree_leaves_with_path(_shapes(config)["layers"]):
        part, name = path[0].key, path[-1].key
        if name.endswith(("scale", "bias")):
            continue
        count = experts if part == "moe" and leaf.ndim == 4 else always
        for layer in holders[part]:
            count[layer] += leaf.size // leaf.shape[0]
    return tuple(LayerWeights(*sizes, share) for sizes in zip(always, experts, strict=True))


@lru_cache(maxsize=64)
def _shapes(config: ModelConfig) -> dict:
    return jax.eval_shape(Decoder(config).init, jax.eval_shape(jax.random.key, 0))

"""FLOPs that a step must do whatever the policy."""

from __future__ import annotations

from meshsys.assemble import Assembly
from models.counting import layer_weights

__all__ = ["model_flops"]


def model_flops(assembly: Assembly) -> float:
    """What a step needs over all devices: three forwards of every product, half of attention's under a causal mask.

    6 FLOPs a token and a parameter that multiplies (the embedding looks up; of experts those that the token goes to),
    and attention's scores and context (Chowdhery et al. 2022, PaLM, appendix B, which counts the whole square; Dao et
    al. 2022 count the half), within the window where a layer has one.
    """
    config = assembly.config
    model, length = config.model, config.data.sequence_length
    heads = model.heads * (model.size_of_head + model.size_of_value)
    token = 2.0 * model.d_model * model.vocab_size
    for weights, window in zip(layer_weights(model), model.windows, strict=True):
        token += 2 * weights.active + 2 * _seen(length, window) * heads
    return 3.0 * token * config.data.batch_size * length


def _seen(length: int, window: int) -> float:
    """Keys that a query sees, in the mean."""
    within = min(window or length, length)
    return within * (1 - within / (2 * length))

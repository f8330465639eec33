"""FLOPs that a step must do whatever the policy."""

from __future__ import annotations

from meshsys.assemble import Assembly

__all__ = ["model_flops"]


def model_flops(assembly: Assembly) -> float:
    """What a step needs over all devices: three forwards of every product, half of attention's under a causal mask.

    6 FLOPs a token and a parameter that multiplies (the embedding looks up), and attention's scores and context
    (Chowdhery et al. 2022, PaLM, appendix B, which counts the whole square; Dao et al. 2022 count the half).
    """
    config = assembly.config
    model, length = config.model, config.data.sequence_length
    head_dim = model.size_of_head
    projections = model.d_model * head_dim * (2 * model.heads + 2 * model.num_kv_heads)
    layer = 2 * (projections + 3 * model.d_model * model.d_ff) + 2 * length * model.heads * head_dim
    token = model.layers * layer + 2 * model.d_model * model.vocab_size
    return 3.0 * token * config.data.batch_size * length

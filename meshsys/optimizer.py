"""AdamW with clipping by the global norm; warm-up and cosine decay of the learning rate."""

from __future__ import annotations

from typing import Any

import jax
import optax

from meshsys.config import TrainConfig

__all__ = ["learning_rate", "make_optimizer"]


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Linear from peak/warmup to the peak in `warmup_steps` steps, then a cosine to the final fraction at the end."""
    peak, warmup = config.learning_rate, config.warmup_steps
    decay = optax.cosine_decay_schedule(peak, max(1, config.steps - warmup), alpha=config.final_learning_rate_fraction)
    if not warmup:
        return decay
    ramp = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
    return optax.join_schedules([ramp, decay], [warmup])


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clipping, then AdamW (Loshchilov and Hutter 2019) up to the factor -learning_rate, which the step applies.

    The state has the same form with and without clipping, so that a run can be resumed with the other.
    Norm scales and biases do not decay.
    """
    clip = optax.clip_by_global_norm(config.gradient_clip) if config.gradient_clip else optax.identity()
    return optax.chain(
        clip,
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
        optax.add_decayed_weights(config.weight_decay, mask=_decays),
    )


def _decays(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: not path[-1].key.endswith(("scale", "bias")), params)

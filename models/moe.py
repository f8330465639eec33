"""A mixture of experts in place of a layer's feed-forward network.

Shapes: B sequences, S tokens of each, T tokens (B S), D d_model, F width of an expert, E experts, K experts of a token.
"""

from __future__ import annotations

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.config import ModelConfig, MoeConfig
from models.experts import Weights, run_experts, sort_by_expert
from models.layers import Mlp
from models.parallel import WHOLE, ManualAxes
from models.parameters import parameter
from models.routing import capacity, keep_first, load, route, router_loss

__all__ = ["Moe"]

_scaled = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=0)


class Moe(nn.Module):
    """Routed experts, and shared ones beside them (Shazeer et al. 2017; Dai et al. 2024, DeepSeekMoE)."""

    config: ModelConfig
    manual: ManualAxes = WHOLE

    @nn.compact
    def __call__(
        self, x_BSD: jax.Array, weights_BS: jax.Array, segment_ids_BS: jax.Array, place_S: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Runs every token through its experts.

        Args:
            weights_BS: the tokens' weights in the loss, float32.
            segment_ids_BS: int32; 0 is padding, which goes to no expert and is not counted.
            place_S: the places in the whole sequence of these tokens, where `manual.context` divides it.

        Returns:
            The output [B, S, D], and the router's losses, a float32 scalar to be added to the weighted sum of the
            tokens' losses. In place of a gradient, `router_bias` gets how many tokens chose each expert beyond the
            mean: `bias - rate * sign(that)` is its update (Wang et al. 2024).
        """
        config, moe = self.config, self.config.moe
        assert moe is not None
        (B, S, D), T = x_BSD.shape, x_BSD.shape[0] * x_BSD.shape[1]
        counted_BS = segment_ids_BS != 0

        router_DE = parameter(self, "router", nn.initializers.lecun_normal(), (D, moe.experts), ("embed", "router"))
        bias_E = None
        if moe.router_bias:
            bias_E = parameter(self, "router_bias", nn.initializers.zeros_init(), (moe.experts,), ("router",))
            bias_E = bias_E.astype(jnp.float32)
        logits_BSE = jnp.einsum(
            "BSD,DE->BSE", x_BSD.astype(jnp.float32), router_DE.astype(jnp.float32), precision="highest"
        )
        routing = route(logits_BSE, bias_E, moe)
        loss = router_loss(routing, counted_BS, weights_BS, moe, self.manual.context)
        if bias_E is not None:
            loss = _teach(loss, bias_E, load(routing, counted_BS, moe.experts))

        kept_BSK = jnp.broadcast_to(counted_BS[..., None], routing.expert.shape)
        most = None
        if moe.capacity_factor:
            kept_BSK = keep_first(routing.expert, counted_BS, moe, place_S, self.manual.context)
            most = B * moe.experts * capacity(S, moe)
        rows = sort_by_expert(routing.expert.reshape(T, -1), kept_BSK.reshape(T, -1), moe.experts, most)
        y_TD = run_experts(x_BSD.reshape(T, D), routing.weight.reshape(T, -1), rows, self._weights(moe), jax.nn.silu)
        y_BSD = y_TD.reshape(x_BSD.shape)
        if moe.shared_experts:
            wide = replace(config, d_ff=moe.shared_experts * moe.d_ff)
            y_BSD = y_BSD + Mlp(wide, name="shared")(x_BSD)
        return y_BSD, loss

    def _weights(self, moe: MoeConfig) -> Weights:
        D, F, E = self.config.d_model, moe.d_ff, moe.experts

        def weight(name: str, inputs: tuple[int, str], outputs: tuple[int, str]) -> jax.Array:
            shape, axes = (E, inputs[0], outputs[0]), ("expert", inputs[1], outputs[1])
            return parameter(self, name, _scaled, shape, axes).astype(jnp.dtype(self.config.dtype))

        narrow, wide = (D, "embed"), (F, "mlp")
        return Weights(weight("gate", narrow, wide), weight("up", narrow, wide), weight("down", wide, narrow))


@jax.custom_vjp
def _teach(loss: jax.Array, bias_E: jax.Array, load_E: jax.Array) -> jax.Array:
    """The loss; the gradient of the bias is the load."""
    return loss


def _teach_backward(load_E: jax.Array, d_loss: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    # What depends on no cotangent counts as no gradient where a backward is cut (`schedules.backward`).
    return d_loss, jax.lax.optimization_barrier((load_E, d_loss))[0], jnp.zeros_like(load_E)


_teach.defvjp(lambda loss, bias_E, load_E: (loss, load_E), _teach_backward)

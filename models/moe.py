"""A mixture of experts in place of a layer's feed-forward network.

Shapes: B sequences, S tokens of each, T tokens (B S), D d_model, F width of an expert, E experts, K experts of a token.
"""

from __future__ import annotations

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.config import ModelConfig, MoeConfig
from models.dropout import Noise
from models.exchange import run_remote_experts
from models.experts import Weights, run_experts, sort_by_expert
from models.layers import ACTIVATIONS, Mlp
from models.parallel import WHOLE, ManualAxes
from models.parameters import parameter
from models.routing import Routing, keep_first, largest_capacity, load, route, router_loss

__all__ = ["Moe"]

_scaled = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=0)


class Moe(nn.Module):
    """Routed experts, and shared ones beside them (Shazeer et al. 2017; Dai et al. 2024, DeepSeekMoE).

    Where `manual.expert` names an axis, the parameters are this device's experts and the tokens its own.
    """

    config: ModelConfig
    manual: ManualAxes = WHOLE

    @nn.compact
    def __call__(
        self, x_BSD: jax.Array, weights_BS: jax.Array, segment_ids_BS: jax.Array, noise: Noise | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Runs every token through its experts.

        Args:
            weights_BS: the tokens' weights in the loss, float32.
            segment_ids_BS: int32; 0 is padding, which goes to no routed expert and is not counted.
            noise: of low-rank updates' dropout.

        Returns:
            The output [B, S, D], and the router's losses, a float32 scalar to be added to the weighted sum of the
            tokens' losses. In place of a gradient, `router_bias` gets how many tokens chose each expert beyond the
            mean: `bias - rate * sign(that)` is its update (Wang et al. 2024).
        """
        config, moe = self.config, self.config.moe
        assert moe is not None
        counted_BS = segment_ids_BS != 0
        router_DE = self._router("router", nn.initializers.lecun_normal(), (config.d_model, moe.experts))
        bias_E = self._router("router_bias", nn.initializers.zeros_init(), (moe.experts,)) if moe.router_bias else None

        # In full float32 wherever it runs: a tie that is decided otherwise is another expert.
        logits_BSE = jnp.einsum("BSD,DE->BSE", x_BSD.astype(jnp.float32), router_DE, precision="highest")
        routing = route(logits_BSE, bias_E, moe)
        loss = router_loss(routing, counted_BS, weights_BS, moe, self.manual.context)
        if bias_E is not None:
            loss = _teach(loss, bias_E, load(routing, counted_BS, moe))
        y_BSD = self._experts(x_BSD, routing, counted_BS, moe)
        if moe.shared_experts:
            shared = replace(config, d_ff=moe.shared_experts * moe.d_ff)
            y_BSD = y_BSD + Mlp(shared, name="shared")(x_BSD, noise)
        return y_BSD, loss

    def _experts(self, x_BSD: jax.Array, routing: Routing, counted_BS: jax.Array, moe: MoeConfig) -> jax.Array:
        (B, S, D), K = x_BSD.shape, moe.experts_per_token
        kept_BSK = jnp.broadcast_to(counted_BS[..., None], routing.expert.shape)
        most = None
        if moe.capacity_factor:
            kept_BSK = keep_first(routing.expert, counted_BS, moe, self.manual.context)
            most = B * largest_capacity(S, moe, self.manual.context)
        x_TD = x_BSD.reshape(B * S, D)
        weight_TK, expert_TK, kept_TK = (a.reshape(B * S, K) for a in (routing.weight, routing.expert, kept_BSK))
        weights, activation = self._weights(moe), ACTIVATIONS[self.config.activation]
        if self.manual.expert is not None:
            axis = self.manual.expert
            y_TD = run_remote_experts(x_TD, weight_TK, expert_TK, kept_TK, weights, activation, axis, most)
        else:
            copies, sizes_E = sort_by_expert(expert_TK, kept_TK, moe.experts, most and most * moe.experts)
            y_TD = run_experts(x_TD, weight_TK, copies, sizes_E, weights, activation)
        return y_TD.reshape(B, S, D)

    def _router(self, name: str, init: nn.initializers.Initializer, shape: tuple[int, ...]) -> jax.Array:
        axes = ("embed", "router")[-len(shape) :]
        return parameter(self, name, init, shape, axes).astype(jnp.float32)

    def _weights(self, moe: MoeConfig) -> Weights:
        """The experts' matrices in the compute dtype."""
        experts = moe.experts
        if self.manual.expert is not None:
            experts //= jax.lax.axis_size(self.manual.expert)

        def weight(name: str, inputs: tuple[int, str], outputs: tuple[int, str]) -> jax.Array:
            shape, axes = (experts, inputs[0], outputs[0]), ("expert", inputs[1], outputs[1])
            return parameter(self, name, _scaled, shape, axes).astype(jnp.dtype(self.config.dtype))

        narrow, wide = (self.config.d_model, "embed"), (moe.d_ff, "mlp")
        return Weights(weight("gate", narrow, wide), weight("up", narrow, wide), weight("down", wide, narrow))


@jax.custom_vjp
def _teach(loss: jax.Array, bias_E: jax.Array, load_E: jax.Array) -> jax.Array:
    """The loss; the gradient of the bias is the load."""
    return loss


def _teach_back(load_E: jax.Array, d_loss: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    # What depends on no cotangent counts as no gradient where a backward is cut (`schedules.backward`).
    return d_loss, jax.lax.optimization_barrier((load_E, d_loss))[0], jnp.zeros_like(load_E)


_teach.defvjp(lambda loss, bias_E, load_E: (loss, load_E), _teach_back)

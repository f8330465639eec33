"""A Llama-style decoder as three blocks: embedding, layer, output head.

Everything is a pure function over parameter pytrees:

    {"shared": {"embed": ..., "head": ...}, "layers": {...}}

where every leaf of "layers" has a leading axis of global layer numbers. The same three block functions serve
the whole model (`loss`, `forward`), the pipeline compiler, which runs them stage by stage, and the sampler.

Shapes: B batch, S sequence, T keys, D d_model, V vocabulary, L layers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.layers import Attention, Mlp, RmsNorm, dropout, parameter, rotary_table

__all__ = [
    "SAVEABLE_NAMES",
    "Batch",
    "Decoder",
    "count_parameters",
]

SAVEABLE_NAMES = ("query_proj", "key_proj", "value_proj", "context", "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo")
"""What `pipeline.remat=names:...` can keep; the names are MaxText's."""

_HIDDEN = -1e30  # finite, so that a row which may look nowhere gives no NaN

PyTree = Any


class Batch(NamedTuple):
    """Packed sequences; `sequence_B` is each row's index in the global batch.

    tokens, targets, positions, segment_ids are int32 [B, S]; weights float32 [B, S]; sequence int32 [B].
    Queries see the keys of their own segment up to themselves; segment 0 is padding.
    """

    tokens: jax.Array
    targets: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    weights: jax.Array
    sequence: jax.Array


class Context(NamedTuple):
    """What every block of one microbatch needs and none differentiates."""

    batch: Batch
    rotary: tuple[jax.Array, jax.Array]
    bias_BST: jax.Array
    key: jax.Array | None


class _Embed(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        config = self.config
        init = nn.initializers.normal(config.d_model**-0.5)
        table_VD = parameter(self, "embedding", init, (config.vocab_size, config.d_model), ("vocab", "embed"))
        return table_VD.astype(jnp.dtype(config.dtype))[tokens_BS]


class _Layer(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(
        self, x_BSD: jax.Array, context: Context, layer: jax.Array, cache: Any = None
    ) -> tuple[jax.Array, Any]:
        rate, key, sequence_B = self.config.dropout, context.key, context.batch.sequence
        keys = (None, None) if rate == 0.0 or key is None else jax.random.split(jax.random.fold_in(key, layer))
        normed = RmsNorm(self.config, name="attention_norm")(x_BSD)
        attended, cache = Attention(self.config, name="attention")(normed, context.rotary, context.bias_BST, cache)
        x_BSD = x_BSD + dropout(attended, rate, keys[0], sequence_B)
        normed = RmsNorm(self.config, name="mlp_norm")(x_BSD)
        mlp = Mlp(self.config, name="mlp")(normed)
        return x_BSD + dropout(mlp, rate, keys[1], sequence_B), cache


class _Head(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BSD: jax.Array, table_VD: jax.Array | None) -> jax.Array:
        """Returns logits, float32 [B, S, V]; `table_VD` is the embedding where it is tied."""
        config = self.config
        x_BSD = RmsNorm(config, name="norm")(x_BSD)
        if table_VD is None:
            init = nn.initializers.lecun_normal()
            kernel_DV = parameter(self, "kernel", init, (config.d_model, config.vocab_size), ("embed", "vocab"))
            kernel_DV = kernel_DV.astype(x_BSD.dtype)
            return jnp.einsum("BSD,DV->BSV", x_BSD, kernel_DV, preferred_element_type=jnp.float32)
        table_VD = table_VD.astype(x_BSD.dtype)
        return jnp.einsum("BSD,VD->BSV", x_BSD, table_VD, preferred_element_type=jnp.float32)


class Decoder:
    """The blocks of one model configuration; holds no parameters."""

    def __init__(self, config: ModelConfig):
        if config.vocab_size < 1:
            raise ValueError("model.vocab_size=0 must be set, or taken from the tokenizer, before a model is built")
        self.config = config
        self._embed, self._layer, self._head = _Embed(config), _Layer(config), _Head(config)

    # --- Blocks ---------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch, key: jax.Array | None = None) -> Context:
        """What all blocks of a batch share: rotary tables, mask, dropout key of the step."""
        segment = batch.segment_ids
        position = jnp.arange(segment.shape[1], dtype=jnp.int32)
        visible = segment[:, :, None] == segment[:, None, :]
        visible &= (position[:, None] >= position[None, :])[None]
        bias = jnp.where(visible, 0.0, _HIDDEN).astype(jnp.float32)
        return Context(batch, rotary_table(batch.positions, self.config), bias, key)

    def embed(self, shared: PyTree, context: Context) -> jax.Array:
        """Token embeddings, [B, S, D] in the compute dtype."""
        return _apply(self._embed, shared["embed"], context.batch.tokens)

    def layer(self, params: PyTree, x_BSD: jax.Array, context: Context, layer: jax.Array) -> jax.Array:
        """One decoder layer; `layer` is its global number (int32 scalar), which selects the dropout key."""
        return _apply(self._layer, params, x_BSD, context, layer)[0]

    def layer_with_cache(
        self, params: PyTree, x_BSD: jax.Array, context: Context, cache: tuple
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """One decoder layer over a cache `(keys_BTKH, values_BTKH, start)`; returns output, keys and values."""
        return _apply(self._layer, params, x_BSD, context, jnp.zeros((), jnp.int32), cache)

    def logits(self, shared: PyTree, x_BSD: jax.Array) -> jax.Array:
        """Output layer, float32 [B, S, V]."""
        table = shared["embed"]["embedding"] if self.config.tie_embeddings else None
        return _apply(self._head, shared["head"], x_BSD, table)

    def head(self, shared: PyTree, x_BSD: jax.Array, context: Context) -> jax.Array:
        """Sum over the tokens of weight times negative log-likelihood, a float32 scalar."""
        logits_BSV = self.logits(shared, x_BSD)
        picked_BS = jnp.take_along_axis(logits_BSV, context.batch.targets[..., None], axis=-1)[..., 0]
        return jnp.sum((jax.nn.logsumexp(logits_BSV, axis=-1) - picked_BS) * context.batch.weights)

    # --- Embedding and head over a part of the vocabulary ---------------------------------------------------

    # `part` has the vocabulary entries from index * V / count on, and adds up (`sum`) or compares (`max`) an array over
    # all parts; see `schedules.pipeline_model.Part`. Embedding and head in `shared` are those entries' shards.

    def embed_part(self, shared: PyTree, context: Context, part: Any) -> jax.Array:
        """[B, S, D]: zero where another part has the token; the parts add up to `embed`."""
        config, local_BS = self._local(context.batch.tokens, part)
        mine_BS = (local_BS >= 0) & (local_BS < config.vocab_size)
        x_BSD = _apply(_Embed(config), shared["embed"], jnp.where(mine_BS, local_BS, 0))
        return jnp.where(mine_BS[..., None], x_BSD, jnp.zeros_like(x_BSD))

    def head_part(
        self, shared: PyTree, x_BSD: jax.Array, context: Context, scale: jax.Array, part: Any
    ) -> tuple[jax.Array, jax.Array, PyTree]:
        """The whole sum of `head`, and this part's share of the gradients of `scale` times it.

        The parts exchange each token's largest logit, the sum of exponentials, and the target's logit; no gradient
        is taken through that, as the loss's gradient by the logits has a closed form.
        """
        config, local_BS = self._local(context.batch.targets, part)
        unused = {} if config.tie_embeddings else {"embed": jax.tree.map(lambda _: None, shared["embed"])}

        def logits(shared: PyTree, x_BSD: jax.Array) -> jax.Array:
            table = shared["embed"]["embedding"] if config.tie_embeddings else None
            return _apply(_Head(config), shared["head"], x_BSD, table)

        used = {name: value for name, value in shared.items() if name not in unused}
        logits_BSV, backward = jax.vjp(logits, used, x_BSD)
        top_BS = part.max(logits_BSV.max(-1))
        norm_BS = top_BS + jnp.log(part.sum(jnp.exp(logits_BSV - top_BS[..., None]).sum(-1)))
        target_BSV = jax.nn.one_hot(local_BS, config.vocab_size, dtype=jnp.float32)  # zero for another part's target
        picked_BS = part.sum((target_BSV * logits_BSV).sum(-1))
        loss = jnp.sum((norm_BS - picked_BS) * context.batch.weights)
        d_logits_BSV = jnp.exp(logits_BSV - norm_BS[..., None]) - target_BSV
        grads, dx_BSD = backward(d_logits_BSV * (scale * context.batch.weights)[..., None])
        return loss, dx_BSD, unused | grads

    def _local(self, tokens_BS: jax.Array, part: Any) -> tuple[ModelConfig, jax.Array]:
        """The configuration of a part, and where tokens are in it."""
        config = replace(self.config, vocab_size=self.config.vocab_size // part.count)
        return config, tokens_BS - part.index * config.vocab_size

    # --- Whole model ----------------------------------------------------------------------------------------

    def init(self, key: jax.Array) -> PyTree:
        """Parameters; a layer's depend on the key and its global number alone."""
        return nn.meta.unbox(self._boxed(key))

    def cast(self, params: PyTree) -> PyTree:
        """Parameters as the computation reads them: in the compute dtype, norm scales as they are."""
        dtype = jnp.dtype(self.config.dtype)

        def leaf(path: tuple, value: jax.Array) -> jax.Array:
            return value if path[-1].key == "scale" else value.astype(dtype)

        return jax.tree_util.tree_map_with_path(leaf, params)

    def logical_axes(self) -> PyTree:
        """The logical axis names of every parameter, a tuple a leaf; layers lead with "layers"."""
        boxed = jax.eval_shape(self._boxed, jax.eval_shape(jax.random.key, 0))
        is_box = partial(_is_a, nn.Partitioned)
        axes = jax.tree.map(lambda leaf: tuple(leaf.names), boxed, is_leaf=is_box)
        layers = jax.tree.map(lambda names: ("layers", *names), axes["layers"], is_leaf=partial(_is_a, tuple))
        return axes | {"layers": layers}

    def _boxed(self, key: jax.Array) -> PyTree:
        config = self.config
        tokens = jnp.zeros((1, 1), jnp.int32)
        batch = Batch(tokens, tokens, tokens, tokens, jnp.zeros((1, 1)), jnp.zeros((1,), jnp.int32))
        context = self.prepare(batch)
        x = jnp.zeros((1, 1, config.d_model), jnp.dtype(config.dtype))
        embed_key, head_key, layers_key = jax.random.split(key, 3)
        embed = self._embed.init(embed_key, tokens)["params"]
        table = jnp.zeros((config.vocab_size, config.d_model)) if config.tie_embeddings else None
        head = self._head.init(head_key, x, table)["params"]
        number = jnp.arange(config.layers, dtype=jnp.int32)

        def one_layer(number: jax.Array) -> PyTree:
            return self._layer.init(jax.random.fold_in(layers_key, number), x, context, number)["params"]

        return {"shared": {"embed": embed, "head": head}, "layers": jax.vmap(one_layer)(number)}

    def hidden(self, params: PyTree, context: Context) -> jax.Array:
        """The residual stream after the last layer, [B, S, D]."""

        def body(x_BSD: jax.Array, xs: tuple) -> tuple[jax.Array, None]:
            return self.layer(xs[0], x_BSD, context, xs[1]), None

        number = jnp.arange(self.config.layers, dtype=jnp.int32)
        return jax.lax.scan(body, self.embed(params["shared"], context), (params["layers"], number))[0]

    def loss_sum(self, params: PyTree, batch: Batch, key: jax.Array | None = None) -> jax.Array:
        """Weighted sum of the negative log-likelihood of a batch, unpipelined."""
        context = self.prepare(batch, key)
        return self.head(params["shared"], self.hidden(params, context), context)

    def forward(self, params: PyTree, tokens_BS: jax.Array, mask_BS: jax.Array | None = None) -> jax.Array:
        """Logits of whole sequences, float32 [B, S, V].

        Args:
            mask_BS: 1 for tokens, 0 for padding, on either side; positions count tokens only.
        """
        mask_BS = jnp.ones_like(tokens_BS) if mask_BS is None else mask_BS.astype(jnp.int32)
        positions = jnp.maximum(jnp.cumsum(mask_BS, axis=1) - 1, 0)
        zeros = jnp.zeros(tokens_BS.shape, jnp.float32)
        sequence = jnp.arange(tokens_BS.shape[0], dtype=jnp.int32)
        context = self.prepare(Batch(tokens_BS, tokens_BS, positions, mask_BS, zeros, sequence))
        return self.logits(params["shared"], self.hidden(params, context))


def _apply(module: nn.Module, params: PyTree, *args: Any) -> Any:
    return module.apply({"params": params}, *args)


def _is_a(kind: type, leaf: Any) -> bool:
    return isinstance(leaf, kind)


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters, tied ones once."""
    shapes = jax.eval_shape(Decoder(config).init, jax.eval_shape(jax.random.key, 0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))

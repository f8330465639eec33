"""A decoder as three blocks: embedding, layer, output head.

Everything is a pure function over parameter pytrees:

    {"shared": {"embed": ..., "head": ...}, "layers": {"attention": ..., "mlp": ..., "moe": ..., ...}}

where every leaf of "layers" has a leading axis over the layers that hold it (`Decoder.holders`). The same three block
functions serve the whole model (`loss_sum`, `forward`), the pipeline compiler, which runs them stage by stage, and the
sampler.

Shapes: B batch, S sequence, T keys, D d_model, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.attention import Mask, causal_mask, on_platform, zigzag_order
from models.config import ModelConfig
from models.dropout import Noise
from models.kv_cache import LayerCache
from models.layers import Attention, Mlp, RmsNorm, Seen
from models.moe import Moe
from models.parallel import WHOLE, ManualAxes
from models.parameters import VALUE_HEAD, parameter
from models.products import product
from models.rotary import Rotary, rotary_table
from models.sampling import SOFTMAX, Sampling, entropy, log_probs

__all__ = [
    "SAVEABLE_NAMES",
    "Batch",
    "Context",
    "Decoder",
    "Run",
    "forward",
]

SAVEABLE_NAMES = ("query_proj", "key_proj", "value_proj", "context", "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo")
"""What `pipeline.remat=names:...` can keep; the names are MaxText's."""

_UNCAST = ("scale", "router", "router_bias", VALUE_HEAD)

PyTree = Any


class Batch(NamedTuple):
    """Packed sequences; `sequence_B` is each row's index in the global batch.

    tokens, targets, positions, segment_ids are int32 [B, S]; weights float32 [B, S]; sequence int32 [B].
    Queries see the keys of their own segment up to themselves; segment 0 is padding. Where several sequences of a row
    share their beginning, that is a segment of its own, which trunk_ids, int32 [B, S], names for the tokens of each
    continuation; 0 is none, None is none of any. Positions go on from it.
    """

    tokens: jax.Array
    targets: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    weights: jax.Array
    sequence: jax.Array
    trunk_ids: jax.Array | None = None


class Context(NamedTuple):
    """What every block of one microbatch needs and none differentiates.

    Attributes:
        rotary: tables of the positions.
        local_rotary: those of layers with a window, where they differ.
        mask: who sees whom in a layer without a window.
        key: of the step's dropout.
    """

    batch: Batch
    rotary: Rotary
    local_rotary: Rotary | None
    mask: Mask
    key: jax.Array | None


@dataclass(frozen=True)
class Run:
    """Layers `first` to `first + count - 1`, which have the same parts.

    Attributes:
        holds: of each part of "layers" that they have, where in its stack the first of them is.
    """

    first: int
    count: int
    holds: Mapping[str, int]

    def take(self, layers: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The run's own parameters, [count, ...]."""
        return {
            name: jax.tree.map(lambda leaf, start=start: leaf[start : start + self.count], layers[name])
            for name, start in self.holds.items()
        }


class _Embed(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        init = nn.initializers.normal(1.0 if config.scale_embeddings else config.d_model**-0.5)
        table_VD = parameter(self, "embedding", init, (config.vocab_size, config.d_model), ("vocab", "embed"))
        x_BSD = table_VD.astype(dtype)[tokens_BS]
        return x_BSD * jnp.asarray(config.d_model**0.5, dtype) if config.scale_embeddings else x_BSD


class _Layer(nn.Module):
    config: ModelConfig
    kind: str
    manual: ManualAxes = WHOLE

    @nn.compact
    def __call__(
        self, x_BSD: jax.Array, seen: Seen, noise: Noise | None, batch: Batch, cache: LayerCache | None = None
    ) -> tuple[jax.Array, jax.Array | None, LayerCache | None]:
        """Returns the stream, the router's loss (None without experts), and the cache."""
        config = self.config
        before, after = config.norm_placement != "post", config.norm_placement != "pre"

        def normed(name: str, is_there: bool, x: jax.Array) -> jax.Array:
            return RmsNorm(config, name=name)(x) if is_there else x

        def added(name: str, y_BSD: jax.Array) -> jax.Array:
            y_BSD = normed(f"{name}_post_norm", after, y_BSD)
            return x_BSD + (y_BSD if noise is None else noise.drop(y_BSD, config.dropout, name))

        y_BSD, cache = Attention(config, self.manual, name="attention")(
            normed("attention_norm", before, x_BSD), seen, noise, cache
        )
        x_BSD = added("attention", y_BSD)
        y_BSD, loss = normed("mlp_norm", before, x_BSD), None
        if self.kind == "dense":
            y_BSD = Mlp(config, name="mlp")(y_BSD, noise)
        else:
            y_BSD, loss = Moe(config, self.manual, name="moe")(y_BSD, batch.weights, batch.segment_ids, noise)
        return added("mlp", y_BSD), loss, cache


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
            table = kernel_DV
        else:
            frozen = config.lora is not None
            table = jax.lax.stop_gradient(table_VD) if frozen else table_VD
        if config.value_head:  # which `Decoder.values` reads; the last one, as keys are made of the order
            parameter(self, VALUE_HEAD, nn.initializers.zeros_init(), (config.d_model,), ("embed",))
        transposed = table_VD is not None
        logits_BSV = product(x_BSD, table.astype(x_BSD.dtype), 1, transposed=transposed, out_dtype=jnp.float32)
        cap = config.logits_softcap
        return cap * jnp.tanh(logits_BSV / cap) if cap else logits_BSV


class Decoder:
    """The blocks of one model configuration; holds no parameters.

    Args:
        manual: mesh axes that are bound around the blocks, which have a device's part of experts and sequences then.
    """

    def __init__(self, config: ModelConfig, manual: ManualAxes = WHOLE):
        if config.vocab_size < 1:
            raise ValueError("model.vocab_size=0 must be set, or taken from the tokenizer, before a model is built")
        self.config, self.manual = config, manual
        self._embed, self._head = _Embed(config), _Head(config)
        self._layers = {kind: _Layer(config, kind, manual) for kind in sorted(set(config.kinds))}

    # --- What the layers hold ---------------------------------------------------------------------------------

    @cached_property
    def holders(self) -> Mapping[str, tuple[int, ...]]:
        """The layers that hold each part of "layers", in the order of their leading axis."""
        parts = {kind: jax.eval_shape(partial(self._init_layer, kind), _abstract_key(), 0) for kind in self._layers}
        names = sorted({name for part in parts.values() for name in part})
        return {
            name: tuple(layer for layer, kind in enumerate(self.config.kinds) if name in parts[kind]) for name in names
        }

    def signature(self, layer: int) -> frozenset[str]:
        """The parts of a layer that are not in every layer."""
        return frozenset(
            name for name, layers in self.holders.items() if layer in layers and len(layers) < self.config.layers
        )

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """All layers, as runs of the same kind."""
        found, first = [], 0
        for _, group in groupby(self.config.kinds):
            count = len(list(group))
            holds = {name: layers.index(first) for name, layers in self.holders.items() if first in layers}
            found.append(Run(first, count, holds))
            first += count
        return tuple(found)

    # --- Blocks ---------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch, key: jax.Array | None = None) -> Context:
        """What all blocks of a batch share: rotary tables, mask, dropout key of the step."""
        config = self.config
        rotary = rotary_table(batch.positions, config)
        local = rotary_table(batch.positions, config, local=True) if config.rope_local_theta else None
        mask = causal_mask(batch.segment_ids)
        place_BS = None
        if batch.trunk_ids is not None:
            place_BS = batch.positions
        elif self.manual.context:
            place_BS = jnp.broadcast_to(self._places(batch)[0][None], batch.tokens.shape)
        if place_BS is not None:
            mask = mask._replace(query_place_BS=place_BS, key_place_BT=place_BS, query_trunk_BS=batch.trunk_ids)
        return Context(batch, rotary, local, mask, key)

    def embed(self, shared: PyTree, context: Context) -> jax.Array:
        """Token embeddings, [B, S, D] in the compute dtype."""
        return _apply(self._embed, shared["embed"], context.batch.tokens)

    def layer(
        self, params: PyTree, x_BSD: jax.Array, context: Context, layer: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """One decoder layer; `layer` is its global number (int32 scalar).

        Returns:
            The stream, and what the layer adds to `head`'s loss: its router's, or None without experts.
        """
        seen, noise = self.seen(context, layer), self._noise(context, layer)
        return _apply(self._module(params), params, x_BSD, seen, noise, context.batch)[:2]

    def layer_with_cache(
        self, params: PyTree, x_BSD: jax.Array, context: Context, cache: LayerCache, layer: Any
    ) -> tuple[jax.Array, LayerCache]:
        """One decoder layer over its cache, to which the context's mask must extend; returns its output and cache."""
        seen = self.seen(context, layer)
        x_BSD, _, cache = _apply(self._module(params), params, x_BSD, seen, None, context.batch, cache)
        return x_BSD, cache

    def seen(self, context: Context, layer: jax.Array) -> Seen:
        """What attention goes by in a layer: its window and its rotary positions."""
        config, mask, rotary = self.config, context.mask, context.rotary

        def chosen(options: tuple[Any, ...], pick: Any) -> Any:
            """`pick(option)` of the layer: one value if all layers have the same, else one that follows `layer`."""
            if len(set(options)) == 1:
                return pick(options[0])
            unique = sorted(set(options))
            index = jnp.asarray([unique.index(option) for option in options], jnp.int32)[layer]
            return jax.tree.map(lambda *values: jax.lax.select_n(index, *values), *map(pick, unique))

        if any(config.windows):
            # The same in all layers, it stays a number: kernels skip what is outside of one that they know.
            same = len(set(config.windows)) == 1
            window = config.windows[0] if same else chosen(config.windows, jnp.int32)
            mask = mask._replace(window=window)
        if context.local_rotary is not None:
            has_window = tuple(map(bool, config.windows))
            rotary = chosen(has_window, lambda local: context.local_rotary if local else context.rotary)
        if not any(config.rotary):
            return Seen(mask, None)
        still = jnp.ones_like(rotary[0]), jnp.zeros_like(rotary[1])
        return Seen(mask, chosen(config.rotary, lambda turns: rotary if turns else still))

    def logits(self, shared: PyTree, x_BSD: jax.Array) -> jax.Array:
        """Output layer, float32 [B, S, V]."""
        table = shared["embed"]["embedding"] if self.config.tie_embeddings else None
        return _apply(self._head, shared["head"], x_BSD, table)

    def head(self, shared: PyTree, x_BSD: jax.Array, context: Context) -> jax.Array:
        """Sum over the tokens of weight times negative log-likelihood, a float32 scalar."""
        return jnp.sum(-self.log_probs(shared, x_BSD, context) * context.batch.weights)

    def log_probs(self, shared: PyTree, x_BSD: jax.Array, context: Context, sampling: Sampling = SOFTMAX) -> jax.Array:
        """The targets' log-probabilities, float32 [B, S], under the distributions that `sampling` draws from."""
        return log_probs(self.logits(shared, x_BSD), context.batch.targets, sampling)

    def log_probs_and_entropy(
        self, shared: PyTree, x_BSD: jax.Array, context: Context, sampling: Sampling = SOFTMAX
    ) -> tuple[jax.Array, jax.Array]:
        """`log_probs`, and the entropies of the distributions, float32 [B, S]."""
        logits_BSV, targets_BS = self.logits(shared, x_BSD), context.batch.targets
        return log_probs(logits_BSV, targets_BS, sampling), entropy(logits_BSV, targets_BS, sampling)

    def values(self, shared: PyTree, x_BSD: jax.Array) -> jax.Array:
        """What the policy may expect before each target, float32 [B, S]: the normalised stream times the value head,
        which begins as zeros."""
        x_BSD = _apply(RmsNorm(self.config), shared["head"]["norm"], x_BSD).astype(jnp.float32)
        return jnp.einsum("bsd,d->bs", x_BSD, shared["head"][VALUE_HEAD].astype(jnp.float32), precision="highest")

    def _module(self, params: PyTree) -> _Layer:
        return self._layers["moe" if "moe" in params else "dense"]

    def _noise(self, context: Context, layer: jax.Array) -> Noise | None:
        config = self.config
        if context.key is None or not (config.dropout or (config.lora and config.lora.dropout)):
            return None
        places = self._places(context.batch) if self.manual.context else (None, 0)
        return Noise(jax.random.fold_in(context.key, layer), context.batch.sequence, *places)

    def _places(self, batch: Batch) -> tuple[jax.Array, int]:
        """Which of a sequence's places this device has, and how many there are."""
        axis, here = self.manual.context, batch.tokens.shape[1]
        parts = jax.lax.axis_size(axis)
        order = jnp.asarray(zigzag_order(here * parts, parts))
        return jax.lax.dynamic_slice_in_dim(order, jax.lax.axis_index(axis) * here, here), here * parts

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
        """The whole sum of `head`, and this part's share of the gradients of `scale` times it."""
        log_probs_BS, backward = self.log_probs_part(shared, x_BSD, context, part)
        weights = context.batch.weights
        return jnp.sum(-log_probs_BS * weights), *backward(-scale * weights)

    def log_probs_part(
        self, shared: PyTree, x_BSD: jax.Array, context: Context, part: Any, temperature: float = 1.0
    ) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, PyTree]]]:
        """The whole of `log_probs` at a temperature, and what turns a gradient by it into this part's share of the
        gradients of the stream and of `shared`.

        The parts exchange each token's largest logit, the sum of exponentials, and the target's logit; no gradient
        is taken through that, as a log-probability's gradient by the logits has a closed form.
        """
        config, local_BS = self._local(context.batch.targets, part)
        unused = {} if config.tie_embeddings else {"embed": jax.tree.map(lambda _: None, shared["embed"])}

        def logits(shared: PyTree, x_BSD: jax.Array) -> jax.Array:
            table = shared["embed"]["embedding"] if config.tie_embeddings else None
            logits_BSV = _apply(_Head(config), shared["head"], x_BSD, table)
            return logits_BSV / temperature if temperature != 1 else logits_BSV

        used = {name: value for name, value in shared.items() if name not in unused}
        logits_BSV, pull = jax.vjp(logits, used, x_BSD)
        top_BS = part.max(logits_BSV.max(-1))
        norm_BS = top_BS + jnp.log(part.sum(jnp.exp(logits_BSV - top_BS[..., None]).sum(-1)))
        target_BSV = jax.nn.one_hot(local_BS, config.vocab_size, dtype=jnp.float32)  # zero for another part's target
        picked_BS = part.sum((target_BSV * logits_BSV).sum(-1))

        def backward(d_log_probs_BS: jax.Array) -> tuple[jax.Array, PyTree]:
            by_logits_BSV = target_BSV - jnp.exp(logits_BSV - norm_BS[..., None])
            grads, dx_BSD = pull(by_logits_BSV * d_log_probs_BS[..., None])
            return dx_BSD, unused | grads

        return picked_BS - norm_BS, backward

    def _local(self, tokens_BS: jax.Array, part: Any) -> tuple[ModelConfig, jax.Array]:
        """The configuration of a part, and where tokens are in it."""
        config = replace(self.config, vocab_size=self.config.vocab_size // part.count)
        return config, tokens_BS - part.index * config.vocab_size

    # --- Whole model ----------------------------------------------------------------------------------------

    def init(self, key: jax.Array) -> PyTree:
        """Parameters; a layer's depend on the key and its global number alone."""
        return nn.meta.unbox(self._boxed(key))

    def cast(self, params: PyTree) -> PyTree:
        """Parameters as the computation reads them: in the compute dtype, norms and routers as they are."""
        dtype = jnp.dtype(self.config.dtype)

        def leaf(path: tuple, value: jax.Array) -> jax.Array:
            return value if path[-1].key in _UNCAST else value.astype(dtype)

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
        x = jnp.zeros((1, 1, config.d_model), jnp.dtype(config.dtype))
        embed_key, head_key, layers_key = jax.random.split(key, 3)
        embed = self._embed.init(embed_key, tokens)["params"]
        table = jnp.zeros((config.vocab_size, config.d_model)) if config.tie_embeddings else None
        head = self._head.init(head_key, x, table)["params"]
        layers = {}
        for name, numbers in self.holders.items():
            kinds = sorted({config.kinds[number] for number in numbers})

            def part(kind: str, number: jax.Array, name: str = name) -> PyTree:
                return self._init_layer(kind, layers_key, number)[name]

            # A part that several kinds hold is the same in each.
            layers[name] = jax.vmap(partial(part, kinds[0]))(jnp.asarray(numbers, jnp.int32))
        return {"shared": {"embed": embed, "head": head}, "layers": layers}

    def _init_layer(self, kind: str, key: jax.Array, number: Any) -> PyTree:
        """A layer's parameters, with their logical axes; they depend on the key and the layer's number alone."""
        tokens, weights = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.float32)
        batch = Batch(tokens, tokens, tokens, tokens, weights, jnp.zeros((1,), jnp.int32))
        context = Decoder(self.config).prepare(batch)
        x = jnp.zeros((1, 1, self.config.d_model), jnp.dtype(self.config.dtype))
        seen = Seen(context.mask, context.rotary if any(self.config.rotary) else None)
        module = _Layer(self.config, kind)
        with on_platform("cpu"):  # parameters are the same on any, and JAX need not start for their shapes
            return module.init(jax.random.fold_in(key, number), x, seen, None, batch)["params"]

    def hidden(self, params: PyTree, context: Context) -> tuple[jax.Array, jax.Array]:
        """The residual stream after the last layer, [B, S, D], and the sum of the routers' losses."""

        def body(carry: tuple, xs: tuple) -> tuple[tuple, None]:
            x_BSD, total = carry
            x_BSD, loss = self.layer(xs[0], x_BSD, context, xs[1])
            return (x_BSD, total if loss is None else total + loss), None

        carry = self.embed(params["shared"], context), jnp.zeros((), jnp.float32)
        for run in self.runs:
            number = jnp.arange(run.first, run.first + run.count, dtype=jnp.int32)
            carry, _ = jax.lax.scan(body, carry, (run.take(params["layers"]), number))
        return carry

    def loss_sum(self, params: PyTree, batch: Batch, key: jax.Array | None = None) -> jax.Array:
        """Weighted sum of the negative log-likelihood of a batch and of its routers' losses, unpipelined."""
        context = self.prepare(batch, key)
        x_BSD, loss = self.hidden(params, context)
        return self.head(params["shared"], x_BSD, context) + loss

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
        return self.logits(params["shared"], self.hidden(params, context)[0])


def _apply(module: nn.Module, params: PyTree, *args: Any) -> Any:
    return module.apply({"params": params}, *args)


def _abstract_key() -> Any:
    return jax.eval_shape(jax.random.key, 0)


def _is_a(kind: type, leaf: Any) -> bool:
    return isinstance(leaf, kind)


@partial(jax.jit, static_argnums=0)
def forward(config: ModelConfig, params: PyTree, tokens_BS: jax.Array, mask_BS: jax.Array | None = None) -> jax.Array:
    """Logits of whole sequences, float32 [B, S, V], compiled; see `Decoder.forward`."""
    return Decoder(config).forward(params, tokens_BS, mask_BS)

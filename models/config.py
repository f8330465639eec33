"""What a decoder is made of, as frozen records: one decoder whose options cover the families of published models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["LORA_TARGETS", "DType", "LatentAttention", "LoraConfig", "ModelConfig", "MoeConfig", "RopeScaling"]

DType = Literal["float32", "bfloat16"]

_LARGEST = 1 << 20  # far above any model; keeps a slip of the finger from filling the memory


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts than a model was first trained on.

    Attributes:
        kind: `linear` divides positions (Chen et al. 2023); `llama3` divides the long wavelengths and blends between
            (Llama 3.1); `yarn` blends by the number of rotations in the original context (Peng et al. 2023).
        factor: by which the context grows.
        original_length: tokens of the context that the model was first trained on; llama3 and yarn.
        low_frequency_factor, high_frequency_factor: llama3's blend, in rotations over the original context.
        beta_fast, beta_slow: yarn's blend, in rotations over the original context.
        attention_factor: multiplies cosines and sines under yarn; 0 means yarn's own, from `factor`, `mscale` and
            `mscale_all_dim`.
        mscale, mscale_all_dim: DeepSeek's exponents of yarn's temperature; 0 leaves them out.
        truncate: yarn rounds the ends of its blend to whole dimensions.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float = 1.0
    original_length: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _at_least("rope_scaling.", self, {"factor": 1.0})
        if self.kind != "linear":
            _at_least("rope_scaling.", self, {"original_length": 1})
        if self.kind == "llama3" and self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(
                f"model.rope_scaling.low_frequency_factor={self.low_frequency_factor} must be below "
                f"model.rope_scaling.high_frequency_factor={self.high_frequency_factor}; change one of them"
            )


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Mixture of experts in place of a layer's feed-forward network.

    The first three have to be set, unless `ModelConfig.pretrained` names a file that has them.

    Attributes:
        experts: number of routed experts, each a gated network of width `d_ff`.
        experts_per_token: how many a token goes to.
        d_ff: width of an expert.
        shared_experts: experts that every token goes to, besides; they are one network of `shared_experts * d_ff`.
        dense_layers: numbers of the layers that have a plain feed-forward network instead.
        router: scores are a `softmax` over the experts, or each its own `sigmoid` (DeepSeek-V3).
        normalize: the chosen experts' scores are divided by their sum.
        scale: multiplies the chosen experts' scores (DeepSeek's routed_scaling_factor).
        groups: experts are in so many groups, of which each token uses `top_groups` (DeepSeek); 1 means no groups.
        top_groups: see `groups`.
        router_bias: a bias for each expert is added to scores for the choice only; it follows the load and not the
            gradient (Wang et al. 2024, auxiliary-loss-free load balancing).
        bias_rate: how much a step changes `router_bias`.
        aux_loss: weight of the load-balancing loss, taken within each sequence (DeepSeek-V3, equations 17 to 20).
        z_loss: weight of the mean square of the router's log-sum-exp (Zoph et al. 2022, ST-MoE).
        capacity_factor: 0 drops no token; otherwise an expert takes at most this times its even share of a
            sequence's tokens, the first ones, and what is over passes the layer by.
    """

    experts: int = 0
    experts_per_token: int = 0
    d_ff: int = 0
    shared_experts: int = 0
    dense_layers: tuple[int, ...] = ()
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    router_bias: bool = False
    bias_rate: float = 0.001
    aux_loss: float = 0.0
    z_loss: float = 0.0
    capacity_factor: float = 0.0

    def __post_init__(self) -> None:
        _at_least("moe.", self, dict.fromkeys(("groups", "top_groups"), 1))
        _at_least("moe.", self, dict.fromkeys((*_MOE_SIZES, "shared_experts", "bias_rate", "aux_loss", "z_loss"), 0))
        _at_least("moe.", self, {"capacity_factor": 0})
        _at_most("moe.", self, dict.fromkeys(("experts", "d_ff"), _LARGEST) | {"shared_experts": 1024})
        if self.experts % self.groups:
            raise ValueError(
                f"model.moe.groups={self.groups} does not divide model.moe.experts={self.experts}; "
                f"use {_divisors_near(self.experts, self.groups)}"
            )
        _at_most("moe.", self, {"top_groups": self.groups})
        if self.experts:
            _at_most("moe.", self, {"experts_per_token": self.top_groups * (self.experts // self.groups)})


_MOE_SIZES = ("experts", "experts_per_token", "d_ff")


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Keys and values from a shared low-rank latent (DeepSeek-V2, section 2.1).

    Attributes:
        kv_rank: width of the latent.
        query_rank: width of the queries' own latent; 0 projects them directly.
        nope_dim: dimensions of a head without rotary positions.
        rope_dim: dimensions of a head with them; their key is shared by all heads.
        value_dim: dimensions of a head's value.
    """

    kv_rank: int
    query_rank: int = 0
    nope_dim: int
    rope_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        sizes = ("kv_rank", "nope_dim", "rope_dim", "value_dim")
        _at_least("latent.", self, dict.fromkeys(sizes, 1) | {"query_rank": 0})
        _at_most("latent.", self, dict.fromkeys((*sizes, "query_rank"), _LARGEST))
        if self.rope_dim % 2:
            raise ValueError(f"model.latent.rope_dim={self.rope_dim} must be even; RoPE rotates pairs")


LORA_TARGETS = ("query", "key", "value", "out", "gate", "up", "down")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank updates of frozen matrices (Hu et al. 2021, LoRA).

    Attributes:
        rank: of the update.
        alpha: the update is multiplied by `alpha / rank`.
        targets: which matrices have one, of query, key, value, out, gate, up, down; experts have none.
        dropout: rate on the input of the update, 0 to 1.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("query", "key", "value", "out")
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _at_least("lora.", self, {"rank": 1})
        _at_most("lora.", self, {"rank": _LARGEST})
        if not self.alpha > 0:
            raise ValueError(f"model.lora.alpha={self.alpha} must be above 0; raise it")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.lora.dropout={self.dropout} must be at least 0 and below 1; change it")
        for target in self.targets:
            if target not in LORA_TARGETS:
                raise ValueError(f"model.lora.targets has {target!r}; use {', '.join(LORA_TARGETS)}")
        if not self.targets:
            raise ValueError(f"model.lora.targets is empty, so nothing would train; use {', '.join(LORA_TARGETS)}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder. The defaults are Llama's: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    Attributes:
        layers: number of decoder layers.
        d_model: width of the residual stream.
        heads: number of query heads.
        kv_heads: number of key and value heads; divides `heads`. 0 means `heads`.
        head_dim: dimensions of a head. 0 means `d_model / heads`.
        d_ff: width of the gated feed-forward network.
        vocab_size: rows of the embedding. 0 means the tokenizer's own size.
        tie_embeddings: the output layer is the embedding, transposed.
        dtype: of the computation.
        param_dtype: of the stored parameters and the optimizer state.
        dropout: rate on each residual branch, 0 to 1.
        norm_epsilon: added to the mean square in RMSNorm.
        norm_placement: `pre` normalises the input of attention and feed-forward network, `post` their output before
            it is added to the stream (OLMo 2), `both` does both (Gemma 2).
        norm_plus_one: norms multiply by one plus their parameter, which starts at zero (Gemma).
        qk_norm: normalise queries and keys: `head` over each head (Qwen3), `all` over all heads together (OLMo 2).
        attention_bias: `qkv` adds a bias to queries, keys and values (Qwen2), `all` to attention's output too.
        attention_scale: multiplies the scores; 0 means one over the square root of the head's dimensions.
        attention_softcap: c in `c tanh(scores / c)` (Gemma 2); 0 means none.
        attention: how to compute it: all scores at once (`plain`), a block of them at a time (`blockwise`), by the
            backend's own kernel where it has one and else `blockwise` (`fused`), or whatever is fastest (`auto`).
        logits_softcap: the same for the output layer.
        window: keys that a query sees, its own included, in layers with a window; 0 means no layer has one.
        window_pattern: whether a layer has the window, from the first layer on, repeated.
        rope_theta: base of the rotary frequencies (Su et al. 2021, RoFormer).
        rope_scaling: how they are stretched.
        rope_local_theta: base in layers with a window, where it is another and not stretched (Gemma 3); 0 means the
            same.
        rope_pattern: whether a layer has rotary positions, from the first layer on, repeated (SmolLM3).
        activation: of the feed-forward gate; `gelu_tanh` is its approximation by tanh (Gemma).
        mlp_bias: the feed-forward matrices have biases.
        scale_embeddings: multiply embeddings by the square root of `d_model` (Gemma).
        latent: latent attention, in place of grouped-query attention.
        moe: mixture of experts, in place of the feed-forward network.
        lora: low-rank updates, the only parameters that train then, but for a value head.
        value_head: a vector beside the output layer that tells what a policy may expect, `Decoder.values`.
        pretrained: a folder or file to take the architecture, the parameters at step 0 and the tokenizer from.
    """

    layers: int = 4
    d_model: int = 128
    heads: int = 4
    kv_heads: int = 0
    head_dim: int = 0
    d_ff: int = 512
    vocab_size: int = 0
    tie_embeddings: bool = False
    dtype: DType = "float32"
    param_dtype: DType = "float32"
    dropout: float = 0.0
    norm_epsilon: float = 1e-5
    norm_placement: Literal["pre", "post", "both"] = "pre"
    norm_plus_one: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    attention_bias: Literal["none", "qkv", "all"] = "none"
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    attention: Literal["auto", "plain", "blockwise", "fused"] = "auto"
    logits_softcap: float = 0.0
    window: int = 0
    window_pattern: tuple[bool, ...] = (True,)
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_local_theta: float = 0.0
    rope_pattern: tuple[bool, ...] = (True,)
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    mlp_bias: bool = False
    scale_embeddings: bool = False
    latent: LatentAttention | None = None
    moe: MoeConfig | None = None
    lora: LoraConfig | None = None
    value_head: bool = False
    pretrained: str = ""

    def __post_init__(self) -> None:
        sizes = ("layers", "d_model", "heads", "d_ff")
        _at_least("", self, dict.fromkeys(sizes, 1))
        _at_least("", self, dict.fromkeys(("kv_heads", "head_dim", "vocab_size", "window"), 0))
        _at_least("", self, dict.fromkeys(("attention_scale", "attention_softcap", "logits_softcap"), 0))
        _at_least("", self, {"rope_local_theta": 0})
        _at_most("", self, dict.fromkeys((*sizes, "kv_heads", "head_dim", "vocab_size"), _LARGEST))
        if not self.head_dim and not self.latent and self.d_model % self.heads:
            raise ValueError(
                f"model.heads={self.heads} does not divide model.d_model={self.d_model}; "
                f"use {_divisors_near(self.d_model, self.heads)}, or set model.head_dim"
            )
        if self.rotary_dim % 2:
            raise ValueError(
                f"model.heads={self.heads} gives heads of {self.size_of_head} dimensions; "
                "RoPE rotates pairs, so model.d_model / model.heads, or model.head_dim, must be even"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(
                f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}; "
                f"use {_divisors_near(self.heads, self.kv_heads)}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout={self.dropout} must be at least 0 and below 1; change it")
        for name, most in (("rope_theta", 1e30), ("norm_epsilon", 1.0)):
            if getattr(self, name) <= 0:
                raise ValueError(f"model.{name}={getattr(self, name)} must be above 0; raise it")
            _at_most("", self, {name: most})
        for name in ("window_pattern", "rope_pattern"):
            if not getattr(self, name):
                raise ValueError(f"model.{name} is empty; give it one true or false for each of its layers")
        self._check_latent()
        if self.moe and not self.pretrained:
            _at_least("moe.", self.moe, dict.fromkeys(_MOE_SIZES, 1))
        if self.moe and (wrong := [n for n in self.moe.dense_layers if not 0 <= n < self.layers]):
            raise ValueError(
                f"model.moe.dense_layers has {wrong[0]}, but model.layers={self.layers} are 0 to {self.layers - 1}; "
                "leave it out"
            )

    def _check_latent(self) -> None:
        if self.latent is None:
            return
        for name, plain in (("kv_heads", 0), ("head_dim", 0), ("qk_norm", "none"), ("attention_bias", "none")):
            if getattr(self, name) not in (plain, self.heads if name == "kv_heads" else plain):
                raise ValueError(f"model.{name}={getattr(self, name)} has no meaning with model.latent; leave it out")

    @property
    def size_of_head(self) -> int:
        """Dimensions of a query's head."""
        if self.latent:
            return self.latent.nope_dim + self.latent.rope_dim
        return self.head_dim or self.d_model // self.heads

    @property
    def size_of_value(self) -> int:
        """Dimensions of a value's head."""
        return self.latent.value_dim if self.latent else self.size_of_head

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.latent.rope_dim if self.latent else self.size_of_head

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def kinds(self) -> tuple[Literal["dense", "moe"], ...]:
        """Of every layer's feed-forward network."""
        moe = self.moe
        return tuple("moe" if moe and n not in moe.dense_layers else "dense" for n in range(self.layers))

    @property
    def windows(self) -> tuple[int, ...]:
        """Keys that a query of each layer sees; 0 means all."""
        pattern = self.window_pattern
        return tuple(self.window * pattern[n % len(pattern)] for n in range(self.layers))

    @property
    def rotary(self) -> tuple[bool, ...]:
        """Whether each layer has rotary positions."""
        return tuple(self.rope_pattern[n % len(self.rope_pattern)] for n in range(self.layers))


def _at_least(prefix: str, record: object, least: Mapping[str, float]) -> None:
    for name, bound in least.items():
        if getattr(record, name) < bound:
            raise ValueError(f"model.{prefix}{name}={getattr(record, name)} must be at least {bound:g}; raise it")


def _at_most(prefix: str, record: object, most: Mapping[str, float]) -> None:
    for name, bound in most.items():
        if getattr(record, name) > bound:
            shown = f"{bound}" if isinstance(bound, int) else f"{bound:g}"
            raise ValueError(f"model.{prefix}{name}={getattr(record, name)} must be at most {shown}; lower it")


def _divisors_near(number: int, wanted: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return " or ".join(str(d) for d in sorted(sorted(divisors, key=lambda d: abs(d - wanted))[:2]))

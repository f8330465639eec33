"""What keys of a config.json mean, both ways: each part reads some keys into `ModelConfig`'s options, and writes them.

Families of models (`models.pretrained.families`) are made of these parts. The keys' meanings are those that
transformers gives them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from models.config import LatentAttention, ModelConfig, MoeConfig
from models.pretrained.keys import Keys
from models.pretrained.rope import Rope

__all__ = [
    "Activation",
    "AttentionBias",
    "DeepSeekExperts",
    "Latent",
    "MixtralExperts",
    "Option",
    "Part",
    "QueryScalar",
    "QwenExperts",
    "RopeLayers",
    "Windows",
    "alternate",
    "from_layer",
    "pattern",
    "without_rope",
]

Json = dict[str, Any]


class Part(Protocol):
    """Some keys and what they mean."""

    def read(self, keys: Keys) -> Json:
        """Options of `ModelConfig`."""

    def write(self, config: ModelConfig) -> Json:
        """The keys; whether they hold all of the configuration is for the family to see, by reading them again."""


@dataclass(frozen=True)
class Option:
    """A key that is an option.

    Attributes:
        effective: attribute of `ModelConfig` that a file says where the option may leave it open.
        null: what a null in the file stands for; without it, a null is an error.
    """

    key: str
    option: str
    kind: type
    effective: str = ""
    null: Any = field(default=...)

    def read(self, keys: Keys) -> Json:
        return {self.option: keys.take(self.key, self.kind, self.null)}

    def write(self, config: ModelConfig) -> Json:
        value = getattr(config, self.effective or self.option)
        return {self.key: None if not self.effective and value == self.null else value}


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True)
class Activation:
    """The feed-forward gate's; Gemma has it in `hidden_activation`, and then transformers reads no `hidden_act`."""

    key: str = "hidden_act"

    def read(self, keys: Keys) -> Json:
        name = keys.take(self.key, str)
        if name not in _ACTIVATIONS:
            raise keys.wrong(self.key, f"is not supported; {', '.join(_ACTIVATIONS)} are", name)
        if self.key != "hidden_act":
            keys.only("hidden_act", (name,), f"is another than {self.key}={name}, which counts; remove one")
        return {"activation": _ACTIVATIONS[name]}

    def write(self, config: ModelConfig) -> Json:
        return {self.key: next(name for name, ours in _ACTIVATIONS.items() if ours == config.activation)}


@dataclass(frozen=True)
class AttentionBias:
    """Whether queries, keys, values and attention's output have biases, all or none."""

    def read(self, keys: Keys) -> Json:
        return {"attention_bias": "all" if keys.take("attention_bias", bool) else "none"}

    def write(self, config: ModelConfig) -> Json:
        return {"attention_bias": config.attention_bias == "all"}


@dataclass(frozen=True)
class QueryScalar:
    """Gemma's: scores are divided by its square root."""

    def read(self, keys: Keys) -> Json:
        scalar = keys.take("query_pre_attn_scalar", float)
        if scalar <= 0:
            raise keys.wrong("query_pre_attn_scalar", "must be above 0")
        return {"attention_scale": scalar**-0.5}

    def write(self, config: ModelConfig) -> Json:
        scalar = config.attention_scale**-2 if config.attention_scale else float(config.size_of_head)
        whole = round(scalar)
        return {"query_pre_attn_scalar": whole if abs(whole - scalar) < 1e-6 * scalar else scalar}


# --- Layers that differ -------------------------------------------------------------------------------------------


def pattern(layers: Sequence[bool]) -> tuple[bool, ...]:
    """The shortest pattern that gives the layers when it is repeated."""
    for length in range(1, len(layers)):
        if all(value == layers[n % length] for n, value in enumerate(layers)):
            return tuple(layers[:length])
    return tuple(layers)


Rule = Callable[[Keys, int], Sequence[bool]]
"""Which layers have a window where a file has no `layer_types`, from its keys and the number of layers."""


def every(keys: Keys, layers: int) -> Sequence[bool]:
    return (True,) * layers


def from_layer(keys: Keys, layers: int) -> Sequence[bool]:
    """Qwen's."""
    first = keys.take("max_window_layers", int)
    return [number >= first for number in range(layers)]


def alternate(keys: Keys, layers: int) -> Sequence[bool]:
    """Gemma 2's."""
    return [number % 2 == 0 for number in range(layers)]


def five_of_six(keys: Keys, layers: int) -> Sequence[bool]:
    """Gemma 3's; the key came under two names."""
    names = [name for name in ("sliding_window_pattern", "_sliding_window_pattern") if name in keys]
    periods = [keys.take(name, int) for name in names] or [6]
    if min(periods) < 1 or len(set(periods)) > 1:
        raise keys.wrong(names[0], "is not the period of the layers without a window")
    return [(number + 1) % periods[0] != 0 for number in range(layers)]


def without_rope(keys: Keys, layers: int) -> Sequence[bool]:
    """SmolLM3's."""
    return [not has for has in _rope_layers(keys)]


def never(keys: Keys, layers: int) -> Sequence[bool]:
    return (False,) * layers


@dataclass(frozen=True)
class Windows:
    """Which layers have a sliding window.

    Attributes:
        rule: where the file has no `layer_types`.
        switch: `use_sliding_window` has to be true as well.
        types: the file may have `layer_types`, and they count; otherwise they may only repeat the rule.
    """

    rule: Rule
    switch: bool = False
    types: bool = True

    def read(self, keys: Keys) -> Json:
        layers = keys.take("num_hidden_layers", int)
        window = keys.take("sliding_window", int, 0) if self.rule is not never else 0
        if self.rule is never:
            keys.only("sliding_window", (None,), "is not supported, as transformers takes no notice of it here")
            keys.only("use_sliding_window", (False, None), "is not supported; this family has no windows")
        elif window < 0 or (window == 0 and keys.any("sliding_window") is not None):
            raise keys.wrong("sliding_window", "must be at least 1, or null")
        elif self.switch and not keys.take("use_sliding_window", bool):
            window = 0
        elif not self.switch:
            keys.only("use_sliding_window", (bool(window), None), "says the contrary of sliding_window")
        keys.only("sliding_window_size", (window, None), "is another than sliding_window; remove one")
        ruled = list(self.rule(keys, layers)) if window else [False] * layers
        if not window:  # then they say nothing
            for name in ("max_window_layers", "sliding_window_pattern", "_sliding_window_pattern"):
                keys.any(name)
        windowed = self._types(keys, layers, ruled)
        if any(windowed) and not window:
            raise keys.wrong("layer_types", "has sliding_attention, but there is no sliding_window")
        return {"window": window, "window_pattern": pattern(windowed)} if any(windowed) else {}

    def _types(self, keys: Keys, layers: int, ruled: list[bool]) -> list[bool]:
        types = keys.take("layer_types", list, None) if "layer_types" in keys else None
        if types is None:
            return ruled
        known = {"full_attention": False, "sliding_attention": True}
        if len(types) != layers or not all(name in known for name in types):
            raise keys.wrong("layer_types", f"does not name {' or '.join(known)} for each of the {layers} layers")
        windowed = [known[name] for name in types]
        if not self.types and windowed != ruled:
            raise keys.wrong("layer_types", "differs from sliding_window, which alone counts here; remove it")
        return windowed

    def write(self, config: ModelConfig) -> Json:
        if self.rule is never:
            return {}
        windowed = [window > 0 for window in config.windows]
        json: Json = {"sliding_window": config.window if any(windowed) else None}
        if self.types:
            json["layer_types"] = ["sliding_attention" if has else "full_attention" for has in windowed]
        if self.rule is from_layer:  # older versions of transformers know no types
            json["max_window_layers"] = windowed.index(True) if any(windowed) else config.layers
        return json | ({"use_sliding_window": any(windowed)} if self.switch else {})


@dataclass(frozen=True)
class RopeLayers:
    """SmolLM3's: a 1 for each layer with rotary positions."""

    def read(self, keys: Keys) -> Json:
        return {"rope_pattern": pattern(_rope_layers(keys))}

    def write(self, config: ModelConfig) -> Json:
        return {"no_rope_layers": [int(has) for has in config.rotary]}


def _rope_layers(keys: Keys) -> list[bool]:
    layers, interval = keys.take("num_hidden_layers", int), keys.take("no_rope_layer_interval", int)
    if interval < 1:
        raise keys.wrong("no_rope_layer_interval", "must be at least 1")
    has = keys.take("no_rope_layers", list, None)
    if has is None:
        return [(number + 1) % interval != 0 for number in range(layers)]
    if len(has) < layers or not all(one in (0, 1) for one in has):
        raise keys.wrong("no_rope_layers", f"is not 0 or 1 for each of the {layers} layers")
    return [bool(one) for one in has[:layers]]


# --- Latent attention and experts ---------------------------------------------------------------------------------

_LATENT = {
    "kv_lora_rank": "kv_rank",
    "qk_nope_head_dim": "nope_dim",
    "qk_rope_head_dim": "rope_dim",
    "v_head_dim": "value_dim",
}


@dataclass(frozen=True)
class Latent:
    """DeepSeek's attention; under yarn its scores have a temperature too, which follows from the rotary positions'."""

    def read(self, keys: Keys) -> Json:
        sizes = {ours: keys.take(key, int) for key, ours in _LATENT.items()}
        latent = LatentAttention(query_rank=keys.take("q_lora_rank", int, 0), **sizes)
        heads = keys.take("num_attention_heads", int)
        if keys.take("num_key_value_heads", int, heads) != heads:
            raise keys.wrong(
                "num_key_value_heads", f"must be num_attention_heads={heads}; latent attention has no groups"
            )
        for key, size in (("head_dim", latent.rope_dim), ("qk_head_dim", latent.nope_dim + latent.rope_dim)):
            keys.only(key, (size, None), f"must be {size}, as the other dimensions say")
        scaling = Rope().read(keys)["rope_scaling"]
        scale = 0.0
        if (
            scaling and scaling.mscale_all_dim and scaling.factor > 1
        ):  # as the temperature of cosines and sines, squared
            scale = (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2
            scale *= (latent.nope_dim + latent.rope_dim) ** -0.5
        return {"latent": latent, "kv_heads": heads, "attention_scale": scale}

    def write(self, config: ModelConfig) -> Json:
        if config.latent is None:
            return {}
        json = {key: getattr(config.latent, ours) for key, ours in _LATENT.items()}
        return json | {"q_lora_rank": config.latent.query_rank or None, "num_key_value_heads": config.heads}


@dataclass(frozen=True)
class MixtralExperts:
    """A network of experts in every layer."""

    def read(self, keys: Keys) -> Json:
        keys.only("router_jitter_noise", (0, None), "is not supported: the router has no noise; set it to 0")
        moe = MoeConfig(
            experts=_experts(keys, "num_local_experts"),
            experts_per_token=keys.take("num_experts_per_tok", int),
            d_ff=keys.take("intermediate_size", int),
        )
        return {"moe": moe}

    def write(self, config: ModelConfig) -> Json:
        moe = config.moe
        if moe is None:
            return {}
        return {
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.experts_per_token,
            "intermediate_size": moe.d_ff,
        }


@dataclass(frozen=True)
class QwenExperts:
    """Experts in every so-manieth layer, but for those that are listed."""

    def read(self, keys: Keys) -> Json:
        layers, step = keys.take("num_hidden_layers", int), keys.take("decoder_sparse_step", int)
        listed = keys.take("mlp_only_layers", list, [])
        if step < 1:
            raise keys.wrong("decoder_sparse_step", "must be at least 1")
        if not all(type(number) is int and 0 <= number < layers for number in listed):
            raise keys.wrong("mlp_only_layers", f"is not a list of layers, which are 0 to {layers - 1}")
        moe = MoeConfig(
            experts=_experts(keys, "num_experts"),
            experts_per_token=keys.take("num_experts_per_tok", int),
            d_ff=keys.take("moe_intermediate_size", int),
            normalize=keys.take("norm_topk_prob", bool),
            dense_layers=tuple(n for n in range(layers) if n in listed or (n + 1) % step),
        )
        return {"moe": moe}

    def write(self, config: ModelConfig) -> Json:
        moe = config.moe
        if moe is None:
            return {}
        return {
            "num_experts": moe.experts,
            "num_experts_per_tok": moe.experts_per_token,
            "moe_intermediate_size": moe.d_ff,
            "norm_topk_prob": moe.normalize,
            "mlp_only_layers": sorted(moe.dense_layers),
            "decoder_sparse_step": 1,
        }


@dataclass(frozen=True)
class DeepSeekExperts:
    """Routed and shared experts; the first layers have none."""

    def read(self, keys: Keys) -> Json:
        keys.only("scoring_func", ("sigmoid",), "is not supported; DeepSeek-V3's is sigmoid")
        keys.only("topk_method", ("noaux_tc",), "is not supported; DeepSeek-V3's is noaux_tc")
        keys.only("moe_layer_freq", (1,), "is not supported; DeepSeek-V3's is 1")
        layers = keys.take("num_hidden_layers", int)
        moe = MoeConfig(
            experts=_experts(keys, "n_routed_experts"),
            experts_per_token=keys.take("num_experts_per_tok", int),
            d_ff=keys.take("moe_intermediate_size", int),
            shared_experts=keys.take("n_shared_experts", int),
            dense_layers=tuple(range(min(layers, keys.take("first_k_dense_replace", int)))),
            router="sigmoid",
            normalize=keys.take("norm_topk_prob", bool),
            scale=keys.take("routed_scaling_factor", float),
            groups=keys.take("n_group", int),
            top_groups=keys.take("topk_group", int),
            router_bias=True,
        )
        return {"moe": moe}

    def write(self, config: ModelConfig) -> Json:
        moe = config.moe
        if moe is None:
            return {}
        return {
            "n_routed_experts": moe.experts,
            "num_experts_per_tok": moe.experts_per_token,
            "moe_intermediate_size": moe.d_ff,
            "n_shared_experts": moe.shared_experts,
            "first_k_dense_replace": len(moe.dense_layers),
            "norm_topk_prob": moe.normalize,
            "routed_scaling_factor": moe.scale,
            "n_group": moe.groups,
            "topk_group": moe.top_groups,
            "scoring_func": moe.router,
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        }


def _experts(keys: Keys, name: str) -> int:
    """Their number; transformers takes it under two names."""
    other = "num_local_experts" if name != "num_local_experts" else "num_experts"
    if other in keys and name not in keys:
        return keys.take(other, int)
    experts = keys.take(name, int)
    keys.only(other, (experts,), f"is another than {name}; remove one")
    return experts

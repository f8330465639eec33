"""Models in GGUF files, as llama.cpp writes and runs them.

Names and meanings of tensors and metadata are those of llama.cpp's converter and of its graphs (`src/models`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from models.config import ModelConfig, MoeConfig, RopeScaling
from models.pretrained.gguf_file import GgufFile
from models.pretrained.keys import Keys
from models.pretrained.layouts import Layout
from models.pretrained.rows import read_rows
from models.pretrained.source import Index, PretrainedError
from models.pretrained.tree import leaves_of

__all__ = ["GgufSource"]

_LAYOUTS = {
    "shared.embed.embedding": Layout("token_embd.weight", "V D", "VD"),
    "shared.head.norm.scale": Layout("output_norm.weight", "D", "D"),
    "shared.head.kernel": Layout("output.weight", "V D", "DV"),
    "layers.attention_norm.scale": Layout("blk.{layer}.attn_norm.weight", "D", "D"),
    "layers.attention_post_norm.scale": Layout("blk.{layer}.post_attention_norm.weight", "D", "D"),
    "layers.mlp_norm.scale": Layout("blk.{layer}.ffn_norm.weight", "D", "D"),
    "layers.mlp_post_norm.scale": Layout("blk.{layer}.post_ffw_norm.weight", "D", "D"),
    "layers.attention.query": Layout("blk.{layer}.attn_q.weight", "NH D", "DNH"),
    "layers.attention.query_bias": Layout("blk.{layer}.attn_q.bias", "NH", "NH"),
    "layers.attention.query_norm.scale": Layout("blk.{layer}.attn_q_norm.weight", "H", "H"),
    "layers.attention.key": Layout("blk.{layer}.attn_k.weight", "KH D", "DKH"),
    "layers.attention.key_bias": Layout("blk.{layer}.attn_k.bias", "KH", "KH"),
    "layers.attention.key_norm.scale": Layout("blk.{layer}.attn_k_norm.weight", "H", "H"),
    "layers.attention.value": Layout("blk.{layer}.attn_v.weight", "KH D", "DKH"),
    "layers.attention.value_bias": Layout("blk.{layer}.attn_v.bias", "KH", "KH"),
    "layers.attention.out": Layout("blk.{layer}.attn_output.weight", "D NH", "NHD"),
    "layers.attention.out_bias": Layout("blk.{layer}.attn_output.bias", "D", "D"),
    "layers.mlp.gate": Layout("blk.{layer}.ffn_gate.weight", "F D", "DF"),
    "layers.mlp.up": Layout("blk.{layer}.ffn_up.weight", "F D", "DF"),
    "layers.mlp.down": Layout("blk.{layer}.ffn_down.weight", "D F", "FD"),
    "layers.mlp.gate_bias": Layout("blk.{layer}.ffn_gate.bias", "F", "F"),
    "layers.mlp.up_bias": Layout("blk.{layer}.ffn_up.bias", "F", "F"),
    "layers.mlp.down_bias": Layout("blk.{layer}.ffn_down.bias", "D", "D"),
    "layers.moe.router": Layout("blk.{layer}.ffn_gate_inp.weight", "E D", "DE"),
    "layers.moe.gate": Layout("blk.{layer}.ffn_gate_exps.weight", "E F D", "EDF"),
    "layers.moe.up": Layout("blk.{layer}.ffn_up_exps.weight", "E F D", "EDF"),
    "layers.moe.down": Layout("blk.{layer}.ffn_down_exps.weight", "E D F", "EFD"),
}

_ROTATED = frozenset(f"layers.attention.{name}" for name in ("query", "query_bias", "key", "key_bias"))
_ROPE_FACTORS = "rope_freqs.weight"


class GgufSource:
    """The parameters in a GGUF file: a `models.pretrained.source.WeightSource`.

    Raises:
        PretrainedError: a damaged file; an architecture or a key that is not known; a tensor that is absent, of
            another shape, or that the model has no place for.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.notes = path, tuple[str, ...]()
        self._file = GgufFile(path)
        self.config, pairs = _read_config(self._file)
        self.facts: Mapping[str, Any] = _facts(self._file, self.config)
        self._leaves = leaves_of(self.config)
        self._layouts = {leaf: _layout(leaf, self.config, pairs) for leaf in self._leaves}
        self._check()

    def read(self, leaf: str, layer: int | None, index: Index, out: np.ndarray) -> None:
        layout = self._layouts[leaf]
        name = layout.tensor.format(layer=layer)
        # A file's norms have the one added that Gemma's decoder adds.
        less = 1 if self.config.norm_plus_one and leaf.endswith(".scale") else 0

        def rows(rows: slice, columns: slice) -> np.ndarray:
            values = self._file.read(name, rows, columns)
            return values - np.float32(less) if less else values

        read_rows(layout, rows, self._leaves[leaf].shape, index, out)

    def _check(self) -> None:
        """Sees to it that the file has all parameters, and nothing else."""
        unused = dict.fromkeys(self._file.tensors)
        unused.pop(_ROPE_FACTORS, None)  # they are part of the configuration
        for name, leaf in self._leaves.items():
            layout = self._layouts[name]
            stored = layout.stored_shape(leaf.shape)
            for layer in leaf.layers or (None,):
                name = layout.tensor.format(layer=layer)
                tensor = self._file.tensors.get(name)
                if tensor is None:
                    raise PretrainedError(f"{self.path} has no tensor {name}; convert the model again")
                if tensor.shape != stored:
                    raise PretrainedError(
                        f"{self.path}: tensor {name} has the shape {list(tensor.shape)}, and the metadata ask for "
                        f"{list(stored)}; convert the model again"
                    )
                unused.pop(name)
        if unused:
            raise PretrainedError(
                f"{self.path} has a tensor {next(iter(unused))}, which this architecture has no place for; "
                "use a file without it"
            )


def _layout(leaf: str, config: ModelConfig, pairs: bool) -> Layout:
    """How a parameter lies in the file; `pairs`: rotary dimensions are neighbours."""
    if leaf not in _LAYOUTS:
        raise ValueError(f"{leaf} has no place in a GGUF file")
    return replace(_LAYOUTS[leaf], interleaved=config.size_of_head) if pairs and leaf in _ROTATED else _LAYOUTS[leaf]


def _facts(file: GgufFile, config: ModelConfig) -> dict[str, Any]:
    arch = file.metadata["general.architecture"]
    kinds = {"qwen3moe": "qwen3_moe", "gemma3": "gemma3_text", "llama": "mixtral" if config.moe else "llama"}
    found = {
        "max_position_embeddings": file.metadata.get(f"{arch}.context_length"),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {"model_type": kinds.get(arch, arch)} | {key: value for key, value in found.items() if value is not None}


# --- The architecture ---------------------------------------------------------------------------------------------

_Options = dict[str, Any]


def _read_config(file: GgufFile) -> tuple[ModelConfig, bool]:
    """The architecture, and whether rotary dimensions are neighbours in the file."""
    name = file.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise PretrainedError(
            f"{file.path}: general.architecture={name} is not known; use a model of {', '.join(_ARCHITECTURES)}"
        )
    general = Keys(file.path, file.metadata, {})
    general.only("general.type", ("model",), "is no model by itself; give the model's own file")
    general.only("split.count", (0, 1), "means that this is a part of a model; merge the parts with llama-gguf-split")
    prefix = f"{name}."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    keys = Keys(file.path, own, {}, prefix)
    try:
        options = _common(keys, file) | _ARCHITECTURES[name](keys)
        keys.finish(name)
        config = ModelConfig(**options)
        # Spelled out, so that the same model in a folder is equal.
        config = replace(config, kv_heads=config.num_kv_heads, head_dim=config.size_of_head)
        return config, name == "llama"
    except PretrainedError:
        raise
    except ValueError as error:
        raise PretrainedError(f"{file.path}: its metadata make no model: {error}") from None


def _llama(keys: Keys) -> _Options:
    """Llama, Mistral, SmolLM2 and, with experts, Mixtral."""
    experts = _optional(keys, "expert_count", int, 0)
    used = _optional(keys, "expert_used_count", int, 0)
    if not experts:
        return {}
    return {"moe": MoeConfig(experts=experts, experts_per_token=used, d_ff=keys.take("feed_forward_length", int))}


def _qwen2(keys: Keys) -> _Options:
    return {}


def _qwen3(keys: Keys) -> _Options:
    return {"qk_norm": "head"}


def _qwen3_moe(keys: Keys) -> _Options:
    moe = MoeConfig(
        experts=keys.take("expert_count", int),
        experts_per_token=keys.take("expert_used_count", int),
        d_ff=keys.take("expert_feed_forward_length", int),
    )
    return {"qk_norm": "head", "moe": moe}


def _gemma2(keys: Keys) -> _Options:
    return _gemma(keys, largest=46) | {
        "attention_softcap": _optional(keys, "attn_logit_softcapping", float, 50.0),
        "logits_softcap": _optional(keys, "final_logit_softcapping", float, 30.0),
        "window": _optional(keys, "attention.sliding_window", int, 4096),
        "window_pattern": (True, False),
    }


def _gemma3(keys: Keys) -> _Options:
    keys.only("attention.sliding_window_pattern", (6,), "is another pattern than Gemma 3's; use Gemma 3")
    return _gemma(keys, largest=62) | {
        "qk_norm": "head",
        "logits_softcap": _optional(keys, "final_logit_softcapping", float, 0.0),
        "window": keys.take("attention.sliding_window", int),
        "window_pattern": (True,) * 5 + (False,),
        "rope_local_theta": _optional(keys, "rope.freq_base_swa", float, 10_000.0),
    }


def _gemma(keys: Keys, *, largest: int) -> _Options:
    """What Gemma 2 and 3 share.

    The file does not say by what scores are divided: in the 27B model, which llama.cpp knows by its layers (`largest`),
    it is the root of d_model / heads, and in the others that of head_dim.
    """
    width, heads = keys.take("embedding_length", int), keys.take("attention.head_count", int)
    scalar = width / max(heads, 1)
    if keys.take("block_count", int) != largest:
        scalar = _optional(keys, "attention.key_length", int, scalar)
    return {
        "norm_placement": "both",
        "norm_plus_one": True,
        "activation": "gelu_tanh",
        "scale_embeddings": True,
        "attention_scale": scalar**-0.5 if scalar > 0 else 0.0,
    }


_ARCHITECTURES: dict[str, Callable[[Keys], _Options]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}


def _common(keys: Keys, file: GgufFile) -> _Options:
    """What every architecture has."""
    layers, heads, width = (keys.take(key, int) for key in ("block_count", "attention.head_count", "embedding_length"))
    key_length = _optional(keys, "attention.key_length", int, 0)
    head_dim = key_length or width // max(heads, 1)
    whole = "differs from the size of a head; use a model without it"
    keys.only("attention.value_length", (head_dim,), whole)
    keys.only("rope.dimension_count", (head_dim,), whole)
    keys.only("attention.causal", (True,), "is not a decoder's")
    keys.only("tensor_data_layout", ("reference", "Meta AI original pth"), "is not known")
    keys.only("expert_gating_func", (1,), "is another than softmax")
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise PretrainedError(f"{file.path} has no tensor token_embd.weight; convert the model again")
    keys.only("vocab_size", (table.shape[0],), f"differs from token_embd.weight's {table.shape[0]} rows")
    for key in ("context_length", "rope.scaling.finetuned"):  # they change nothing
        keys.any(key)
    theta = _optional(keys, "rope.freq_base", float, 10_000.0)
    biases = "attn_q.bias", "attn_output.bias"
    query, out = (f"blk.0.{name}" in file.tensors for name in biases)
    return {
        "layers": layers,
        "d_model": width,
        "heads": heads,
        "kv_heads": _optional(keys, "attention.head_count_kv", int, heads),
        "head_dim": key_length,
        "d_ff": keys.take("feed_forward_length", int),
        "vocab_size": table.shape[0],
        "tie_embeddings": "output.weight" not in file.tensors,
        "norm_epsilon": _short(keys.take("attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _short(theta),
        "rope_scaling": _rope_factors(file, theta, head_dim) if _ROPE_FACTORS in file.tensors else _rope_scaling(keys),
        "attention_bias": "all" if out else "qkv" if query else "none",
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }


def _optional(keys: Keys, key: str, kind: type, default: Any) -> Any:
    return keys.take(key, kind) if key in keys else default


def _short(value: float) -> float:
    """The shortest decimal that is this float32: 1e-5 and not 9.99999974e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(keys: Keys) -> RopeScaling | None:
    kind = _optional(keys, "rope.scaling.type", str, "none")
    if kind not in ("none", "linear", "yarn"):
        raise keys.wrong("rope.scaling.type", "is not known; use a model with linear, yarn or no scaling")
    factor = _optional(keys, "rope.scaling.factor", float, 1.0)
    original = _optional(keys, "rope.scaling.original_context_length", int, 0)
    if kind == "none":
        keys.only("rope.scaling.factor", (0, 1), "has no rope.scaling.type; add that")
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        keys.only(f"rope.scaling.{key}", (1,), "is another than YaRN's own")
    betas = {f"beta_{end}": f"rope.scaling.yarn_beta_{end}" for end in ("fast", "slow")}
    given = {name: keys.take(key, float) for name, key in betas.items() if key in keys}
    return RopeScaling(kind="yarn", factor=factor, original_length=original, **given)


def _rope_factors(file: GgufFile, theta: float, head_dim: int) -> RopeScaling:
    """Llama 3's scaling, which a file holds as what each frequency is divided by.

    Its factor is the largest of these numbers. The original context is looked for, and the ends of the blend are
    those of all published models.
    """
    factors = file.read(_ROPE_FACTORS, slice(0, 1), slice(0, file.tensors[_ROPE_FACTORS].shape[-1]))[0]
    factor, low, high = float(factors.max()), 1.0, 4.0
    frequency = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    for original in (8192, *(1 << power for power in range(5, 21))):
        smooth = np.clip((original * frequency / (2 * math.pi) - low) / (high - low), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4):
            return RopeScaling(
                kind="llama3",
                factor=factor,
                original_length=original,
                low_frequency_factor=low,
                high_frequency_factor=high,
            )
    raise PretrainedError(
        f"{file.path}: tensor {_ROPE_FACTORS} is not Llama 3's scaling for rope.freq_base={theta:g}; "
        "use a model without it, or its Hugging Face folder"
    )

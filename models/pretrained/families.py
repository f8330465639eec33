"""The families of models that can be read and written, each one description of its config.json and its tensors' names.

A key that no part of a family asks for, and that is not listed here as one that changes nothing, is an error: to
ignore a key that counts would give another network without a word.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.config import ModelConfig
from models.pretrained import parts
from models.pretrained.keys import Keys
from models.pretrained.parts import Activation, AttentionBias, Option, Part, QueryScalar, RopeLayers, Windows
from models.pretrained.rope import LocalRope, Rope

__all__ = ["FAMILIES", "Family", "architecture"]


@dataclass(frozen=True)
class Family:
    """What transformers calls a model type.

    Attributes:
        model_type: in config.json.
        causal: the class with the output layer, which `architectures` names.
        parts: keys and their meanings, both ways.
        fixed: options that all models of the family have.
        defaults: what transformers takes for absent keys.
        harmless: keys of this family alone that change nothing at these values; `...` for all.
        names: tensors that are called otherwise than Llama's: by leaf, below `model.layers.N.` for layers.
        extra: tensors besides, by regular expression, and why they can be left out.
    """

    model_type: str
    causal: str
    parts: tuple[Part, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    harmless: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, str] = field(default_factory=dict)

    def read(self, keys: Keys) -> ModelConfig:
        """The architecture; all keys have been asked for."""
        options = dict(self.fixed)
        for part in self.parts:
            options |= part.read(keys)
        for key, values in {**_HARMLESS, **self.harmless}.items():
            if values is ...:
                keys.any(key)
            else:
                keys.only(key, values, f"is not supported; {' or '.join(map(str, values))} is")
        keys.finish(f"model_type {self.model_type}")
        config = ModelConfig(**options)
        head_dim = 0 if config.latent else config.size_of_head  # as it will be written, so that equal is equal
        return dataclasses.replace(config, kv_heads=config.num_kv_heads, head_dim=head_dim)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """The keys; call `read` to see whether they hold all of the configuration."""
        json: dict[str, Any] = {"model_type": self.model_type, "architectures": [self.causal]}
        for part in self.parts:
            json |= part.write(config)
        return json


def architecture(config: ModelConfig) -> dict[str, Any]:
    """The options that make a network another one, with what they leave open filled in, so that equal is equal."""
    options = {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    for name in ("dtype", "param_dtype", "dropout", "lora", "pretrained", "window", "window_pattern", "rope_pattern"):
        del options[name]
    moe = config.moe and dataclasses.replace(
        config.moe, aux_loss=0.0, z_loss=0.0, bias_rate=0.0, capacity_factor=0.0, dense_layers=()
    )
    return options | {
        "kv_heads": config.num_kv_heads,
        "head_dim": config.size_of_head,
        "attention_scale": float(f"{config.attention_scale or config.size_of_head**-0.5:.6g}"),
        "windows": config.windows,
        "rotary": config.rotary,
        "kinds": config.kinds,
        "d_ff": config.d_ff if "dense" in config.kinds else None,
        "rope_local_theta": (config.rope_local_theta or config.rope_theta) if any(config.windows) else 0.0,
        "moe": moe,
    }


_GENERATION = "bos_token_id eos_token_id pad_token_id decoder_start_token_id sep_token_id prefix forced_bos_token_id " \
    "forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids do_sample early_stopping num_beams " \
    "num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty " \
    "no_repeat_ngram_size encoder_no_repeat_ngram_size max_length min_length num_return_sequences max_new_tokens " \
    "exponential_decay_length_penalty remove_invalid_values return_dict_in_generate output_scores"  # fmt: skip

_HARMLESS: Mapping[str, Any] = {
    # of the file, its writer, or the program that runs it
    **dict.fromkeys(
        "model_type architectures transformers_version torch_dtype dtype _name_or_path name_or_path use_cache "
        "cache_implementation tokenizer_class task_specific_params problem_type finetuning_task id2label label2id "
        "num_labels return_dict output_attentions output_hidden_states torchscript _attn_implementation "
        "_attn_implementation_autoset attn_implementation use_flash_attn transformers.js_config unsloth_version "
        "unsloth_fixed _commit_hash tf_legacy_loss use_bfloat16".split(),
        ...,
    ),
    **dict.fromkeys(_GENERATION.split(), ...),
    # of training: the first parameters, and losses that are a run's own options
    **dict.fromkeys("initializer_range output_router_logits router_aux_loss_coef".split(), ...),
    # of the context that the model was made for; rotary positions that are stretched ask for it themselves
    "max_position_embeddings": ...,
    "pretraining_tp": ...,  # splits a sum, which stays the same
    "attention_dropout": (0, None),
    "quantization_config": (None,),
    "auto_map": (None,),
    "is_encoder_decoder": (False,),
    "is_decoder": ...,
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
    "sparse_attention_config": (None,),
    "rope_interleaved": (False,),
    "is_llama_config": (True,),
    "use_mrope": (False,),
}

_SIZES: tuple[Part, ...] = (
    Option("vocab_size", "vocab_size", int),
    Option("hidden_size", "d_model", int),
    Option("intermediate_size", "d_ff", int),
    Option("num_hidden_layers", "layers", int),
    Option("num_attention_heads", "heads", int),
    Option("rms_norm_eps", "norm_epsilon", float),
    Option("tie_word_embeddings", "tie_embeddings", bool),
)
_HEADS: tuple[Part, ...] = (
    Option("num_key_value_heads", "kv_heads", int, "num_kv_heads", null=0),
    Option("head_dim", "head_dim", int, "size_of_head", null=0),
)
_BASE = (*_SIZES, *_HEADS, Activation(), Rope())
_MLP_BIAS = Option("mlp_bias", "mlp_bias", bool)

_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
}


def _defaults(**others: Any) -> dict[str, Any]:
    return {**_DEFAULTS, **others}


_QWEN_WINDOWS: Mapping[str, Any] = {"sliding_window": 4096, "max_window_layers": 28}

_GEMMA: dict[str, Any] = {
    "norm_placement": "both",
    "norm_plus_one": True,
    "scale_embeddings": True,
}
_GEMMA_PARTS: tuple[Part, ...] = (
    *_SIZES,
    *_HEADS,
    Activation("hidden_activation"),
    AttentionBias(),
    QueryScalar(),
    Option("attn_logit_softcapping", "attention_softcap", float, null=0.0),
    Option("final_logit_softcapping", "logits_softcap", float, null=0.0),
)
_GEMMA_HARMLESS: Mapping[str, Any] = {"use_bidirectional_attention": (False, None)}
_GEMMA_DEFAULTS = _defaults(
    hidden_activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    num_key_value_heads=4,
    head_dim=256,
    query_pre_attn_scalar=256,
    sliding_window=4096,
)
_GEMMA_NAMES = {"layers.mlp_norm.scale": "pre_feedforward_layernorm.weight"}

_ROTARY_BUFFER = {r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "are computed"}

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            (*_BASE, AttentionBias(), _MLP_BIAS, Windows(parts.never)),
            defaults=_defaults(max_position_embeddings=2048),
            extra=_ROTARY_BUFFER,
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            (*_BASE, Windows(parts.every, types=False)),
            defaults=_defaults(num_key_value_heads=8, sliding_window=4096, max_position_embeddings=4096 * 32),
            extra=_ROTARY_BUFFER,
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            (*_BASE, Windows(parts.from_layer, switch=True)),
            fixed={"attention_bias": "qkv"},
            defaults=_defaults(num_key_value_heads=32, max_position_embeddings=32768, **_QWEN_WINDOWS),
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            (*_BASE, AttentionBias(), Windows(parts.from_layer, switch=True)),
            fixed={"qk_norm": "head"},
            defaults=_defaults(num_key_value_heads=32, head_dim=128, max_position_embeddings=32768, **_QWEN_WINDOWS),
        ),
        Family(
            "smollm3",
            "SmolLM3ForCausalLM",
            (*_BASE, AttentionBias(), _MLP_BIAS, RopeLayers(), Windows(parts.without_rope, switch=True)),
            defaults=_defaults(
                num_key_value_heads=4,
                tie_word_embeddings=True,
                rope_theta=2e6,
                no_rope_layers=None,
                no_rope_layer_interval=4,
                max_position_embeddings=32768,
            ),
        ),
        Family(
            "olmo2",
            "Olmo2ForCausalLM",
            (*_BASE, AttentionBias(), Windows(parts.never)),
            fixed={"norm_placement": "post", "qk_norm": "all"},
            defaults=_defaults(rms_norm_eps=1e-5, max_position_embeddings=2048),
        ),
        Family(
            "gemma2",
            "Gemma2ForCausalLM",
            (*_GEMMA_PARTS, Rope(), Windows(parts.alternate)),
            fixed=_GEMMA,
            defaults=_GEMMA_DEFAULTS
            | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192},
            harmless=_GEMMA_HARMLESS,
            names=_GEMMA_NAMES,
        ),
        Family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            (*_GEMMA_PARTS, LocalRope(), Windows(parts.five_of_six)),
            fixed=_GEMMA | {"qk_norm": "head"},
            # Files of the larger models say only what differs from these.
            defaults=_GEMMA_DEFAULTS
            | {
                "vocab_size": 262_208,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "rope_theta": 1e6,
                "rope_local_base_freq": 10_000.0,
                "max_position_embeddings": 131_072,
            },
            harmless=_GEMMA_HARMLESS,
            names=_GEMMA_NAMES,
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            (*_BASE, Windows(parts.every, types=False), parts.MixtralExperts()),
            defaults=_defaults(
                num_key_value_heads=8,
                rms_norm_eps=1e-5,
                rope_theta=1e6,
                num_local_experts=8,
                num_experts_per_tok=2,
                max_position_embeddings=4096 * 32,
            ),
            names={
                "layers.moe.router": "block_sparse_moe.gate.weight",
                "layers.moe.gate": "block_sparse_moe.experts.{expert}.w1.weight",
                "layers.moe.up": "block_sparse_moe.experts.{expert}.w3.weight",
                "layers.moe.down": "block_sparse_moe.experts.{expert}.w2.weight",
            },
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            (*_BASE, AttentionBias(), Windows(parts.every, switch=True, types=False), parts.QwenExperts()),
            fixed={"qk_norm": "head"},
            defaults=_defaults(
                num_key_value_heads=4,
                sliding_window=4096,
                decoder_sparse_step=1,
                mlp_only_layers=None,
                moe_intermediate_size=768,
                num_experts=128,
                num_experts_per_tok=8,
                norm_topk_prob=False,
                max_position_embeddings=32768,
            ),
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            (*_SIZES, Activation(), Rope(), Windows(parts.never), parts.Latent(), parts.DeepSeekExperts()),
            defaults=_defaults(
                q_lora_rank=1536,
                n_group=8,
                topk_group=4,
                n_shared_experts=1,
                first_k_dense_replace=3,
                num_experts_per_tok=8,
                norm_topk_prob=True,
                routed_scaling_factor=2.5,
                max_position_embeddings=4096,
            ),
            harmless={
                "attention_bias": (False, None),
                "rope_interleave": ...,  # the tensors' layout
                "num_nextn_predict_layers": ...,  # layers behind the last, for predicting more than one token
                "num_mtp_layers": ...,
                "ep_size": ...,
                "aux_loss_alpha": ...,
                "seq_aux": ...,
                "auto_map": ...,  # the code that transformers had no class for then
            },
        ),
    )
}
"""By model type, the plainest first."""

"""What the keys of a config.json mean, both ways, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from models import ModelConfig, PretrainedError
from models.config import LatentAttention, MoeConfig, RopeScaling
from models.pretrained.config_file import config_keys, read_config
from models.pretrained.families import FAMILIES, architecture
from tests.models.pretrained.files import LLAMA, TINY

SIZES = {key: LLAMA[key] for key in LLAMA if key not in ("model_type", "architectures", "head_dim", "rope_theta")}


def read(folder: Path, keys: dict[str, Any]) -> ModelConfig:
    file = folder / "config.json"
    file.write_text(json.dumps(keys))
    return read_config(file).config


def of(kind: str, **keys: Any) -> dict[str, Any]:
    return {"model_type": kind} | SIZES | keys


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
OURS = RopeScaling(kind="llama3", factor=8.0, original_length=32, low_frequency_factor=1.0, high_frequency_factor=4.0)
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
S, F = "sliding_attention", "full_attention"
DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "moe_intermediate_size": 5,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
DEEPSEEK_MOE = MoeConfig(
    experts=8,
    experts_per_token=3,
    d_ff=5,
    shared_experts=1,
    dense_layers=(0,),
    router="sigmoid",
    scale=2.5,
    groups=4,
    top_groups=2,
    router_bias=True,
)
MEANINGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", of("llama"), {}),
    ("no groups", of("llama", num_key_value_heads=None), {"kv_heads": 4}),
    ("tied", of("llama", tie_word_embeddings=True), {"tie_embeddings": True}),
    ("biases", of("llama", attention_bias=True, mlp_bias=True), {"attention_bias": "all", "mlp_bias": True}),
    ("gelu", of("llama", hidden_act="gelu_pytorch_tanh"), {"activation": "gelu_tanh"}),
    ("old rope", of("llama", rope_theta=5e5, rope_scaling=LLAMA3), {"rope_theta": 5e5, "rope_scaling": OURS}),
    ("new rope", of("llama", rope_parameters={**LLAMA3, "rope_theta": 5e5}), {"rope_theta": 5e5, "rope_scaling": OURS}),
    (
        "both",
        of("llama", rope_theta=5e5, rope_scaling=LLAMA3, rope_parameters={**LLAMA3, "rope_theta": 5e5}),
        {"rope_theta": 5e5, "rope_scaling": OURS},
    ),
    (
        "linear",
        of("llama", rope_scaling={"type": "linear", "factor": 2}),
        {"rope_scaling": RopeScaling(kind="linear", factor=2.0)},
    ),
    (
        "yarn",
        of("llama", rope_scaling=YARN),
        {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_length=16)},
    ),
    (
        "yarn's own factor",
        of("llama", rope_scaling=YARN | {"factor": None, "truncate": False}),
        {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_length=16, truncate=False)},
    ),
    (
        "yarn over the whole context",
        of("llama", rope_scaling={"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}),
        {"rope_scaling": RopeScaling(kind="yarn", factor=2.0, original_length=64, attention_factor=1.5)},
    ),
    ("default rope", of("llama", rope_scaling={"rope_type": "default"}), {"rope_scaling": None}),
    ("mistral", of("mistral", sliding_window=4), {"window": 4}),
    ("mistral's default", of("mistral"), {"window": 4096}),
    ("mistral without", of("mistral", sliding_window=None), {}),
    ("qwen2", of("qwen2", sliding_window=4), {"attention_bias": "qkv"}),
    (
        "qwen2 windows",
        of("qwen2", sliding_window=4, use_sliding_window=True, max_window_layers=2),
        {"attention_bias": "qkv", "window": 4, "window_pattern": (False, False, True)},
    ),
    (
        "qwen2 types",
        of("qwen2", sliding_window=4, use_sliding_window=True, layer_types=[S, F, S]),
        {"attention_bias": "qkv", "window": 4, "window_pattern": (True, False)},
    ),
    ("qwen3", of("qwen3", head_dim=6), {"qk_norm": "head", "head_dim": 6}),
    ("qwen3's default", of("qwen3"), {"qk_norm": "head", "head_dim": 128}),
    (
        "gemma2",
        of("gemma2", head_dim=6, query_pre_attn_scalar=16, sliding_window=4, attn_logit_softcapping=None),
        {
            "head_dim": 6,
            "attention_scale": 0.25,
            "logits_softcap": 30.0,
            "window": 4,
            "window_pattern": (True, False),
            "activation": "gelu_tanh",
            "norm_placement": "both",
            "norm_plus_one": True,
            "scale_embeddings": True,
            "tie_embeddings": True,
        },
    ),
    (
        "gemma3",
        of("gemma3_text", sliding_window_pattern=3, rope_scaling={"rope_type": "linear", "factor": 8.0}),
        {
            "head_dim": 256,
            "attention_scale": 1 / 16,
            "window": 4096,
            "window_pattern": (True, True, False),
            "activation": "gelu_tanh",
            "norm_placement": "both",
            "norm_plus_one": True,
            "scale_embeddings": True,
            "tie_embeddings": True,
            "qk_norm": "head",
            "rope_theta": 1e6,
            "rope_local_theta": 1e4,
            "rope_scaling": RopeScaling(kind="linear", factor=8.0),
        },
    ),
    ("smollm3", of("smollm3", tie_word_embeddings=False), {"rope_theta": 2e6}),
    (
        "smollm3 layers",
        of("smollm3", no_rope_layers=[1, 0, 1], rope_theta=5.0, pretraining_tp=2),
        {"rope_theta": 5.0, "tie_embeddings": True, "rope_pattern": (True, False)},
    ),
    ("olmo2", of("olmo2"), {"norm_placement": "post", "qk_norm": "all"}),
    (
        "mixtral",
        of("mixtral", num_local_experts=4),
        {"rope_theta": 1e6, "moe": MoeConfig(experts=4, experts_per_token=2, d_ff=12)},
    ),
    (
        "qwen3_moe",
        of("qwen3_moe", num_experts=4, num_experts_per_tok=1, mlp_only_layers=[1], decoder_sparse_step=2),
        {
            "qk_norm": "head",
            "moe": MoeConfig(experts=4, experts_per_token=1, d_ff=768, normalize=False, dense_layers=(0, 1, 2)),
        },
    ),
    (
        "deepseek_v3",
        of("deepseek_v3", **DEEPSEEK),
        {
            "kv_heads": 4,
            "head_dim": 0,
            "latent": LatentAttention(kv_rank=6, nope_dim=4, rope_dim=2, value_dim=3),
            "moe": DEEPSEEK_MOE,
        },
    ),
]


@pytest.mark.parametrize(("keys", "options"), [case[1:] for case in MEANINGS], ids=[case[0] for case in MEANINGS])
def test_meaning(tmp_path, keys, options):
    plain = dataclasses.replace(TINY, head_dim=2)
    assert read(tmp_path, keys) == dataclasses.replace(plain, **options)


def test_yarn_of_deepseek_scales_scores(tmp_path):
    """As the model's authors have it: by the square of 0.1 mscale ln(factor) + 1."""
    yarn = {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    }
    config = read(tmp_path, of("deepseek_v3", **DEEPSEEK, rope_scaling=yarn))
    assert config.attention_scale == pytest.approx(6**-0.5 * 1.3688879454**2)
    assert config.rope_scaling == RopeScaling(
        kind="yarn", factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0
    )


def test_text_part_of_a_model_that_sees(tmp_path):
    """The larger Gemma 3 models say only what differs from transformers' own sizes."""
    text = {"model_type": "gemma3_text", "num_hidden_layers": 2, "sliding_window": 1024, "hidden_size": 2560}
    file = tmp_path / "config.json"
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}}
    file.write_text(json.dumps(outer | {"text_config": text}))
    described = read_config(file)
    assert described.wrapped and described.family.model_type == "gemma3_text"
    config = described.config
    assert (config.d_model, config.heads, config.vocab_size, config.window) == (2560, 8, 262_208, 1024)


def test_facts_are_kept(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(of("llama", eos_token_id=[1, 2], pad_token_id=None)))
    facts = read_config(file).facts
    assert facts == {"model_type": "llama", "max_position_embeddings": 64, "eos_token_id": [1, 2]}


@pytest.mark.parametrize("keys", [case[1] for case in MEANINGS], ids=[case[0] for case in MEANINGS])
def test_written_and_read_again(tmp_path, keys):
    config = read(tmp_path, keys)
    family, written = config_keys(config, {"model_type": keys["model_type"], "eos_token_id": 2})
    assert family.model_type == written["model_type"] == keys["model_type"]
    assert written["eos_token_id"] == 2
    again = read(tmp_path, written)
    assert architecture(again) == architecture(config)
    assert read(tmp_path, config_keys(again, {"model_type": keys["model_type"]})[1]) == again


def test_the_plainest_family_is_taken():
    assert config_keys(TINY, {})[0].model_type == "llama"
    assert config_keys(dataclasses.replace(TINY, window=4), {})[0].model_type == "mistral"
    assert config_keys(dataclasses.replace(TINY, qk_norm="head"), {"model_type": "llama"})[0].model_type == "qwen3"
    assert config_keys(dataclasses.replace(TINY, rope_pattern=(True, False)), {})[0].model_type == "smollm3"


def test_what_no_family_is_like():
    config = dataclasses.replace(TINY, qk_norm="head", logits_softcap=20.0)
    with pytest.raises(PretrainedError, match=r"qwen3 has no model.logits_softcap=20.0"):
        config_keys(config, {})


REFUSED: list[tuple[dict[str, Any], str]] = [
    (of("llama", rope_thetta=5), "rope_thetta=5 is not an option that is known of model_type llama"),
    (of("llama", rope_scaling={"type": "dynamic", "factor": 2.0}), 'rope_scaling.type="dynamic" is not supported'),
    (of("llama", rope_scaling={"type": "longrope", "factor": 2.0}), "longrope"),
    (of("llama", rope_scaling=LLAMA3 | {"beta": 1}), "rope_scaling.beta=1 is not an option"),
    (of("llama", rope_scaling={"type": "linear"}), "has no rope_scaling.factor"),
    (of("llama", rope_scaling={"type": "linear", "rope_type": "yarn", "factor": 2.0}), "rope_scaling.type"),
    (of("llama", rope_theta=5e5, rope_parameters={"rope_theta": 1e4}), "rope_theta=500000.0 is another than 10000"),
    (of("llama", rope_scaling=LLAMA3, rope_parameters={**YARN, "rope_theta": 1e4}), "rope_scaling"),
    (of("llama", rope_scaling=LLAMA3 | {"factor": 0.5}), "rope_scaling.factor=0.5 must be at least 1"),
    (of("llama", partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not supported"),
    (of("llama", attention_dropout=0.1), "attention_dropout=0.1 is not supported; 0 or None is"),
    (of("llama", hidden_act="relu"), 'hidden_act="relu" is not supported; silu'),
    (of("llama", sliding_window=4), "sliding_window=4"),
    (of("llama", layer_types=[S, F, F]), "layer_types"),
    (of("llama", num_hidden_layers="3"), 'num_hidden_layers="3" is not an integer'),
    (of("llama", num_hidden_layers=True), "num_hidden_layers=true is not an integer"),
    (of("llama", num_attention_heads=3), "model.heads=3"),
    (of("llama", hidden_size=None), "hidden_size=null is not an integer"),
    (of("llama", quantization_config={"quant_method": "fp8"}), "quantization_config is of fp8"),
    (of("llama", auto_map={"AutoModel": "x"}), "auto_map"),
    (of("llama", architectures=["LlamaForSequenceClassification"]), "has no LlamaForCausalLM"),
    (of("gpt9"), 'model_type="gpt9" is not supported; llama, mistral'),
    ({}, "has no model_type"),
    ({"model_type": "llama"}, "has no vocab_size"),
    (of("mistral", sliding_window=0), "sliding_window=0 must be at least 1, or null"),
    (of("mistral", layer_types=[S, F, S]), "layer_types"),
    (of("qwen2", layer_types=[S, F, S]), "layer_types"),
    (of("qwen2", use_sliding_window=True, layer_types=[S, F]), "for each of the 3 layers"),
    (of("qwen2", use_sliding_window=True, layer_types=[S, F, "chunked_attention"]), "chunked_attention"),
    (of("qwen2", use_mrope=True), "use_mrope=true"),
    (of("qwen3_moe", use_sliding_window=True, max_window_layers=2), "max_window_layers=2"),
    (of("qwen3_moe", num_experts=4, num_local_experts=5), "num_local_experts=5 is another than num_experts"),
    (of("qwen3_moe", mlp_only_layers=[3]), "mlp_only_layers"),
    (of("qwen3_moe", decoder_sparse_step=0), "decoder_sparse_step=0"),
    (of("gemma2", hidden_act="gelu"), 'hidden_act="gelu" is another than hidden_activation'),
    (of("gemma2", use_bidirectional_attention=True), "use_bidirectional_attention=true"),
    (of("gemma2", query_pre_attn_scalar=0), "query_pre_attn_scalar=0"),
    (of("gemma2", sliding_window_size=4), "sliding_window_size=4 is another than sliding_window"),
    (of("gemma3_text", rope_parameters={S: {"rope_type": "linear", "factor": 2.0}}), "stretches sliding_attention"),
    (of("gemma3_text", sliding_window_pattern=2, _sliding_window_pattern=6), "sliding_window_pattern"),
    (of("smollm3", no_rope_layers=[1]), "no_rope_layers=[1] is not 0 or 1 for each of the 3 layers"),
    (of("mixtral", router_jitter_noise=0.1), "router_jitter_noise=0.1"),
    (of("deepseek_v3", **DEEPSEEK | {"num_key_value_heads": 2}), "num_key_value_heads=2 must be num_attention_heads=4"),
    (of("deepseek_v3", **DEEPSEEK, scoring_func="softmax"), 'scoring_func="softmax" is not supported'),
    (of("deepseek_v3", **DEEPSEEK, attention_bias=True), "attention_bias=true is not supported"),
    (of("deepseek_v3", **DEEPSEEK, head_dim=64), "head_dim=64 must be 2"),
    (of("deepseek_v3", **DEEPSEEK | {"topk_group": 5}), "model.moe.top_groups=5"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=[case[1][:40] for case in REFUSED])
def test_refused(tmp_path, keys, message):
    with pytest.raises(PretrainedError) as error:
        read(tmp_path, keys)
    assert message in str(error.value)
    assert str(tmp_path / "config.json") in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_key_of_a_file_is_asked_for(tmp_path, kind):
    """None can be added that is ignored."""
    keys = of(kind, **DEEPSEEK) if kind == "deepseek_v3" else of(kind)
    read(tmp_path, keys)
    with pytest.raises(PretrainedError, match=r"some_new_option=true is not an option that is known"):
        read(tmp_path, keys | {"some_new_option": True})

"""Low-rank updates in PEFT's files."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import Decoder, forward, load_pretrained, save_adapter, save_pretrained
from models.config import LatentAttention, LoraConfig, MoeConfig
from models.lora import merge
from models.pretrained import PretrainedError, open_pretrained, write_source
from tests.models.pretrained.files import TINY, change, read_tensors, same, write_tensors
from tests.oracles.inputs import random_parameters

EVERY = ("query", "key", "value", "out", "gate", "up", "down")


def saved(tmp_path, **options):
    """A model and an adapter of it, as folders; the configuration and parameters of both together."""
    config = dataclasses.replace(TINY, **({"lora": LoraConfig(rank=3, alpha=6.0, targets=EVERY)} | options))
    params = random_parameters(Decoder(config))
    plain = dataclasses.replace(config, lora=None)
    save_pretrained(plain, _without_updates(params), tmp_path / "base")
    facts = dict(open_pretrained(tmp_path / "base").facts)
    save_adapter(config, params, tmp_path / "adapter", base="../base", facts=facts)
    return config, params, tmp_path / "adapter"


def _without_updates(tree):
    if not isinstance(tree, dict):
        return tree
    return {name: _without_updates(leaf) for name, leaf in tree.items() if "_lora_" not in name}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora": LoraConfig(rank=2, targets=("value", "down"), dropout=0.1)},
        {
            "lora": LoraConfig(rank=2, targets=("query", "out")),
            "kv_heads": 0,
            "head_dim": 0,
            "latent": LatentAttention(kv_rank=6, nope_dim=4, rope_dim=4, value_dim=3),
            "moe": MoeConfig(
                experts=4, experts_per_token=2, d_ff=5, shared_experts=1, dense_layers=(0,), router="sigmoid",
                router_bias=True, groups=2, top_groups=1,
            ),
        },
    ],
    ids=["every target", "two", "latent"],
)  # fmt: skip
def test_out_and_in_again(tmp_path, options):
    config, params, folder = saved(tmp_path, **options)
    again, loaded = load_pretrained(folder)
    assert again.lora == config.lora
    assert same(loaded, params)


def test_names_and_shapes_are_peft_s(tmp_path):
    config, params, folder = saved(tmp_path)
    tensors = read_tensors(folder / "adapter_model.safetensors")
    assert len(tensors) == 3 * 7 * 2
    prefix = "base_model.model.model.layers.1."
    first, second = (tensors[f"{prefix}self_attn.q_proj.lora_{name}.weight"] for name in "AB")
    attention = params["layers"]["attention"]
    np.testing.assert_array_equal(first, np.asarray(attention["query_lora_a"][1]).T)
    np.testing.assert_array_equal(second, np.asarray(attention["query_lora_b"][1]).reshape(3, 16).T)
    assert tensors[f"{prefix}self_attn.o_proj.lora_A.weight"].shape == (3, 16)
    assert tensors[f"{prefix}mlp.down_proj.lora_B.weight"].shape == (8, 3)
    keys = json.loads((folder / "adapter_config.json").read_text())
    assert (keys["r"], keys["lora_alpha"], keys["bias"]) == (3, 6.0, "none")
    assert keys["target_modules"] == sorted(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
    # The matrix that PEFT adds: B A alpha / r, as transformers has q_proj, [outputs, inputs].
    _, merged = merge(config, params)
    update = np.asarray(merged["layers"]["attention"]["query"][1] - attention["query"][1]).reshape(8, 16).T
    np.testing.assert_allclose(second @ first * 2.0, update, atol=1e-5)


def test_a_base_beside_the_adapter_comes_first(tmp_path, monkeypatch):
    """Before one of that name from where the program runs."""
    config, _, folder = saved(tmp_path)
    work = tmp_path / "elsewhere" / "work"
    for made in (work, work.parent / "base"):
        made.mkdir(parents=True)
    monkeypatch.chdir(work)
    assert load_pretrained(folder)[0].lora == config.lora


def test_merged_by_three_ways(tmp_path):
    config, params, folder = saved(tmp_path)
    _, merged = merge(config, params)
    (tmp_path / "streamed").mkdir()
    write_source(open_pretrained(folder), tmp_path / "streamed")
    save_pretrained(config, params, tmp_path / "saved")
    tokens = jnp.asarray([[1, 2, 3, 4]], jnp.int32)
    want = forward(config, params, tokens)
    for name in ("streamed", "saved"):
        again, loaded = load_pretrained(tmp_path / name)
        assert again.lora is None
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), loaded, merged)
        np.testing.assert_allclose(forward(again, loaded, tokens), want, atol=1e-4 * float(jnp.abs(want).max()))


def test_the_root_of_the_rank(tmp_path):
    *_, folder = saved(tmp_path)
    change(folder / "adapter_config.json", use_rslora=True)
    lora = open_pretrained(folder).config.lora
    assert lora is not None and lora.alpha / lora.rank == pytest.approx(6.0 / 3**0.5)


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"peft_type": "IA3"}, 'peft_type="IA3" is not supported; LORA is'),
        ({"base_model_name_or_path": "org/model"}, 'base_model_name_or_path="org/model" is not here; set it'),
        ({"use_dora": True}, "use_dora=true is not supported"),
        ({"bias": "all"}, 'bias="all" is not supported'),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern="),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save=["lm_head"] is not an option that is known'),
        ({"target_modules": ["c_attn"]}, 'target_modules=["c_attn"] has c_attn; use down_proj, gate_proj, k_proj'),
        ({"new_option": 1}, "new_option=1 is not an option that is known of LoRA"),
        ({"r": 4}, "asks for floats of [4, "),
        ({"r": 0}, "rank=0 must be at least 1"),
        ({"target_modules": ["q_proj"]}, "updates what has no low-rank update here"),
    ],
)
def test_what_cannot_be_used(tmp_path, keys, wanted):
    *_, folder = saved(tmp_path)
    change(folder / "adapter_config.json", **keys)
    with pytest.raises(PretrainedError) as error:
        load_pretrained(folder)
    assert wanted in str(error.value) and "adapter" in str(error.value)


def test_a_missing_tensor(tmp_path):
    *_, folder = saved(tmp_path)
    file = folder / "adapter_model.safetensors"
    tensors = read_tensors(file)
    name = next(iter(tensors))
    del tensors[name]
    write_tensors(file, tensors)
    with pytest.raises(PretrainedError, match=f"has no tensor {name}"):
        load_pretrained(folder)

"""Folders written and read: the names and forms of tensors, shards of files and of meshes, and damage."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import Decoder, PretrainedError, forward, load_pretrained, save_pretrained
from models.config import LatentAttention, LoraConfig, MoeConfig, RopeScaling
from models.pretrained import fill_tree, open_pretrained, write_source
from models.pretrained.hugging_face import write_hugging_face
from models.pretrained.tree import leaves_of, shapes_of
from schedules.stages import StageLayout
from tests.models.pretrained.files import LLAMA, TINY, change, read_tensors, same, write_tensors, written
from tests.oracles.inputs import random_parameters

LATENT = dataclasses.replace(
    TINY,
    kv_heads=4,
    head_dim=0,
    latent=LatentAttention(kv_rank=6, query_rank=5, nope_dim=4, rope_dim=4, value_dim=3),
    moe=MoeConfig(
        experts=4,
        experts_per_token=2,
        d_ff=5,
        shared_experts=2,
        dense_layers=(0,),
        router="sigmoid",
        groups=2,
        router_bias=True,
    ),
)
MODELS = {
    "llama": dataclasses.replace(TINY, rope_scaling=RopeScaling(kind="linear", factor=2.0)),
    "llama-biases": dataclasses.replace(TINY, attention_bias="all", mlp_bias=True, tie_embeddings=True),
    "mistral": dataclasses.replace(TINY, window=3),
    "qwen2": dataclasses.replace(TINY, attention_bias="qkv"),
    "qwen3": dataclasses.replace(TINY, qk_norm="head"),
    "smollm3": dataclasses.replace(TINY, rope_pattern=(True, True, False)),
    "olmo2": dataclasses.replace(TINY, qk_norm="all", norm_placement="post"),
    "gemma3_text": dataclasses.replace(
        TINY,
        norm_placement="both",
        norm_plus_one=True,
        scale_embeddings=True,
        qk_norm="head",
        activation="gelu_tanh",
        attention_scale=0.5,
        tie_embeddings=True,
        window=3,
        window_pattern=(True, False),
        rope_local_theta=100.0,
    ),
    "mixtral": dataclasses.replace(TINY, moe=MoeConfig(experts=3, experts_per_token=2, d_ff=12)),
    "qwen3_moe": dataclasses.replace(
        TINY, qk_norm="head", moe=MoeConfig(experts=3, experts_per_token=2, d_ff=5, dense_layers=(1,))
    ),
    "deepseek_v3": LATENT,
}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_export_and_import_is_the_identity(tmp_path, config):
    params = written(tmp_path / "one", config)
    found, loaded = load_pretrained(tmp_path / "one")
    assert same(loaded, params)
    save_pretrained(found, loaded, tmp_path / "two")
    assert load_pretrained(tmp_path / "two")[0] == found
    assert (
        read_tensors(tmp_path / "one" / "model.safetensors").keys()
        == read_tensors(tmp_path / "two" / "model.safetensors").keys()
    )
    write_source(open_pretrained(tmp_path / "two"), make(tmp_path / "three"))
    files = ("config.json", "model.safetensors")
    assert all((tmp_path / "two" / name).read_bytes() == (tmp_path / "three" / name).read_bytes() for name in files)


def make(folder):
    folder.mkdir()
    return folder


def test_names_and_forms_of_tensors(tmp_path):
    """Hugging Face has matrices as [out, in], heads one after the other."""
    params = written(tmp_path / "model")
    tensors = read_tensors(tmp_path / "model" / "model.safetensors")
    shared, layers = params["shared"], params["layers"]
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], shared["embed"]["embedding"])
    np.testing.assert_array_equal(tensors["lm_head.weight"], shared["head"]["kernel"].T)
    np.testing.assert_array_equal(
        tensors["model.layers.1.self_attn.k_proj.weight"], layers["attention"]["key"][1].reshape(8, 8).T
    )
    np.testing.assert_array_equal(
        tensors["model.layers.2.self_attn.o_proj.weight"], layers["attention"]["out"][2].reshape(16, 8).T
    )
    np.testing.assert_array_equal(
        tensors["model.layers.0.post_attention_layernorm.weight"], layers["mlp_norm"]["scale"][0]
    )
    assert len(tensors) == 3 + 9 * 3
    assert list(tensors)[0] == "model.embed_tokens.weight" and list(tensors)[-1] == "lm_head.weight"


def test_interleaved_pairs(tmp_path):
    """DeepSeek's files have rotary dimensions in pairs (2i, 2i + 1); here they are halves (i, i + half)."""
    params = written(tmp_path / "model", LATENT)["layers"]
    tensors = read_tensors(tmp_path / "model" / "model.safetensors")
    query = tensors["model.layers.1.self_attn.q_b_proj.weight"].reshape(4, 8, 5)  # heads, 4 plain and 4 rotated, rank
    ours = np.asarray(params["attention"]["query_up"][1]).transpose(1, 2, 0)
    np.testing.assert_array_equal(query[:, [0, 1, 2, 3, 4, 6, 5, 7]], ours)
    down = tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]  # 6 latent and 4 rotated
    np.testing.assert_array_equal(down[[*range(6), 6, 8, 7, 9]], np.asarray(params["attention"]["kv_down"][0]).T)
    change(tmp_path / "model" / "config.json", rope_interleave=False)
    halves = load_pretrained(tmp_path / "model")[1]["layers"]["attention"]["kv_down"][0]
    np.testing.assert_array_equal(down, np.asarray(halves).T)


@pytest.mark.parametrize("config", [TINY, LATENT], ids=["llama", "deepseek_v3"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_device_reads_its_part(tmp_path, config, axis):
    """Every dimension divided by itself, so that each part of each tensor is read once on its own."""
    params = written(tmp_path / "model", config)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def sharding(leaf):
        even = leaf.ndim > axis and leaf.shape[axis] % 2 == 0
        return NamedSharding(mesh, PartitionSpec(*(None,) * axis, "x") if even else PartitionSpec())

    shardings = jax.tree.map(sharding, params)
    loaded = load_pretrained(tmp_path / "model", shardings=shardings)[1]
    assert same(loaded, params)
    assert jax.tree.all(jax.tree.map(lambda leaf, wanted: leaf.sharding == wanted, loaded, shardings))


def test_training_form(tmp_path):
    """Layers in any places, zeros where there is none."""
    params = written(tmp_path / "model", LATENT)
    layout = StageLayout((range(0, 1), range(1, 3)), (1, 0), 2)
    source = open_pretrained(tmp_path / "model")
    leaves = leaves_of(source.config)

    def table(name):
        held = leaves[name].layers
        return None if held is None else np.where(np.isin(layout.table, held), layout.table, -1)

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def shape(path, leaf):
        staged = layout.table.shape + leaf.shape[1:] if path[0].key == "layers" else leaf.shape
        return jax.ShapeDtypeStruct(staged, leaf.dtype, sharding=device)

    shapes = jax.tree_util.tree_map_with_path(shape, shapes_of(source.config))
    staged = fill_tree(source, shapes, table)
    assert same(staged["shared"], params["shared"])
    assert same(staged["layers"]["attention"], layout.to_stages(params["layers"]["attention"]))
    assert same(
        jax.tree.map(lambda leaf: leaf[0, 0], staged["layers"]["moe"]), params["layers"]["moe"]
    )  # layers 1 and 2
    assert not np.any(staged["layers"]["moe"]["gate"][1])


def test_dtypes(tmp_path):
    written(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    exact = {name: np.round(tensor * 16) / 16 for name, tensor in read_tensors(file).items()}  # bfloat16 holds them
    write_tensors(file, exact)
    config, wide = load_pretrained(tmp_path / "model")
    assert (config.dtype, config.param_dtype) == ("float32", "float32")
    config, narrow = load_pretrained(tmp_path / "model", dtype="bfloat16", param_dtype="bfloat16")
    assert (config.dtype, config.param_dtype) == ("bfloat16", "bfloat16")
    assert same(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow), wide)
    save_pretrained(config, narrow, tmp_path / "narrow")
    config, again = load_pretrained(tmp_path / "narrow")
    assert (config.dtype, config.param_dtype) == ("float32", "bfloat16")
    assert same(again, narrow)
    write_tensors(file, {name: tensor.astype(np.float16) for name, tensor in exact.items()})
    assert same(load_pretrained(tmp_path / "model")[1], wide)


def test_several_files(tmp_path, monkeypatch):
    params = written(tmp_path / "model", LATENT)
    source = open_pretrained(tmp_path / "model")
    folder = make(tmp_path / "shards")
    take = _taker(source)
    write_hugging_face(folder, source.config, take, source.facts, shard_bytes=1500)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(path.stat().st_size < 1500 + 4096 for path in folder.glob("*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert same(load_pretrained(folder)[1], params)


def _taker(source):
    leaves = leaves_of(source.config)

    def take(leaf, layer, expert):
        out = np.empty(leaves[leaf].shape, np.float32)
        source.read(leaf, layer, tuple(slice(0, size) for size in out.shape), out)
        return out if expert is None else out[expert]

    return take


def test_low_rank_updates_are_merged(tmp_path):
    config = dataclasses.replace(TINY, lora=LoraConfig(rank=2, alpha=6.0, targets=("query", "out", "up")))
    params = random_parameters(Decoder(config))
    save_pretrained(config, params, tmp_path / "merged")
    plain, merged = load_pretrained(tmp_path / "merged")
    assert plain.lora is None
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    np.testing.assert_allclose(forward(plain, merged, tokens), forward(config, params, tokens), rtol=1e-4, atol=1e-5)
    without = {**params["layers"]["attention"]}
    assert not np.allclose(merged["layers"]["attention"]["out"], without["out"])
    np.testing.assert_array_equal(merged["layers"]["attention"]["key"], without["key"])


def test_nothing_half_written(tmp_path):
    params = written(tmp_path / "model")
    with pytest.raises(PretrainedError, match=r"model exists; give the path of a new folder"):
        save_pretrained(TINY, params, tmp_path / "model")
    with pytest.raises(ValueError, match=r"params: layers.mlp.down is of shape"):
        save_pretrained(dataclasses.replace(TINY, d_ff=20), params, tmp_path / "other")
    odd = dataclasses.replace(TINY, logits_softcap=3.0)
    with pytest.raises(PretrainedError, match=r"has no model.logits_softcap=3.0"):
        save_pretrained(odd, params, tmp_path / "other")
    (tmp_path / "file").touch()
    with pytest.raises(PretrainedError, match=r"file/below cannot be written"):
        save_pretrained(TINY, params, tmp_path / "file" / "below")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model"]


# --- What a file may hold besides --------------------------------------------------------------------------------


def with_tensors(folder, **others):
    file = folder / "model.safetensors"
    write_tensors(file, read_tensors(file) | others)
    return folder


def test_tensors_that_may_be_left_out(tmp_path):
    one = np.ones(2, np.float32)
    tied = dataclasses.replace(TINY, tie_embeddings=True)
    params = written(tmp_path / "tied", tied)
    with_tensors(tmp_path / "tied", **{"lm_head.weight": one, "model.layers.0.self_attn.rotary_emb.inv_freq": one})
    notes = open_pretrained(tmp_path / "tied").notes
    assert [note.split(": ", 1)[1] for note in notes] == [
        "1 tensors are left out: they are the embedding again, as tie_word_embeddings has it",
        "1 tensors are left out: they are computed",
    ]
    assert same(load_pretrained(tmp_path / "tied")[1], params)

    params = written(tmp_path / "deepseek", LATENT)
    with_tensors(tmp_path / "deepseek", **{"model.layers.3.eh_proj.weight": one, "model.layers.3.enorm.weight": one})
    assert "2 tensors are left out: they predict more" in open_pretrained(tmp_path / "deepseek").notes[0]
    assert same(load_pretrained(tmp_path / "deepseek")[1], params)
    with_tensors(tmp_path / "deepseek", **{"model.layers.2.enorm.weight": one})
    with pytest.raises(PretrainedError, match=r"model.layers.2.enorm.weight has no place"):
        open_pretrained(tmp_path / "deepseek")


@pytest.mark.parametrize(
    ("text", "sees"), [("language_model.{}", "vision_tower"), ("model.language_model.{}", "model.vision_tower")]
)
def test_text_part_of_a_model_that_sees(tmp_path, text, sees):
    folder = tmp_path / "model"
    params = written(folder, MODELS["gemma3_text"])
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": keys, "vision_config": {}}))
    tensors = read_tensors(folder / "model.safetensors")
    cut = "" if text.startswith("language") else "model."
    named = {text.format(name.removeprefix(cut)): tensor for name, tensor in tensors.items()}
    write_tensors(folder / "model.safetensors", named | {f"{sees}.patch.weight": np.ones(3, np.float32)})
    assert "1 tensors are left out: they are for images" in open_pretrained(folder).notes[0]
    assert same(load_pretrained(folder)[1], params)


# --- Damage ------------------------------------------------------------------------------------------------------


def damaged(folder, **tensors):
    """A sound folder, and then some tensors otherwise; None takes one away."""
    written(folder)
    file = folder / "model.safetensors"
    held = read_tensors(file) | tensors
    write_tensors(file, {name: tensor for name, tensor in held.items() if tensor is not None})
    return folder


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, f"has no tensor {UP}"),
        (np.zeros((8, 12), np.float32), f"{UP} has the shape [8, 12], and config.json asks for [12, 8]"),
        (np.zeros((12, 8), np.int8), f"{UP} is of I8, which is quantised"),
    ],
    ids=["missing", "shape", "quantised"],
)
def test_a_tensor_that_does_not_fit(tmp_path, tensor, message):
    folder = damaged(tmp_path / "model", **{UP: tensor})
    assert message in refusal(folder)


def refusal(folder):
    with pytest.raises(PretrainedError) as error:
        load_pretrained(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    return str(error.value)


def test_a_tensor_that_has_no_place(tmp_path):
    folder = damaged(tmp_path / "model", **{"model.layers.0.self_attn.q_norm.weight": np.ones(4, np.float32)})
    assert "model.layers.0.self_attn.q_norm.weight has no place in a model of type llama" in refusal(folder)


def test_truncated_files(tmp_path):
    written(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 5, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert "is truncated" in refusal(tmp_path / "model")
    file.write_bytes(whole + b"\0")
    assert "its last tensor ends at" in refusal(tmp_path / "model")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"[1]", "holds no JSON object"),
        (b'{"a": 1}', "a is damaged"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "a is damaged"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "a is damaged"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', "is truncated"),
        (b"\xff\xfe", "is not valid JSON"),
    ],
)
def test_damaged_headers(tmp_path, header, message):
    written(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert message in refusal(tmp_path / "model")


@pytest.fixture
def shards(tmp_path):
    written(tmp_path / "whole")
    source = open_pretrained(tmp_path / "whole")
    folder = make(tmp_path / "shards")
    write_hugging_face(folder, source.config, _taker(source), {}, shard_bytes=2000)
    return folder


def test_a_missing_file_of_several(shards):
    lost = sorted(shards.glob("*.safetensors"))[1]
    lost.unlink()
    assert f"{lost} is missing; model.safetensors.index.json says that it holds model.layers." in refusal(shards)


def test_an_index_that_is_wrong(shards):
    index, first = shards / "model.safetensors.index.json", sorted(shards.glob("*.safetensors"))[0].name
    sound = json.loads(index.read_text())

    def refused(places):
        index.write_text(json.dumps({"weight_map": sound["weight_map"] | places}))
        return refusal(shards)

    assert "has no lm_head.bias, though model.safetensors.index.json says so" in refused({"lm_head.bias": first})
    assert "index.json says nothing of it" in refused({"lm_head.weight": first})
    assert "is missing" in refused({"lm_head.weight": "../whole/model.safetensors"})
    index.write_text("{}")
    assert "has no weight_map" in refusal(shards)
    index.write_text("{")
    assert "is not valid JSON" in refusal(shards)


def test_folders_without_a_model(tmp_path):
    folder = make(tmp_path / "model")
    assert "config.json cannot be read: No such file" in refusal(folder)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert "has neither model.safetensors nor model.safetensors.index.json; give a folder" in refusal(folder)
    (folder / "pytorch_model.bin").touch()
    assert "its weights are pickles" in refusal(folder)
    assert "does not exist" in refusal(tmp_path / "none")
    (folder / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refusal(folder)

"""GGUF files: equal to the Hugging Face folders that they were converted from, whatever the storage; damaged ones."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import Decoder, ModelConfig, PretrainedError, load_pretrained, save_pretrained
from models.config import MoeConfig
from models.pretrained.gguf import GgufSource
from models.pretrained.gguf_file import GgufFile
from models.pretrained.layouts import Layout
from models.pretrained.rows import read_rows
from tests.oracles.gguf_files import convert

FAMILIES = ["llama3", "qwen2", "qwen3", "gemma2", "mixtral"]


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_the_folder(shared: Path, tmp_path: Path, name: str):
    """Configuration and every parameter, to the last bit but for the one that Gemma's norms have added."""
    folder = shared / "fixtures/hf" / name
    config, params = load_pretrained(convert(folder, tmp_path / "model.gguf"))
    expected_config, expected = load_pretrained(folder)
    assert config == expected_config
    tolerance = 1e-7 if name == "gemma2" else 0.0
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=tolerance), params, expected)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (
            "gemma3_text",
            {
                "norm_placement": "both",
                "norm_plus_one": True,
                "qk_norm": "head",
                "activation": "gelu_tanh",
                "scale_embeddings": True,
                "tie_embeddings": True,
                "attention_scale": 16**-0.5,
                "head_dim": 16,
                "window": 8,
                "window_pattern": (True,) * 5 + (False,),
                "rope_theta": 1e6,
                "rope_local_theta": 1e4,
            },
        ),
        (
            "qwen3_moe",
            {"qk_norm": "head", "head_dim": 16, "moe": MoeConfig(experts=4, experts_per_token=2, d_ff=24)},
        ),
    ],
)
def test_equals_what_was_saved(tmp_path: Path, kind: str, options: dict):
    """Families without a fixture: random parameters, saved as a folder and converted from it."""
    config = ModelConfig(
        layers=7, d_model=32, heads=4, kv_heads=2, d_ff=48, vocab_size=40, norm_epsilon=1e-6, **options
    )
    params = Decoder(config).init(jax.random.key(0))
    facts = {"model_type": kind, "max_position_embeddings": 64}
    save_pretrained(config, params, tmp_path / "hf", facts=facts)
    source = GgufSource(convert(tmp_path / "hf", tmp_path / "model.gguf"))
    assert source.facts == facts
    read_config, read = load_pretrained(tmp_path / "model.gguf")
    assert read_config == config
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=2e-7 if config.norm_plus_one else 0.0), read, params)


def test_facts(shared: Path, tmp_path: Path):
    def tokens(writer: gguf.GGUFWriter) -> None:
        writer.add_bos_token_id(3)
        writer.add_eos_token_id(4)

    source = GgufSource(convert(shared / "fixtures/hf/mixtral", tmp_path / "model.gguf", also=tokens))
    assert source.facts == {
        "model_type": "mixtral",
        "max_position_embeddings": 256,
        "bos_token_id": 3,
        "eos_token_id": 4,
    }


@pytest.mark.slow
def test_smollm2_is_transformers(shared: Path, smollm2: Path):
    """Its greedy text is that of transformers: every token of the reply is the likeliest after those before it."""
    golden = json.loads((shared / "fixtures/smollm2/golden.json").read_text())
    config, params = load_pretrained(smollm2)
    ids, prompt = np.array(golden["full_ids"], np.int32), len(golden["prompt_ids"])
    logits = jax.jit(Decoder(config).forward)(params, jnp.asarray(ids[None]))[0]
    np.testing.assert_array_equal(jnp.argmax(logits, -1)[prompt - 1 : -1], ids[prompt:])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_storage(shared: Path, tmp_path: Path, kind: str):
    """Equal to the values that were quantised, to the precision of the storage."""
    folder = shared / "fixtures/hf/qwen2"
    _, params = load_pretrained(convert(folder, tmp_path / "model.gguf", kind))
    _, expected = load_pretrained(folder)
    relative = {"F16": 2**-11, "BF16": 2**-8, "Q8_0": 2**-7, "Q5_0": 2**-4, "Q5_1": 2**-4, "Q4_0": 2**-3, "Q4_1": 2**-3}

    def close(path, one, other):
        if other.ndim == 1 or "bias" in path[-1].key or "scale" in path[-1].key:
            np.testing.assert_array_equal(one, other)
            return
        assert np.abs(one - other).max() <= relative[kind] * np.abs(other).max()
        assert np.abs(one - other).max() > 0

    jax.tree_util.tree_map_with_path(close, params, expected)


def naive_q4_k(block: bytes) -> list[float]:
    """256 values: eight groups, each with a scale and a minimum of six bits (ggml-quants.c, block_q4_K)."""
    d, dmin = struct.unpack("<2e", block[:4])
    packed, low = block[4:16], block[16:]
    values = []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            minimum = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        for i in range(32):
            byte = low[group // 2 * 32 + i]
            values.append(d * scale * (byte >> 4 if group % 2 else byte & 15) - dmin * minimum)
    return values


def naive_q6_k(block: bytes) -> list[float]:
    """256 values of six bits, four low and two high; sixteen scales of eight bits (ggml-quants.c, block_q6_K)."""
    low, high, scales = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
    (d,) = struct.unpack("<e", block[208:210])
    values = [0.0] * 256
    for half in range(2):
        for i in range(32):
            for part in range(4):
                byte = low[half * 64 + part % 2 * 32 + i]
                nibble = byte >> 4 if part >= 2 else byte & 15
                bits = nibble | (high[half * 32 + i] >> 2 * part & 3) << 4
                place = half * 128 + part * 32 + i
                values[place] = d * scales[place // 16] * (bits - 32)
    return values


@pytest.mark.parametrize(("kind", "naive"), [("Q4_K", naive_q4_k), ("Q6_K", naive_q6_k)])
def test_k_quants(tmp_path: Path, kind: str, naive):
    number = gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[number][1]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (3, 2, size), np.uint8)
    for at in (0, 2) if kind == "Q4_K" else (208,):  # scales in half precision, which random bytes would make infinite
        raw[..., at : at + 2] = rng.uniform(0.01, 0.1, (3, 2, 1)).astype(np.float16).view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("t", raw.reshape(3, -1), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = [[value for block in row for value in naive(block.tobytes())] for row in raw]
    file = GgufFile(tmp_path / "k.gguf")
    whole = file.read("t", slice(0, 3), slice(0, 512))
    np.testing.assert_allclose(whole, np.array(expected, np.float32), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(file.read("t", slice(1, 2), slice(250, 300)), whole[1:2, 250:300])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("stored", "canonical", "interleaved"),
    [("D", "D", False), ("V D", "VD", False), ("F D", "DF", False), ("NH D", "DNH", True), ("NH", "NH", True)]
    + [("D NH", "NHD", False), ("E F D", "EDF", False), ("KH D", "DKH", False)],
)  # fmt: skip
@pytest.mark.parametrize("at_once", [1, 100, 1 << 22])
def test_parts_of_a_parameter(monkeypatch, stored, canonical, interleaved, dtype, at_once):
    """Any part equals the same part of the whole tensor, transposed."""
    import ml_dtypes

    import models.pretrained.rows

    monkeypatch.setattr(models.pretrained.rows, "_AT_ONCE", at_once)
    sizes = {"V": 7, "D": 6, "F": 5, "N": 4, "K": 2, "H": 8, "E": 3}
    rng = np.random.default_rng(0)
    tensor = rng.normal(size=[sizes[letter] for letter in stored.replace(" ", "")]).astype(np.float32)
    letters = stored.replace(" ", "")
    whole = tensor
    if interleaved:  # pair i of a head is 2i, 2i + 1 in the file, and i, i + H/2 here
        order = [*range(0, sizes["H"], 2), *range(1, sizes["H"], 2)]
        whole = np.take(tensor, order, letters.index("H"))
    whole = whole.transpose([letters.index(letter) for letter in canonical])
    layout = Layout("t", stored, canonical, sizes["H"] if interleaved else 0)
    shape = tuple(sizes[letter] for letter in canonical)
    flat = tensor.reshape(-1, layout.stored_shape(shape)[-1])
    for _ in range(20):
        ends = [sorted(rng.choice(size + 1, 2, replace=False)) for size in shape]
        index = tuple(slice(int(a), int(b)) for a, b in ends)
        out = np.full([b - a for a, b in ends], np.nan, np.dtype(getattr(ml_dtypes, dtype, dtype)))
        asked: list[int] = []

        def rows(rows: slice, columns: slice, asked: list[int] = asked) -> np.ndarray:
            asked.append(flat[rows, columns].size)
            return flat[rows, columns]

        read_rows(layout, rows, shape, index, out)
        np.testing.assert_array_equal(out, whole[index].astype(out.dtype))
        if len(shape) == 2 and not interleaved:
            assert sum(asked) == out.size, "no more than has to be read"


def test_parts_equal_the_whole(shared: Path, tmp_path: Path):
    """Divided over four devices in any dimension."""
    file = convert(shared / "fixtures/hf/llama3", tmp_path / "model.gguf")
    config, expected = load_pretrained(file)
    mesh = jax.make_mesh((4,), ("a",))
    for axis in range(4):

        def sharding(leaf, axis=axis):
            divided = axis < leaf.ndim and leaf.shape[axis] % 4 == 0
            spec = jax.sharding.PartitionSpec(*[None] * axis, "a") if divided else jax.sharding.PartitionSpec()
            return jax.sharding.NamedSharding(mesh, spec)

        _, params = load_pretrained(file, shardings=jax.tree.map(sharding, expected))
        jax.tree.map(np.testing.assert_array_equal, params, expected)


# --- What is refused ----------------------------------------------------------------------------------------------


def changed(name: str, value: object) -> object:
    def change(writer: gguf.GGUFWriter) -> None:
        for fields in writer.kv_data:
            fields.pop(name, None)
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, np.ndarray):
            writer.add_tensor(name, value)

    return change


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("general.architecture", "mamba", "general.architecture=mamba is not known"),
        ("general.type", "adapter", 'general.type="adapter" is no model by itself'),
        ("split.count", 3, "split.count=3 means that this is a part"),
        ("llama.attention.sliding_window", 8, "llama.attention.sliding_window=8 is not an option"),
        ("llama.block_count", None, "has no llama.block_count"),
        ("llama.block_count", 3, "tensor blk.3.attn_norm.weight, which this architecture has no place for"),
        ("llama.block_count", 5, "has no tensor blk.4."),
        ("llama.block_count", "4", 'llama.block_count="4" is not an integer'),
        ("llama.feed_forward_length", 96, "tensor blk.0.ffn_down.weight has the shape [64, 160]"),
        ("llama.rope.dimension_count", 8, "llama.rope.dimension_count=8 differs from the size of a head"),
        ("llama.rope.scaling.type", "longrope", 'llama.rope.scaling.type="longrope" is not'),
        ("llama.attention.head_count", 3, "its metadata make no model: model."),
        ("llama.expert_gating_func", 2, "llama.expert_gating_func=2 is another than softmax"),
        ("blk.0.attn_gate.weight", np.ones((2, 2), np.float32), "tensor blk.0.attn_gate.weight, which this"),
        ("blk.0.nan.weight", np.ones((2, 2), np.float64), "tensor blk.0.nan.weight is stored as F64"),
    ],
)
def test_refused(shared: Path, tmp_path: Path, name: str, value: object, words: str):
    file = tmp_path / "model.gguf"
    convert(shared / "fixtures/hf/llama3", file, also=changed(name, value))
    with pytest.raises(PretrainedError) as error:
        GgufSource(file)
    assert words in str(error.value) and str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_rope_factors_of_another_scaling(shared: Path, tmp_path: Path):
    folder = tmp_path / "hf"
    folder.mkdir()
    source = shared / "fixtures/hf/llama3"
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"]["high_freq_factor"] = 5.0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(PretrainedError, match="rope_freqs.weight is not Llama 3's scaling"):
        GgufSource(convert(folder, tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"kind": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64},
            {"kind": "yarn", "factor": 4.0, "original_length": 64},
        ),
    ],
)
def test_rope_scaling(shared: Path, tmp_path: Path, keys: dict, expected: dict):
    def also(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            changed(f"qwen2.rope.scaling.{key}", value)(writer)

    scaling = GgufSource(convert(shared / "fixtures/hf/qwen2", tmp_path / "m.gguf", also=also)).config.rope_scaling
    assert scaling is not None and scaling == replace(scaling, **expected)


def test_cut_short(shared: Path, tmp_path: Path):
    """At any byte: an error that names the file, and the tensor where the cut is in one."""
    whole = convert(shared / "fixtures/hf/llama3", tmp_path / "whole.gguf").read_bytes()
    file = tmp_path / "cut.gguf"
    for length in [*range(0, 3000, 7), *np.linspace(3000, len(whole) - 1, 40).astype(int)]:
        file.write_bytes(whole[:length])
        with pytest.raises(PretrainedError) as error:
            GgufSource(file)
        assert str(file) in str(error.value)
    assert "tensor output_norm.weight ends beyond the file" in str(error.value)


def test_damaged_bytes(shared: Path, tmp_path: Path):
    """Random bytes in the header never do anything but raise a `PretrainedError`."""
    whole = convert(shared / "fixtures/hf/llama3", tmp_path / "whole.gguf").read_bytes()
    rng = np.random.default_rng(0)
    file = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(300):
        raw = bytearray(whole)
        at = int(rng.integers(0, 3000))
        raw[at : at + 4] = rng.bytes(4)
        file.write_bytes(raw)
        try:
            GgufSource(file)
        except PretrainedError as error:
            refused += 1
            assert str(file) in str(error)
    assert refused > 150


def test_values_that_are_not_finite(shared: Path, tmp_path: Path):
    file = convert(shared / "fixtures/hf/llama3", tmp_path / "model.gguf")
    tensor = GgufFile(file).tensors["blk.1.ffn_up.weight"]
    raw = bytearray(file.read_bytes())
    raw[tensor.start : tensor.start + 4] = b"\xff" * 4
    file.write_bytes(raw)
    with pytest.raises(PretrainedError, match=r"model.gguf: blk.1.ffn_up.weight holds values that are not finite"):
        load_pretrained(file)

"""GGUF files of small models: a restatement of llama.cpp's converter, with the `gguf` package's names.

What `convert_hf_to_gguf.py` does to tensors: Llama's query and key rows are put in the order of neighbouring rotary
pairs, Gemma's norms have one added, Mixtral's and Qwen's experts are stacked.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}

Change = Callable[[gguf.GGUFWriter], None]


def read_safetensors(file: Path) -> dict[str, np.ndarray]:
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:start])
    entries.pop("__metadata__", None)
    dtypes = {"F32": np.float32, "F16": np.float16}
    found = {}
    for name, entry in entries.items():
        first, last = (start + offset for offset in entry["data_offsets"])
        found[name] = np.frombuffer(raw[first:last], dtypes[entry["dtype"]]).reshape(entry["shape"])
    return found


def convert(folder: Path, out: Path, kind: str = "F32", also: Change | None = None) -> Path:
    """Writes a Hugging Face folder as a GGUF file.

    Args:
        kind: of storage, of all matrices.
        also: writes more.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    layers, heads, kv_heads = (
        config[f"num_{what}"] for what in ("hidden_layers", "attention_heads", "key_value_heads")
    )
    writer = gguf.GGUFWriter(out, arch)
    _metadata(writer, config, arch)
    if also:
        also(writer)
    names = gguf.get_tensor_name_map({name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch], layers)
    for name, values in _stacked(read_safetensors(folder / "model.safetensors")).items():
        if arch == "llama" and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            count = heads if "q_proj" in name else kv_heads
            halves = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        stored = names.get_name(name, (".weight", ".bias"))
        assert stored is not None, name
        number = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else kind]
        writer.add_tensor(stored, gguf.quantize(np.ascontiguousarray(values), number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With the experts of a layer as one tensor."""
    out: dict[str, Any] = {}
    for name, values in tensors.items():
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        if found:
            out.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = values
        else:
            out[name] = values
    return {
        name: np.stack([values[n] for n in range(len(values))]) if isinstance(values, dict) else values
        for name, values in out.items()
    }


def _metadata(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str) -> None:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_type("model")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if arch != "gemma2":
        writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch == "llama":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(head_dim)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch.startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
    if experts := config.get("num_local_experts", config.get("num_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if arch == "qwen3moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if rope.get("rope_type") == "llama3":
        factors = np.array(_llama3_factors(rope, head_dim), np.float32)
        writer.add_tensor("rope_freqs.weight", factors)


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> list[float]:
    """What each frequency is divided by."""
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        rotations = rope["original_max_position_embeddings"] / wavelength
        if rotations > rope["high_freq_factor"]:
            factors.append(1.0)
        elif rotations < rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            smooth = (rotations - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors

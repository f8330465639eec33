"""Small Hugging Face folders, made of nothing but numpy and json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models import Decoder, ModelConfig, save_pretrained
from tests.oracles.inputs import random_parameters

TINY = ModelConfig(layers=3, d_model=8, heads=4, kv_heads=2, head_dim=4, d_ff=12, vocab_size=10)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
}
"""Of `TINY`."""


def written(folder: Path, config: ModelConfig = TINY, **facts: Any) -> Any:
    """Writes a random model; returns its parameters."""
    params = random_parameters(Decoder(config))
    save_pretrained(config, params, folder, facts=facts)
    return params


def change(file: Path, **keys: Any) -> None:
    """Sets keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def read_tensors(file: Path) -> dict[str, np.ndarray]:
    """A safetensors file of float32, read by the format's definition."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        assert entry["dtype"] == "F32"
        found[name] = np.frombuffer(data[start + first : start + last], "<f4").reshape(entry["shape"])
    return found


def write_tensors(file: Path, tensors: dict[str, np.ndarray], dtypes: dict[str, str] | None = None) -> None:
    """A safetensors file, by the format's definition."""
    header, parts, offset = {}, [], 0
    for name, array in tensors.items():
        part = np.ascontiguousarray(array).tobytes()
        names = {"float32": "F32", "float16": "F16", "float64": "F64", "int8": "I8"}
        dtype = (dtypes or {}).get(name, names.get(array.dtype.name, "?"))
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + len(part)]}
        parts.append(part)
        offset += len(part)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def same(one: Any, other: Any) -> bool:
    return jax.tree.structure(one) == jax.tree.structure(other) and jax.tree.all(
        jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((np.asarray(a) == np.asarray(b)).all()), one, other)
    )

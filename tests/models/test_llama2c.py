"""Models of llama2.c: equal to its own program, in both formats; damaged files."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import Decoder
from models.pretrained import PretrainedError
from models.pretrained.llama2c import Llama2cSource
from models.pretrained.load import load_pretrained

FILES = ["stories260K.bin", "stories260K_v1.bin"]


@pytest.mark.parametrize("name", FILES)
def test_equals_the_program(shared: Path, name: str):
    """256 greedy tokens are equal, and their logits to 1e-4."""
    folder = shared / "fixtures/stories260k"
    config, params = load_pretrained(folder / name)
    ids, expected = np.load(folder / "golden_ids.npy"), np.load(folder / "golden_logits.npy")
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(Decoder(config).forward)(params, jnp.asarray(ids[None], jnp.int32))[0]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(jnp.argmax(logits, -1)[:-1], ids[1:])  # the tokens are their own greedy continuation


def test_formats_are_equal(shared: Path):
    (config, params), (other_config, other) = (
        load_pretrained(shared / "fixtures/stories260k" / name) for name in FILES
    )
    assert config == other_config
    jax.tree.map(np.testing.assert_array_equal, params, other)


@pytest.mark.parametrize("named", [True, False])
def test_untied_head(tmp_path: Path, named: bool):
    """A file with an output layer of its own, written by hand."""
    sizes = {"D": 4, "F": 6, "N": 2, "V": 5}
    rng = np.random.default_rng(0)
    head = np.array([sizes["D"], sizes["F"], 1, sizes["N"], sizes["N"], sizes["V"] * (1 if named else -1), 8], np.int32)
    of_layer = {"norm1": 4, "q": 16, "k": 16, "v": 16, "o": 16, "norm2": 4, "w1": 24, "w2": 24, "w3": 24}
    arrays = {name: rng.normal(size=size).astype(np.float32) for name, size in of_layer.items()}
    arrays |= {"embed": rng.normal(size=20).astype(np.float32), "norm": rng.normal(size=4).astype(np.float32)}
    arrays |= {"rotary": np.zeros(8 * 2, np.float32), "head": rng.normal(size=20).astype(np.float32)}
    if named:
        order = "norm1 norm2 norm embed q k v o w1 w2 w3 head"
        raw = (b"24ka" + np.int32(1).tobytes() + head.tobytes() + b"\0").ljust(256, b"\0")
    else:
        order, raw = "embed norm1 q k v o norm2 w1 w2 w3 norm rotary head", head.tobytes()
    file = tmp_path / "model.bin"
    file.write_bytes(raw + b"".join(arrays[name].tobytes() for name in order.split()))
    config, params = load_pretrained(file)
    assert not config.tie_embeddings
    np.testing.assert_array_equal(params["shared"]["head"]["kernel"], arrays["head"].reshape(5, 4).T)
    np.testing.assert_array_equal(params["layers"]["mlp"]["down"][0], arrays["w2"].reshape(4, 6).T)
    np.testing.assert_array_equal(
        params["layers"]["attention"]["value"][0], arrays["v"].reshape(2, 2, 4).transpose(2, 0, 1)
    )


@pytest.mark.parametrize("name", FILES)
def test_damaged(shared: Path, tmp_path: Path, name: str):
    whole = (shared / "fixtures/stories260k" / name).read_bytes()
    file = tmp_path / name
    for length in (0, 3, 27, 100, 256, 5000, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(PretrainedError, match=str(file)):
            Llama2cSource(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(PretrainedError, match="its header asks for"):
        Llama2cSource(file)
    damaged = bytearray(whole)
    damaged[500_000:500_004] = b"\xff" * 4
    file.write_bytes(damaged)
    with pytest.raises(PretrainedError, match=r"holds values that are not finite"):
        load_pretrained(file)


def test_quantised(shared: Path, tmp_path: Path):
    raw = bytearray((shared / "fixtures/stories260k/stories260K_v1.bin").read_bytes())
    raw[4:8] = np.int32(2).tobytes()
    file = tmp_path / "q8.bin"
    file.write_bytes(raw)
    with pytest.raises(PretrainedError, match="quantised file of llama2.c"):
        Llama2cSource(file)


def test_random_headers(tmp_path: Path):
    """Never do anything but raise a `PretrainedError`."""
    rng = np.random.default_rng(0)
    file = tmp_path / "random.bin"
    for _ in range(200):
        file.write_bytes(rng.integers(-3, 40, 7, np.int32).tobytes() + bytes(1000))
        with pytest.raises(PretrainedError):
            Llama2cSource(file)

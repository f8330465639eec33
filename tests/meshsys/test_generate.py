"""Decoding with a cache against the whole model run again for every token; and what reaches the reader."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshsys import generate as module
from meshsys.checkpoint import Checkpoints
from meshsys.cli import main
from meshsys.config import Config, to_yaml
from meshsys.generate import generate
from models import Decoder, ModelConfig
from models.sampling import sample
from tests.oracles.inputs import QUICK, random_parameters

VOCAB, PLACES, NEW = 40, 128, 6
NO_STOP = -1


@functools.cache
def model(tied: bool):
    config = ModelConfig(
        layers=2, d_model=16, heads=4, kv_heads=2, d_ff=32, vocab_size=VOCAB, tie_embeddings=tied, dropout=0.5
    )
    decoder = Decoder(config)
    # Around zero, so that the text does not settle on one token.
    params = jax.tree.map(lambda leaf: 3 * leaf - 0.3, random_parameters(decoder))
    return decoder, params, jax.jit(functools.partial(decoder.forward, params), compiler_options=QUICK)


def prompt_of(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, VOCAB, length).astype(np.int32)


def naive(tied: bool, prompt: np.ndarray) -> list[int]:
    """The likeliest token after the whole text so far, again and again; padding on the right changes nothing."""
    _, _, forward = model(tied)
    text = list(prompt)
    for _ in range(NEW):
        padded = np.zeros((1, PLACES), np.int32)
        padded[0, : len(text)] = text
        text.append(int(np.argmax(forward(padded, padded * 0 + (np.arange(PLACES) < len(text)))[0, len(text) - 1])))
    return text[len(prompt) :]


def tokens(tied: bool, prompt: np.ndarray, *, count: int = NEW, temperature: float = 0.0, seed: int = 0, stop=NO_STOP):
    decoder, params, _ = model(tied)
    key = jax.random.key(seed)
    return list(sample(decoder, params, prompt, max_tokens=count, temperature=temperature, key=key, stop=stop))


@pytest.mark.parametrize(("length", "tied"), [(1, False), (63, True), (64, False), (65, True)])
def test_greedy_equals_the_naive_loop(length, tied):
    """Prompts around the block that prompts and caches are padded to."""
    prompt = prompt_of(length)
    found = tokens(tied, prompt)
    assert found == naive(tied, prompt)
    assert len(set(found)) > 1  # or else the test would say little


def test_stop_token_is_left_out():
    whole = tokens(False, prompt_of(5))
    stop = whole[3]
    assert tokens(False, prompt_of(5), stop=stop) == whole[: whole.index(stop)]


def test_temperature_is_deterministic_by_seed():
    drawn = [tokens(False, prompt_of(5), count=20, temperature=3.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(0 <= token < VOCAB for token in drawn[0])


def test_a_low_temperature_is_greedy():
    assert tokens(False, prompt_of(5), temperature=1e-4) == tokens(False, prompt_of(5))


# --- Runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What training leaves behind, as far as `generate` reads it."""
    folder = tmp_path_factory.mktemp("run")
    model = ModelConfig(layers=2, d_model=16, heads=4, d_ff=32, vocab_size=264)
    config = Config.model_validate({"run": {"name": "run"}, "model": vars(model)})
    (folder / "config.yaml").write_text(to_yaml(config))
    state = {"step": jnp.int32(3), "params": random_parameters(Decoder(model)), "opt_state": jnp.zeros((3,))}
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    checkpoints.save(3, state, {})
    checkpoints.close()
    return folder


def test_generate_reads_a_run(run):
    """The prompt follows the beginning of a text, and the pieces are the text of the tokens."""
    decoder = Decoder(ModelConfig(layers=2, d_model=16, heads=4, d_ff=32, vocab_size=264))
    ids = np.array([256, *"Grüße".encode()], np.int32)
    wanted = sample(
        decoder, random_parameters(decoder), ids, max_tokens=9, temperature=0.0, key=jax.random.key(0), stop=256
    )
    text = bytes(token for token in wanted if token < 256).decode(errors="replace")
    assert "".join(generate(run, "Grüße", max_tokens=9)) == text


def test_generate_takes_the_seed(run):
    texts = ["".join(generate(run, "", max_tokens=12, temperature=2.0, seed=seed)) for seed in (1, 2)]
    assert texts[0] != texts[1]


def test_command(run, capsys):
    assert main(["generate", str(run), "--prompt", "def", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.parametrize("text", ["", "plain", "Grüße, 5 €", "日本語", "a😀b", "😀"])
def test_characters_are_not_torn(run, monkeypatch, text):
    monkeypatch.setattr(module, "sample", lambda *args, **kwargs: iter(text.encode()))
    pieces = list(generate(run, "", max_tokens=1))
    assert "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


@pytest.mark.parametrize(("raw", "wanted"), [(b"a\xe2\x82", "a\ufffd"), (b"\xe2\x82b", "\ufffdb"), (b"\xff", "\ufffd")])
def test_bytes_that_are_no_text(run, monkeypatch, raw, wanted):
    """They are shown as such, once it is certain that they will not become a character."""
    monkeypatch.setattr(module, "sample", lambda *args, **kwargs: iter(raw))
    assert "".join(generate(run, "", max_tokens=1)) == wanted


def test_runs_that_cannot_be_read(run, tmp_path, capsys):
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert "it has no config.yaml" in one_line(capsys)
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    for _ in range(2):
        assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
        assert "has no checkpoint yet; train it first" in one_line(capsys)
        assert not (tmp_path / "checkpoints").exists() or not any((tmp_path / "checkpoints").iterdir())
        (tmp_path / "checkpoints").mkdir(exist_ok=True)


def one_line(capsys) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("meshsys: error: ") and err.count("\n") == 1
    return err

"""`meshsys import` and `meshsys export`."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from meshsys.cli import main
from meshsys.data import load_tokenizer
from models import forward, load_pretrained
from tests.models.pretrained.files import read_tensors, same, written

CONFIG = """
run: {name: tiny, dir: run}
model: {pretrained: base, lora: {rank: 2, targets: [query, down]}}
data: {source: text.txt, sequence_length: 8, batch_size: 4, tokenizer: bytes}
train: {steps: 2, learning_rate: 0.5}
"""


def run(*words: str) -> None:
    assert main(list(words)) == 0


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model and a run that adapted it."""
    from tests.models.pretrained.files import TINY

    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        written(folder / "base", TINY.__class__(**{**vars(TINY), "vocab_size": 264}))
        (folder / "text.txt").write_text("one two three four five six seven eight nine ten " * 20)
        (folder / "tiny.yaml").write_text(CONFIG)
        run("train", "tiny.yaml")
    return folder


@pytest.fixture
def here(home, monkeypatch):
    monkeypatch.chdir(home)
    return home


TOKENS = jnp.asarray([[5, 3, 200, 7]], jnp.int32)


def test_export_merges_and_adapts(here, tmp_path):
    run("export", "run", str(tmp_path / "merged"))
    run("export", "run", str(tmp_path / "adapter"), "--adapter")
    merged, adapted = (load_pretrained(tmp_path / name) for name in ("merged", "adapter"))
    assert merged[0].lora is None and adapted[0].lora is not None
    base = load_pretrained(here / "base")
    want = forward(*merged, TOKENS)
    np.testing.assert_allclose(forward(*adapted, TOKENS), want, atol=1e-4)
    assert np.abs(forward(*base, TOKENS) - want).max() > 1e-2
    changed = {
        name
        for name, tensor in read_tensors(tmp_path / "merged" / "model.safetensors").items()
        if not np.array_equal(tensor, read_tensors(here / "base" / "model.safetensors")[name])
    }
    assert changed and all(name.endswith(("q_proj.weight", "down_proj.weight")) for name in changed)
    run("import", str(tmp_path / "adapter"), str(tmp_path / "again"))
    again = load_pretrained(tmp_path / "again")
    assert again[0].lora is None
    np.testing.assert_allclose(forward(*again, TOKENS), want, atol=1e-4)


def test_import_is_the_identity(shared, tmp_path, capsys):
    source = shared / "fixtures" / "hf" / "qwen3"
    run("import", str(source), str(tmp_path / "out"))
    assert "without a tokenizer" in capsys.readouterr().out
    config, params = load_pretrained(tmp_path / "out")
    wanted, original = load_pretrained(source)
    assert config == wanted and same(params, original)
    run("import", str(source), str(tmp_path / "half"), "--dtype", "bfloat16")
    assert load_pretrained(tmp_path / "half")[0].param_dtype == "bfloat16"


def test_import_keeps_a_gguf_s_tokenizer(smollm2, tmp_path):
    from meshsys.data.tokenizers.save import save_tokenizer

    (tmp_path / "out").mkdir()
    tokenizer = load_tokenizer(str(smollm2))
    save_tokenizer(tokenizer, tmp_path / "out")
    again = load_tokenizer(str(tmp_path / "out"))
    text = "def f(x):\n    return x**2  # caf\u00e9\t\u4f60\u597d 12345 It's"
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert (again.eos_id, again.bos_id, again.stop_ids) == (tokenizer.eos_id, tokenizer.bos_id, tokenizer.stop_ids)
    talk = [{"role": "user", "content": "Hi"}]
    assert again.chat is not None and tokenizer.chat is not None
    assert again.chat.render(talk, add_generation_prompt=True) == tokenizer.chat.render(
        talk, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["import", "nowhere", "out"], "nowhere does not exist; give a Hugging Face folder"),
        (["import", "base", "run"], "run exists; give the path of a new folder"),
        (["import", "text.txt", "out"], "text.txt is no model"),
        (["export", "nowhere", "out"], "the run nowhere does not exist"),
        (["export", "base", "out"], "base is not a run: it has no config.yaml"),
        (["export", "run", "base"], "base exists; give the path of a new folder"),
        (["import", "base", "out", "--tokenizer", "nothing"], "--tokenizer=nothing: no such file"),
    ],
)
def test_mistakes(here, capsys, words, wanted):
    before = sorted(path.name for path in Path().iterdir())
    assert main(words) == 2
    err = capsys.readouterr().err
    assert wanted in err and err.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == before


def test_no_updates_to_export(here, capsys, tmp_path):
    config = (here / "run" / "config.yaml").read_text()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.yaml").write_text(
        "run: {name: plain}\n" + "model: {layers: 1}\n" if "lora" in config else ""
    )
    assert main(["export", str(tmp_path / "plain"), "out", "--adapter"]) == 2
    assert "trained all parameters" in capsys.readouterr().err
    assert json.loads((here / "base" / "config.json").read_text())["model_type"] == "llama"

"""`meshsys reshard`: figures, the round trip, and what is written, for a published model and for a run."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshsys.cli import main
from models import Decoder, ModelConfig, load_pretrained, save_pretrained

CONFIG = ModelConfig(layers=4, d_model=32, heads=4, kv_heads=2, d_ff=64, vocab_size=64)


@pytest.fixture
def model(folder) -> str:
    save_pretrained(CONFIG, Decoder(CONFIG).init(jax.random.key(0)), Path("model"))
    return "model"


def test_a_model_goes_there_and_back(model, capsys):
    assert main(["reshard", model, "--from", "pipe=2,fsdp=4", "--to", "data=2,tensor=4", "--out", "moved"]) == 0
    out = capsys.readouterr().out
    assert "from pipe=2,fsdp=4 to data=2,tensor=4" in out and "(1.00x)" in out
    assert "the round trip is equal to the bit" in out
    (_, before), (_, after) = load_pretrained(model), load_pretrained("moved")
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_a_pipeline_is_a_destination_too(model, capsys):
    words = ["--from", "fsdp=8", "--to", "pipe=4,tensor=2", "--dtype", "bfloat16", "--out", "half", "--json"]
    assert main(["reshard", model, *words]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert 0 < figures["moved_bytes"] == figures["lower_bound_bytes"] and figures["buckets"] == 1
    (_, before), (config, after) = load_pretrained(model), load_pretrained("half")
    assert config.param_dtype == "bfloat16"
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new, jnp.asarray(old).astype(new.dtype)), after, before)


@pytest.mark.slow
def test_a_run_is_read_by_its_name(folder, capsys):
    assert main(["train", "good.yaml", "train.steps=1", "run.dir=runs/one"]) == 0
    capsys.readouterr()
    assert main(["reshard", "one", "--from", "pipe=2,fsdp=2", "--to", "tensor=2,data=2"]) == 0
    assert "equal to the bit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("nothing --from fsdp=8 --to tensor=8", "nothing"),
        ("model --from fsdp=4 --to tensor=8", "--from=fsdp=4 has 4 devices and --to=tensor=8 8"),
        ("model --from fdsp=8 --to tensor=8", "--from=fdsp=8: fdsp is no mesh axis; use pipe, data"),
        ("model --from fsdp=8 --to tensor=x", "--to=tensor=x: tensor=x has no size from 1 to 4096"),
        ("model --from fsdp=8 --to tensor=2,tensor=4", "--to=tensor=2,tensor=4 names tensor twice"),
        ("model --from fsdp=16 --to tensor=16", "--from=fsdp=16 needs 16 devices"),
        ("model --from fsdp=8 --to tensor=8 --out model", "--out=model exists; give the path of a new folder"),
        ("model --from fsdp=8 --to tensor=8 --dtype float16", "float16 is not a choice"),
    ],
)
def test_mistakes(model, capsys, words, wanted):
    before = sorted(path.name for path in Path().iterdir())
    assert main(["reshard", *words.split()]) == 2
    err = capsys.readouterr().err
    assert wanted in err and err.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == before

"""A run that begins with a model of others: its loss and gradients on a mesh are the reference's."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshsys.assemble import assemble
from meshsys.config import Config
from meshsys.errors import ConfigError
from meshsys.mesh import make_mesh
from meshsys.step import Step
from models import Batch, ModelConfig, load_pretrained, save_pretrained
from models.config import MoeConfig
from tests.models.pretrained.files import TINY, same, written
from tests.models.pretrained.test_fixtures import expected, gradient_norms
from tests.oracles.inputs import QUICK

CASES = """
name     schedule           axes                    M
llama3   1f1b               pipe=2,fsdp=2,tensor=2  1
mixtral  zb_h1              pipe=2,expert=2         1
"""

SLOW_CASES = """
name     schedule           axes                    M
qwen2    interleaved_1f1b   pipe=2,tensor=2         2
qwen3    zb_h1              pipe=2,fsdp=2           1
gemma2   1f1b               pipe=2,tensor=2         2
gemma2   gpipe              fsdp=2,tensor=2         1
mixtral  1f1b               expert=2,tensor=2       1
mixtral  1f1b               pipe=2,fsdp=2,tensor=2  1
llama3   v_half             pipe=2,tensor=2         2
"""


def rows(table: str) -> list[str]:
    return [" ".join(row.split()) for row in table.strip().splitlines()[1:]]


def make_config(path, schedule: str = "1f1b", axes: dict | None = None, microbatches: int = 1, **model) -> Config:
    axes = axes or {}
    return Config.model_validate(
        {
            "run": {"name": "x"},
            "model": {"pretrained": str(path)} | model,
            "data": {"batch_size": 2, "sequence_length": 23, "tokenizer": "bytes"},
            "mesh": {"topology": str(np.prod(list(axes.values()) or [1])), "axes": axes},
            "pipeline": {"schedule": schedule, "microbatches": microbatches},
        }
    )


def check(shared, tmp_path, monkeypatch, row: str) -> None:
    name, schedule, axes, microbatches = row.split()
    folder = shared / "fixtures" / "hf" / name
    # The fixtures have 256 tokens, and bytes have an end besides.
    monkeypatch.setattr("meshsys.assemble._with_vocabulary", lambda config, tokenizer: config)
    sizes = {axis: int(size) for axis, size in (part.split("=") for part in axes.split(","))}
    assembly = assemble(make_config(folder, schedule, sizes, int(microbatches)), poison=True)
    step = Step(assembly, make_mesh(assembly.placement))
    want = expected(folder)
    ids = jnp.asarray(want["input_ids"], jnp.int32).reshape(int(microbatches), -1, 24)
    ones = jnp.ones_like(ids[..., 1:])
    batch = Batch(
        tokens=ids[..., :-1],
        targets=ids[..., 1:],
        positions=jnp.broadcast_to(jnp.arange(23, dtype=jnp.int32), ones.shape),
        segment_ids=ones,
        weights=ones.astype(jnp.float32),
        sequence=jnp.arange(2, dtype=jnp.int32).reshape(int(microbatches), -1),
    )
    state = step.init()
    run = jax.jit(step._gradients, compiler_options=QUICK)
    loss, grads = run(state.params, batch, jnp.float32(1 / 46), None, assembly.program.rows())
    np.testing.assert_allclose(loss, want["mean_cross_entropy"], rtol=0, atol=1e-5)
    layout = assembly.program.layout
    layers = {name: layout.part(name).to_layers(part) for name, part in grads["layers"].items()}
    save_pretrained(assembly.config.model, {"shared": grads["shared"], "layers": layers}, tmp_path / "grads")
    norms, found = json.loads((folder / "grad_norms.json").read_text()), gradient_norms(tmp_path / "grads")
    assert found.keys() == norms.keys()
    np.testing.assert_allclose([found[name] for name in norms], list(norms.values()), rtol=1e-4)


@pytest.mark.parametrize("row", rows(CASES))
def test_gradients_are_the_reference_s(shared, tmp_path, monkeypatch, row):
    check(shared, tmp_path, monkeypatch, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(SLOW_CASES))
def test_gradients_are_the_reference_s_more(shared, tmp_path, monkeypatch, row):
    check(shared, tmp_path, monkeypatch, row)


WIDE = {"vocab_size": 264}


def model_file(tmp_path, **options):
    config = ModelConfig(**{**vars(TINY), **WIDE, **options})
    return tmp_path / "model", config, written(tmp_path / "model", config)


def test_parameters_are_the_file_s_and_updates_are_new(tmp_path):
    path, config, params = model_file(tmp_path)
    assembly = assemble(make_config(path, axes={"pipe": 2, "tensor": 2}, lora={"rank": 2, "targets": ["query"]}))
    assert assembly.config.model == ModelConfig(
        **{**vars(config), "lora": assembly.config.model.lora, "pretrained": str(path)}
    )
    step = Step(assembly, make_mesh(assembly.placement))
    kept = step.to_canonical(step.init())
    attention = kept.params["layers"]["attention"]
    first, second = attention.pop("query_lora_a"), attention.pop("query_lora_b")
    assert same(kept.params, params) and np.asarray(first).all() and not np.asarray(second).any()
    moments = {path[-1].key for path, leaf in jax.tree_util.tree_leaves_with_path(kept.opt_state) if leaf.ndim}
    assert moments == {"query_lora_a", "query_lora_b"}
    loaded, again = load_pretrained(path)
    assert same(again, params) and loaded.d_model == 8


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"layers": 5}, "model.layers=5 differs from the 3 of model.pretrained="),
        ({"norm_plus_one": True}, "model.norm_plus_one=true differs from the false of model.pretrained="),
        ({"moe": {"experts": 2, "experts_per_token": 1, "d_ff": 4}}, "model.moe is set, and model.pretrained="),
    ],
)
def test_an_option_that_the_file_contradicts(tmp_path, options, wanted):
    path, *_ = model_file(tmp_path)
    with pytest.raises(ConfigError, match=wanted):
        assemble(make_config(path, **options))


def test_experts_keep_the_run_s_losses(tmp_path):
    moe = {"experts": 2, "experts_per_token": 1, "d_ff": 4}
    path, *_ = model_file(tmp_path, moe=MoeConfig(**moe))
    made = assemble(make_config(path, moe=moe | {"aux_loss": 0.5})).config.model.moe
    assert made is not None and made.aux_loss == 0.5
    with pytest.raises(ConfigError, match="model.moe.experts=4 differs from the 2 of model.pretrained="):
        assemble(make_config(path, moe=moe | {"experts": 4}))

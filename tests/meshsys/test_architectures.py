"""Models whose layers differ, have experts, windows, latents or low-rank updates: every mesh gives the gradients of one
device.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from meshsys.assemble import assemble
from meshsys.config import Config
from meshsys.mesh import make_mesh
from meshsys.step import Step
from models.attention import zigzag_order
from models.parameters import trains
from tests.oracles.inputs import QUICK, random_batch, random_parameters
from tests.oracles.unpipelined import loss_and_gradients

SEQUENCES, LENGTH, VOCAB = 24, 16, 24
AXES = ("pipe", "data", "fsdp", "tensor", "expert", "context")

_MOE = {"experts": 4, "experts_per_token": 2, "d_ff": 8, "aux_loss": 0.01, "z_loss": 0.001}
MODELS = {
    "gemma": {
        "norm_placement": "both", "norm_plus_one": True, "attention_softcap": 5.0, "logits_softcap": 3.0, "window": 3,
        "window_pattern": [True, False], "activation": "gelu_tanh", "scale_embeddings": True, "tie_embeddings": True,
        "rope_local_theta": 100.0, "qk_norm": "head",
    },
    "smollm3": {"rope_pattern": [True, True, False], "attention_bias": "all", "mlp_bias": True},
    "olmo": {"norm_placement": "post", "qk_norm": "all", "dropout": 0.1},
    "moe": {"moe": _MOE},
    "capacity": {"moe": _MOE | {"capacity_factor": 1.0}},
    "mixed": {"moe": _MOE | {"dense_layers": [0, 3]}},
    "deepseek": {
        "moe": _MOE | {
            "dense_layers": [0], "router": "sigmoid", "router_bias": True, "shared_experts": 1, "scale": 2.5,
            "groups": 2, "top_groups": 1,
        },
        "latent": {"kv_rank": 6, "query_rank": 10, "nope_dim": 4, "rope_dim": 2, "value_dim": 3},
        "kv_heads": 0,
    },
    "lora": {"lora": {"rank": 2, "targets": ["query", "value", "down"], "dropout": 0.2}},
}  # fmt: skip

# Every row is a run; a mesh is pipe x data x fsdp x tensor x expert x context.
CASES = """
model     schedule           mesh         M  layers  remat                options
gemma     1f1b               2x1x1x2x1x1  3  4       full
mixed     zb_h1              2x1x1x1x2x1  3  5       none
deepseek  interleaved_1f1b   2x1x1x1x2x1  4  5       dots
lora      1f1b               2x1x2x1x1x1  3  3       none                 tick
olmo      zb_h1              2x1x1x1x1x2  3  3       full
"""

SLOW_CASES = """
model     schedule           mesh         M  layers  remat                options
smollm3   zb_h1              2x2x1x2x1x1  3  4       names:mlpwi_0
moe       1f1b               2x1x1x1x4x1  3  4       full
moe       gpipe              1x1x2x2x2x1  2  2       none                 tick
moe       1f1b               2x1x1x1x2x2  1  2       none
capacity  zb_h1              2x1x1x1x2x2  2  3       none
mixed     1f1b               4x1x1x2x1x1  6  4       full
mixed     v_half             2x1x1x1x2x1  4  7       full
deepseek  zbv                2x1x2x1x2x1  3  4       none
deepseek  1f1b               1x1x1x1x1x4  1  2       full
lora      zb_h1              2x1x1x2x1x1  3  3       full
gemma     1f1b               1x1x1x1x1x8  1  2       none
olmo      1f1b               2x2x1x1x1x2  2  2       none                 scan
mixed     1f1b               2x1x1x1x1x1  4  12      none
"""


def rows(table: str) -> list[str]:
    return [" ".join(row.split()) for row in table.strip().splitlines()[1:]]


def make_config(row: str) -> Config:
    model, schedule, mesh, microbatches, layers, remat, *options = row.split()
    sizes = [int(size) for size in mesh.split("x")]
    shape = {"d_model": 16, "heads": 4, "kv_heads": 2, "d_ff": 16, "layers": int(layers), "vocab_size": 264}
    return Config.model_validate(
        {
            "run": {"name": "x"},
            "model": shape | MODELS[model],
            "data": {"batch_size": SEQUENCES, "sequence_length": LENGTH},
            "mesh": {"topology": str(np.prod(sizes)), "axes": dict(zip(AXES, sizes, strict=True))},
            "pipeline": {
                "schedule": schedule,
                "microbatches": int(microbatches),
                "remat": remat,
                "fsdp_gather": "tick" if "tick" in options else "step",
            },
        }
    )


@functools.cache
def reference(model: str, layers: int):
    decoder = assemble(make_config(f"{model} gpipe 1x1x1x1x1x1 1 {layers} none")).decoder
    params, batch, key = random_parameters(decoder), random_batch(SEQUENCES, LENGTH, VOCAB), jax.random.key(3)
    if decoder.config.norm_plus_one:
        params = jax.tree.map(lambda leaf: leaf * 0.5, params)
    return params, batch, key, *loss_and_gradients(decoder, params, batch, key)


def check(row: str) -> None:
    assembly = assemble(make_config(row), poison=True)
    mesh = make_mesh(assembly.placement)
    step = Step(assembly, mesh)
    decoder = assembly.decoder
    params, batch, key, want_loss, want = reference(row.split()[0], decoder.config.layers)
    cut = jax.tree.map(lambda a: a.reshape(assembly.config.pipeline.microbatches, -1, *a.shape[1:]), batch)
    if assembly.axes["context"] > 1:
        order = zigzag_order(LENGTH, assembly.axes["context"])
        cut = jax.tree.map(lambda a: a[:, :, order] if a.ndim > 2 else a, cut)
    staged = jax.device_put(step._staged(params), step.shardings.params)
    run = jax.jit(step._gradients, compiler_options=QUICK)
    loss, grads = run(staged, cut, 1 / batch.weights.sum(), key, assembly.program.rows())
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    layout = assembly.program.layout
    layers = {name: layout.part(name).to_layers(part) for name, part in grads["layers"].items()}
    found = dict(jax.tree_util.tree_leaves_with_path({"shared": grads["shared"], "layers": layers}))
    for path, wanted in jax.tree_util.tree_leaves_with_path(want):
        if not trains(decoder.config, path[-1].key):
            assert path not in found and not np.asarray(wanted).any()
            continue
        got = np.asarray(found.pop(path))
        assert np.asarray(wanted).any(), path
        pairs = zip(got, wanted, strict=True) if path[0].key == "layers" else [(got, wanted)]
        for number, (one, other) in enumerate(pairs):
            error = np.abs(one - other).max() / np.abs(wanted).max()
            assert error <= 1e-4, (jax.tree_util.keystr(path), number, error)
    assert not found


@pytest.mark.parametrize("row", rows(CASES))
def test_gradients_are_those_of_one_device(row):
    check(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(SLOW_CASES))
def test_gradients_are_those_of_one_device_more(row):
    check(row)

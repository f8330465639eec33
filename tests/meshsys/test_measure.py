"""Stage actions against plain autodiff of the stage, and the cost file that is measured from them."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshsys.assemble import assemble
from meshsys.cli import main
from meshsys.config import Config
from meshsys.measure import measure, send_seconds
from meshsys.stage_actions import StageActions
from models import SAVEABLE_NAMES, Decoder, ModelConfig
from schedules.actions import Kind
from schedules.costs import Costs
from schedules.pipeline_model import PipelineModel, split_model
from schedules.remat import Remat
from tests.oracles.inputs import QUICK, random_batch, random_parameters

DECODER = Decoder(ModelConfig(layers=2, d_model=16, heads=2, d_ff=32, vocab_size=24))


@pytest.mark.parametrize(
    ("first", "last", "remat", "apart", "unroll"),
    [
        (True, True, "none", False, True),
        (True, False, "dots", False, False),
        (False, False, "full", True, False),
        (False, True, "full", True, True),
    ],
)
def test_the_actions_are_the_stage_s_gradients(first, last, remat, apart, unroll):
    params, batch = random_parameters(DECODER), random_batch(2, 8, 24)
    model = PipelineModel(DECODER.prepare, DECODER.embed, DECODER.layer, DECODER.head)
    policy = Remat.parse(remat, SAVEABLE_NAMES)
    one_layer = jax.tree.map(lambda a: a[0], params["layers"])
    key = jax.random.key(0)
    blocks = split_model(model, one_layer, params["shared"], batch, key, policy, apart=apart)
    layers = params["layers"]
    if unroll:
        layers = tuple(jax.tree.map(lambda a, i=i: a[i], layers) for i in range(2))
    weights = {"shared": params["shared"], "layers": layers}
    actions = StageActions(model, blocks, (blocks.layer,) * 2, first, last, key, unroll)
    x = () if first else jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 16)), jnp.float32)

    def stage(weights, x):
        context = DECODER.prepare(batch, key)
        x = DECODER.embed(weights["shared"], context) if first else x
        for place in range(2):
            layer = (
                weights["layers"][place] if unroll else jax.tree.map(lambda a, place=place: a[place], weights["layers"])
            )
            x, _ = DECODER.layer(layer, x, context, jnp.zeros((), jnp.int32))
        return DECODER.head(weights["shared"], x, context) if last else x

    def run(weights, x):
        y, left = actions.forward(weights, x, batch)
        dy = jnp.ones_like(y)
        given = weights, batch, left
        again = actions.recompute(*given)
        dx, stash = actions.input_gradient(*given, again, dy)
        grads = actions.weight_gradient(*given, again, stash)
        plain, backward = jax.vjp(stage, weights, x)
        return (y, dx, grads), actions.backward(*given, again, dy), (plain, backward(dy))

    (y, dx, grads), (dx_of_b, grads_of_b), (plain_y, (plain_grads, plain_dx)) = jax.jit(run, compiler_options=QUICK)(
        weights, x
    )
    np.testing.assert_allclose(y, plain_y, rtol=1e-5, atol=1e-5)
    for found, found_dx in ((grads, dx), (grads_of_b, dx_of_b)):
        if not first:
            np.testing.assert_allclose(found_dx, plain_dx, rtol=1e-4, atol=1e-5)
        assert set(found) == {"layers"} | {name for name, has in (("first", first), ("last", last)) if has}
        jax.tree.map(
            lambda mine, right: np.testing.assert_allclose(mine, right, rtol=1e-3, atol=1e-4),
            found["layers"],
            plain_grads["layers"],
        )
        for end in set(found) - {"layers"}:
            for path, mine in jax.tree_util.tree_leaves_with_path(found[end]):
                right = dict(jax.tree_util.tree_leaves_with_path(plain_grads["shared"]))[path]
                np.testing.assert_allclose(mine, right, rtol=1e-3, atol=1e-4)


CONFIG = {
    "run": {"name": "tiny"},
    "model": {"layers": 3, "d_model": 16, "heads": 2, "d_ff": 32},
    "data": {"sequence_length": 8, "batch_size": 4},
    "mesh": {"topology": "4", "axes": {"pipe": 4}},
    "pipeline": {"microbatches": 4, "remat": "full", "split_recompute": True},
}


def test_times_of_uneven_stages():
    measured = measure(assemble(Config.model_validate(CONFIG)), rounds=1)
    assert measured.kinds == ((True, 1, False), (False, 1, False), (False, 1, False), (False, 0, True))
    costs = measured.costs
    assert Costs.from_json(measured.to_json()) == costs
    for stage, kind in enumerate(measured.kinds):
        assert all(
            costs.time(action, stage) == measured.seconds[kind][action] > 0 for action in (Kind.F, Kind.I, Kind.W)
        )
    assert costs.time(Kind.F, 1) == costs.time(Kind.F, 2)
    assert costs.time(Kind.R, 1) == measured.seconds[False, 1, False]["R"] > 0
    about = json.loads(measured.to_json())["about"]
    assert [kind["stages"] for kind in about["kinds"]] == [[0], [1, 2], [3]]
    flops = {name: [kind["flops"][name] for kind in about["kinds"]] for name in "FRIWB"}
    assert flops["F"][1] > 2 * 8 * (4 * 16 * 16 + 3 * 16 * 32)  # the matmuls of one layer
    assert flops["R"][1] > flops["F"][1] / 2 and not flops["R"][2]
    assert flops["B"][1] == pytest.approx(flops["I"][1] + flops["W"][1], rel=0.05)
    assert "1-2" in measured.describe() and "embedding" in measured.describe()


def test_send():
    seconds, note = send_seconds(jax.ShapeDtypeStruct((2, 8), jnp.float32), ranks=3, rounds=1)
    assert seconds > 0 and "3 devices" in note
    assert send_seconds(jax.ShapeDtypeStruct((2, 8), jnp.float32), ranks=1)[0] == 0


def test_the_command_writes_a_file_that_the_others_read(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    sizes = ["model.layers=1", "model.d_model=16", "model.heads=2", "model.d_ff=32", "data.batch_size=2"]
    (tmp_path / "c.yaml").write_text("run: {name: tiny}\ndata: {sequence_length: 8}\n")
    command = ["schedule", "measure", "c.yaml", "--rounds", "1", *sizes, "pipeline.microbatches=2"]
    assert main([*command, "--out", "nowhere/costs.json"]) == 2
    assert "--out=nowhere/costs.json cannot be written: No such file or directory; " in capsys.readouterr().err
    assert main([*command, "--out", "costs.json"]) == 0
    assert "milliseconds on cpu" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml", "costs.json"]
    size = ["--stages", "1", "--microbatches", "2"]
    assert main(["schedule", "simulate", "zb_h1", *size, "--costs", "costs.json", "--json"]) == 0
    costs = Costs.from_json((tmp_path / "costs.json").read_text())
    work = json.loads(capsys.readouterr().out)["work"]
    assert work == pytest.approx([2 * sum(costs.time(kind, 0) for kind in (Kind.F, Kind.I, Kind.W))])
    assert costs.time(Kind.R, 0) == 0  # nothing is recomputed
    assert main(["plan", "c.yaml", *sizes, "pipeline.microbatches=2", "pipeline.costs=costs.json"]) == 0
    capsys.readouterr()
    assert main(["plan", "c.yaml", *sizes, "pipeline.microbatches=2", "pipeline.costs=cost.json"]) == 2
    assert "pipeline.costs=cost.json cannot be read" in capsys.readouterr().err

"""The compiler's figures in a plan, and the command that asks for them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys

import pytest

from meshsys.assemble import Assembly, assemble
from meshsys.cli import main
from meshsys.config import Config, to_yaml
from meshsys.errors import ConfigError
from meshsys.planner import Plan, describe, plan_of
from meshsys.planner.compile import OutOfMemory, compiled_plan, devices_of
from meshsys.torus import Topology

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed; pip install 'meshsys[tpu-aot]'"
)


def config(topology: str, model: dict | None = None, **axes: int) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "tiny"},
            "model": {"layers": 2, "d_model": 32, "heads": 4, "d_ff": 48} | (model or {}),
            "data": {"sequence_length": 16, "batch_size": 16},
            "mesh": {"topology": topology, "axes": axes},
            "pipeline": {"microbatches": 4, "split_backward": True},
        }
    )


@pytest.fixture(scope="module")
def cube() -> tuple[Assembly, Plan]:
    assembly = assemble(config("2x2x2", pipe=2, data=2, fsdp=2))
    return assembly, dataclasses.replace(plan_of(assembly), compiled=compiled_plan(assembly))


def test_bytes(cube):
    found, memory = cube[1].compiled, cube[1].memory
    assert found.arguments == pytest.approx(memory.parameters + memory.optimizer_state + memory.batch, rel=0.05)
    assert found.reused == pytest.approx(memory.parameters + memory.optimizer_state, rel=0.01)
    assert found.total == found.arguments + found.outputs - found.reused + found.temporaries + found.program
    assert (found.limit, found.step_seconds, found.mfu) == (None, None, None)


def test_flops_by_hand(cube):
    """The rank with the head runs most: for each microbatch three times the products of a layer's and the head's F."""
    assembly, plan = cube
    tokens, length, d, ff, vocabulary = 16, 16, 32, 48, assembly.config.model.vocab_size
    layer = 2 * tokens * (4 * d * d + 3 * d * ff) + 2 * 2 * tokens * length * d
    head = 2 * tokens * d * vocabulary
    assert plan.compiled.flops == pytest.approx(4 * 3 * (layer + head), rel=0.01)


def test_collectives(cube):
    assembly, plan = cube
    found = {(each.kind, each.axes): each for each in plan.compiled.collectives}
    permutes = found["permute", "pipe"]
    assert permutes.count == len(assembly.program.table.offsets) * plan.schedule.ticks
    assert permutes.bytes == permutes.count * 4 * 16 * 32
    matrices = 2 * 7  # of two layers at most, with embedding and head
    assert 0 < found["all-gather", "fsdp"].count <= matrices  # once a step, in no tick
    assert 0 < found["reduce-scatter", "fsdp"].count <= matrices


def test_a_plan_with_it_reads_back_and_is_told(cube):
    plan = cube[1]
    assert Plan.from_json(plan.to_json()) == plan
    text = describe(plan)
    assert max(map(len, text.splitlines())) <= 110
    for words in ("Compiled for 2x2x2", "host temporaries", "permute", "FLOP"):
        assert words in text


def test_the_command(tmp_path, capsys):
    path = tmp_path / "one.yaml"
    path.write_text(to_yaml(config("8", pipe=2)))
    assert main(["plan", str(path), "--topology", "2", "--compile", "--json"]) == 0
    out, err = capsys.readouterr()
    plan = json.loads(out)
    assert plan["mesh"]["topology"] == "2" and plan["compiled"]["temporaries"] > 0 and err == ""


def test_without_libtpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, find=importlib.util.find_spec: None)
    path = tmp_path / "one.yaml"
    path.write_text(to_yaml(config("v5p:2x2x1", pipe=2)))
    assert main(["plan", str(path), "--compile"]) == 0
    out, err = capsys.readouterr()
    assert "Memory of each device" in out and "Compiled" not in out
    assert err.count("\n") == 1 and "pip install 'meshsys[tpu-aot]'" in err
    with pytest.raises(ConfigError, match="tpu-aot"):
        devices_of(Topology.parse("v5p:2x2x1"))


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5p:2x2x1", "v5e:2x2", "v6e:2x2", "v7:2x2x1"])
def test_a_tpu_program(topology):
    plan = compiled_plan(assemble(config(topology, pipe=2, fsdp=2)))
    assert plan.limit > plan.total > 0 and 0 < plan.mfu < 1 and plan.step_seconds > 0
    assert {"permute", "all-gather", "reduce-scatter"} <= {each.kind for each in plan.collectives}


@pytest.mark.slow
@needs_libtpu
def test_the_compiler_rejects_what_is_too_large():
    large = config("v5e:1x1", model={"d_model": 16384, "heads": 128, "d_ff": 65536})
    with pytest.raises(OutOfMemory, match="rejects the step for memory .*pipeline.remat"):
        compiled_plan(assemble(large))

"""`pipeline.remat: auto` against every combination looked at one by one, and the run that it gives against another."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from meshsys.assemble import assemble
from meshsys.blocks import block_actions, cut_blocks
from meshsys.cli import main
from meshsys.config import Config, load_config, to_yaml
from meshsys.errors import ConfigError
from meshsys.planner import Plan, describe, plan_of
from meshsys.remat_choice import POLICIES, RematSpace, choose_remat
from models import SAVEABLE_NAMES, ModelConfig
from schedules.actions import Kind, Schedule, split_backward
from schedules.costs import Costs
from schedules.families import make
from schedules.program_tables import ProgramTables
from schedules.recompute import insert_recompute
from schedules.remat import Remat
from schedules.simulate import simulate

MODEL = ModelConfig(layers=3, d_model=16, heads=4, kv_heads=2, d_ff=48, vocab_size=40)
SIZE = MODEL, 2, 8  # a microbatch of 2 x 8 tokens


# --- Every combination, one by one --------------------------------------------------------------------------------


def slots_bytes(program: ProgramTables) -> int:
    """Bytes of all slots of a program on one device."""
    splits = {name: cut_blocks(*SIZE, *way) for name, way in program.ways.items()}
    ends = splits["layer"]
    blocks = {"first": ends.first, "last": ends.last} | {name: split.layer for name, split in splits.items()}
    size = (program.table.inbox_slots + 1) * ends.x.size * 4
    for (name, start, end), lifetime in program.lifetimes.items():
        values = {Kind.F: blocks[name].residuals, Kind.R: blocks[name].recomputed, Kind.I: blocks[name].stash}[start]
        each = sum(value.bytes for value in values if value.until is end)
        size += each * program.table.counts[lifetime] * (1 if name in ("first", "last") else program.places)
    return size


def stage_costs(remats: list[tuple[Remat, bool]], links: Costs) -> Costs:
    """FLOPs of each stage over those of a layer's forward; the first stage has two layers and the second one."""
    unit = block_actions(*SIZE, Remat("none"))["layer", Kind.F].flops
    times: dict[str, list[float]] = {kind: [] for kind in "FIWBR"}
    for stage, (remat, apart) in enumerate(remats):
        actions = block_actions(*SIZE, remat, apart)
        for kind in Kind:
            layer = actions[("layer", kind)].flops if ("layer", kind) in actions else 0.0
            end = actions[("first", "last")[stage], kind].flops if kind is not Kind.R else 0.0
            times[kind].append(((2, 1)[stage] * layer + end) / unit)
    return replace(links, **{kind: tuple(each) for kind, each in times.items()})


def one_by_one(forms: list[Schedule], links: Costs) -> list[tuple[float, int]]:
    """(makespan, bytes) of every combination on two stages."""
    policies = [(Remat.parse(text, SAVEABLE_NAMES), apart) for text in POLICIES for apart in (False, True)]
    policies = [(remat, apart) for remat, apart in policies if not apart or remat.kind in ("full", "names")]
    found = []
    for schedule, remats in itertools.product(forms, itertools.product(policies, repeat=2)):
        again = {stage for stage, (_, apart) in enumerate(remats) if apart}
        for ahead in range(4 if again else 1):
            order = insert_recompute(schedule, again, ahead)
            program = ProgramTables(order, MODEL.layers, [remat for remat, _ in remats])
            found.append((simulate(order, stage_costs(list(remats), links)).makespan, slots_bytes(program)))
    return found


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_equals_looking_at_all(name):
    whole = make(name, ranks=2, microbatches=3)
    cut = split_backward(whole)
    forms = [cut] if cut == whole else [cut, whole]
    space, wanted = RematSpace(forms, None, *SIZE), one_by_one(forms, Costs())
    sizes = sorted({size for _, size in wanted})
    assert len(space.found) == len(wanted)
    for cap in sizes[:: max(1, len(sizes) // 40)]:
        choice = choose_remat(space, cap)
        fits = [time for time, size in wanted if size <= cap]
        assert choice.outcome.makespan == pytest.approx(min(fits)) and choice.outcome.bytes <= cap
        assert simulate(choice.schedule, choice.costs).makespan == pytest.approx(choice.outcome.makespan)
        assert slots_bytes(ProgramTables(choice.schedule, MODEL.layers, choice.remats)) == choice.outcome.bytes
    with pytest.raises(ConfigError, match=f"activation_memory={sizes[0] - 1} is too small: at least {sizes[0]} bytes"):
        choose_remat(space, sizes[0] - 1)


@pytest.mark.parametrize("name", ["zb_h1", "1f1b", "interleaved_1f1b"])
def test_more_memory_is_never_slower(name):
    model = replace(MODEL, layers=8)
    space = RematSpace([split_backward(make(name, ranks=4, microbatches=6))], None, model, 2, 8)
    sizes = sorted({one.outcome.bytes for one in space.found})
    times = [choose_remat(space, cap).outcome.makespan for cap in sizes]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    ample = choose_remat(space, sizes[-1])
    assert {remat.kind for remat in ample.remats} == {"none"} and ample.outcome == ample.keep_all
    assert ample.full.makespan > ample.keep_all.makespan and ample.full.bytes < ample.keep_all.bytes


def test_apart_beats_inside_where_backwards_are_cut():
    """With the memory of full remat for all stages, zero bubble is faster with R in an action of its own."""
    space = RematSpace([make("zb_h1", ranks=4, microbatches=12)], None, replace(MODEL, layers=8), 2, 8)
    inside = space.outcome(space.uniform(space.full), 0, 0)
    apart = next(one for one in space.found if one.ways == space.uniform(space.full_apart) and one.ahead == 0)
    choice = choose_remat(space, apart.outcome.bytes)
    assert choice.outcome.makespan <= apart.outcome.makespan < inside.makespan
    assert any(action.kind is Kind.R for action in choice.schedule)


def test_times_that_are_given():
    """R takes what the costs say, for `full`; links count as in any simulation."""
    costs = Costs(F=(1, 2), I=(1, 3), W=1, R=(0.5, 0.25), send=0.125, stages=(1, 2))
    space = RematSpace([make("zb_h1", ranks=2, microbatches=3)], costs, *SIZE)
    found = space.costs((space.full, space.full_apart))
    assert found.I == pytest.approx((1.5, 6)) and found.R == pytest.approx((0, 0.5)) and found.F == (1, 4)
    for one in space.found[::7]:
        order = space.order(one.form, space.apart(one.ways), one.ahead).schedule
        assert simulate(order, space.costs(one.ways)).makespan == pytest.approx(one.outcome.makespan)


# --- As a configuration -------------------------------------------------------------------------------------------


def config(cap: int | str, *, model: dict | None = None, axes: dict | None = None, **pipeline) -> Config:
    axes = {"pipe": 4} | (axes or {})
    size = 1
    for side in axes.values():
        size *= side
    return Config.model_validate(
        {
            "run": {"name": "auto"},
            "model": {"layers": 8, "d_model": 16, "heads": 4, "kv_heads": 2, "d_ff": 48} | (model or {}),
            "data": {"sequence_length": 8, "batch_size": 12},
            "mesh": {"topology": str(size), "axes": axes},
            "pipeline": {"microbatches": 6, "remat": "auto", "activation_memory": cap} | pipeline,
        }
    )


@pytest.mark.parametrize(
    "made",
    [
        config("70KiB", schedule="1f1b"),
        config("290KiB", schedule="zb_h1"),
        config("113KiB", schedule="interleaved_1f1b"),
        config("60KiB", schedule="chimera"),
        config("137KiB", schedule="zbv", head="vocab_parallel"),
        config("160KiB", schedule="zb_h1", model={"layers": 3}),
        config("150KiB", schedule="zb_h1", axes={"tensor": 2}),
        config("110KiB", schedule="1f1b", split_backward=True, costs="F=1,I=1.2,W=0.8,R=0.9,send=0.1"),
    ],
    ids=lambda made: f"{made.pipeline.schedule} {made.pipeline.activation_memory}",
)
def test_the_plan_tells_what_was_chosen(made):
    assembly = assemble(made)
    plan = plan_of(assembly)
    choice, memory = plan.choice, plan.memory
    waiting = memory.residual_slots + memory.recomputed_slots + memory.stash_slots + memory.inbox_slots
    assert waiting == choice.bytes <= choice.cap == made.pipeline.activation_bytes
    assert simulate(assembly.schedule, assembly.costs).makespan == pytest.approx(choice.makespan)
    assert choice.keep_all_makespan <= choice.makespan
    again = {action.stage for action in assembly.schedule if action.kind is Kind.R}
    assert {stage.stage for stage in plan.stages if stage.recompute_apart} == again
    assert [stage.remat for stage in plan.stages] == list(map(str, assembly.choice.remats))
    assert Plan.from_json(plan.to_json()) == plan
    text = describe(plan)
    assert "chosen for at most" in text and all(f"  {stage.remat}" in text for stage in plan.stages)
    assert max(map(len, text.splitlines())) <= 110


def test_sizes_keep_their_form(tmp_path):
    assert config(4096).pipeline.activation_bytes == config("4KiB").pipeline.activation_bytes == 4096
    assert config("1.5 GiB").pipeline.activation_bytes == 3 * 2**29
    (tmp_path / "c.yaml").write_text(to_yaml(config("512MiB")))
    assert load_config(tmp_path / "c.yaml") == config("512MiB")


def test_measure_is_without_it(capsys, tmp_path):
    (tmp_path / "c.yaml").write_text(to_yaml(config("512MiB")))
    assert main(["schedule", "measure", str(tmp_path / "c.yaml")]) == 2
    assert "measure with pipeline.remat=none" in capsys.readouterr().err


@pytest.mark.slow
def test_trains_like_the_model_without_a_pipeline(monkeypatch, tmp_path):
    """One stage recomputes in R and another inside B; losses and norms of gradients are those of one device."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("All is well that ends well.\n" * 40)
    (tmp_path / "costs.json").write_text('{"F": [1, 1], "I": [1, 1.8], "W": [1, 1]}')
    made = config("82KiB", model={"layers": 3}, axes={"pipe": 2}, costs="costs.json").model_dump()
    made |= {"data": made["data"] | {"source": "text.txt"}, "train": made["train"] | {"steps": 2}}
    (tmp_path / "c.yaml").write_text(to_yaml(Config.model_validate(made)))
    one = ["mesh.topology=1", "mesh.axes.pipe=1", "pipeline={}"]
    for name, overrides in (("auto", []), ("one", one)):
        assert main(["train", "c.yaml", f"run.dir={name}", *overrides]) == 0
    found, wanted = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("auto", "one")
    )
    plan = Plan.from_json((tmp_path / "auto" / "plan.json").read_text())
    assert [(stage.remat, stage.recompute_apart) for stage in plan.stages] == [("full", True), ("dots", False)]
    for key in ("loss", "grad_norm"):
        assert [step[key] for step in found] == pytest.approx([step[key] for step in wanted], rel=1e-5)

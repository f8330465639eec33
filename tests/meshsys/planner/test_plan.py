"""Plans: what they say against what the assembly and the compiled step are made of."""

from __future__ import annotations

import json
import math

import jax
import pytest

from meshsys.assemble import assemble
from meshsys.config import Config
from meshsys.mesh import make_mesh
from meshsys.planner import Plan, describe, make_plan, plan_of
from meshsys.step import Step
from models import count_parameters
from schedules.validate import live


def config(**sections) -> Config:
    model = {"layers": 4, "d_model": 32, "heads": 4, "kv_heads": 2, "d_ff": 48} | sections.pop("model", {})
    data = {"sequence_length": 16, "batch_size": 16} | sections.pop("data", {})
    return Config.model_validate({"run": {"name": "tiny"}, "model": model, "data": data, **sections})


def mesh(topology: str, **axes: int) -> dict:
    return {"topology": topology, "axes": axes}


CUBE = config(
    mesh=mesh("2x2x2", pipe=2, data=2, tensor=2),
    pipeline={"schedule": "interleaved_1f1b", "microbatches": 4, "remat": "dots"},
)


def test_json_reads_back():
    plan = make_plan(CUBE)
    assert Plan.from_json(plan.to_json()) == plan
    found = json.loads(plan.to_json())
    assert list(found) == [
        "run", "parameters", "mesh", "stages", "schedule", "batch", "remat", "choice", "fsdp_gather",
        "residuals", "recomputed", "stash", "memory", "ranks", "predictions", "estimate",
        "compiled",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="Plan"):
        Plan.from_json("{}")


def test_mesh_and_stages():
    assembly = assemble(CUBE)
    plan = plan_of(assembly)
    assert (plan.mesh.devices, plan.mesh.devices_used) == (8, 8)
    assert {axis.name: axis.size for axis in plan.mesh.axes} == assembly.axes
    assert sorted(chip.coords for chip in plan.mesh.chips) == sorted(assembly.placement.topology.coords())
    for chip in plan.mesh.chips:
        pipe, data, tensor = (chip.position[axis] for axis in ("pipe", "data", "tensor"))
        assert tuple(assembly.placement.coords[pipe, data, 0, 0, 0, tensor]) == chip.coords
    assert [stage.rank for stage in plan.stages] == [0, 1, 0, 1]
    assert [stage.chunk for stage in plan.stages] == [0, 0, 1, 1]
    assert [layer for stage in plan.stages for layer in stage.layers] == [0, 1, 2, 3]
    assert [stage.embedding for stage in plan.stages] == [True, False, False, False]
    assert [stage.head for stage in plan.stages] == [False, False, False, True]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("layers", "pipe"), [(4, 4), (5, 4), (2, 4), (3, 1)])
def test_stages_hold_every_parameter_once(tied, layers, pipe):
    made = assemble(
        config(
            model={"layers": layers, "tie_embeddings": tied},
            mesh=mesh(str(pipe), pipe=pipe),
            pipeline={"schedule": "1f1b", "microbatches": 2},
        )
    )
    plan = plan_of(made)
    assert sum(stage.parameters for stage in plan.stages) == plan.parameters == count_parameters(made.config.model)


def test_axes_beside_the_order_of_jax():
    """One axis on each dimension either way, or a split that JAX has no order for."""
    batch = {"batch_size": 64}
    plan = make_plan(config(mesh=mesh("v5e:4x4", data=4, tensor=4), pipeline={"microbatches": 2}, data=batch))
    assert plan.mesh.jax.error is None
    assert {axis.name: axis.dims for axis in plan.mesh.jax.axes if axis.size > 1} == {"data": "y", "tensor": "x"}
    assert {axis.name: axis.dims for axis in plan.mesh.axes}["tensor"] == "x:2*y:2"
    ours, theirs = (sum(getattr(flow, name) for flow in plan.mesh.collectives) for name in ("seconds", "jax_seconds"))
    assert 0 < ours < theirs
    text = describe(plan)
    assert "JAX along" in text and "with the order of JAX's create_device_mesh" in text

    plan = make_plan(config(mesh=mesh("v5e:4x4", data=8, tensor=2), pipeline={"microbatches": 2}, data=batch))
    assert plan.mesh.jax.error == "NotImplementedError" and plan.mesh.jax.axes == ()
    assert all(flow.jax_seconds is None for flow in plan.mesh.collectives)
    assert "JAX's create_device_mesh has no order for these axes (NotImplementedError)" in describe(plan)

    plan = make_plan(CUBE)  # chips of no particular kind
    assert plan.mesh.jax is None and plan.mesh.collectives == ()


def test_a_twisted_torus():
    plan = make_plan(config(mesh=mesh("v4:4x4x8_twisted", data=16, tensor=4)))
    assert plan.mesh.twisted == {0: (0, 0, 4), 1: (0, 0, 4)}
    assert Plan.from_json(plan.to_json()) == plan
    assert "x 4 (twisted), y 4 (twisted), z 8 (ring)" in describe(plan)


def test_a_small_axis_product_takes_a_part_of_the_torus():
    plan = make_plan(config(mesh=mesh("4x4", pipe=2, data=2), pipeline={"microbatches": 2}))
    assert (plan.mesh.devices, plan.mesh.devices_used, len(plan.mesh.chips)) == (16, 4, 4)


def test_more_devices_than_there_are():
    plan = make_plan(
        config(mesh=mesh("v5p:4x4x4", pipe=4, data=4, tensor=4), pipeline={"microbatches": 2}, model={"kv_heads": 0})
    )
    assert plan.mesh.devices_used == 64 > jax.device_count()
    assert "64 devices" in describe(plan)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b"])
@pytest.mark.parametrize("split", [True, False])
def test_schedule(schedule, split):
    assembly = assemble(
        config(
            mesh=mesh("2", pipe=2),
            pipeline={"schedule": schedule, "microbatches": 4, "split_backward": split},
        )
    )
    plan = plan_of(assembly)
    cells = [cell for row in plan.schedule.timeline for cell in row]
    work = sum(1 + (cell[1] == "B") for cell in cells if cell)
    assert sorted(filter(None, cells)) == sorted(map(str, assembly.schedule))
    assert plan.schedule.ticks == assembly.program.table.ticks
    assert plan.schedule.peak_activations == live(assembly.schedule)
    # A tick with a full backward in it lasts as long as two.
    columns = zip(*plan.schedule.timeline, strict=True)
    longest = [2 if any(cell and "B" in cell for cell in column) else 1 for column in columns]
    assert plan.schedule.bubble_fraction == pytest.approx(1 - work / (2 * sum(longest)))
    for rank in plan.ranks:
        mine = [stage.peak_microbatches for stage in plan.stages if stage.rank == rank.rank]
        assert max(mine) <= rank.peak_activations <= sum(mine)


def test_slots_are_what_the_busiest_rank_fills():
    """A full count by hand: 1F1B holds P - rank microbatches, one layer a stage, and stash for none at once but one."""
    plan = make_plan(
        config(mesh=mesh("4", pipe=4), pipeline={"schedule": "1f1b", "microbatches": 8, "split_backward": True})
    )
    kept = {block: sum(v.bytes for v in plan.residuals if v.block == block) for block in ("first", "layer", "last")}
    left = {block: sum(v.bytes for v in plan.stash if v.block == block) for block in ("first", "layer", "last")}
    last_of_i = sum(v.bytes for v in plan.residuals if v.until == "W")
    assert last_of_i < kept["layer"]
    assert [stage.peak_microbatches for stage in plan.stages] == [4, 3, 2, 1]
    assert [rank.residual_bytes for rank in plan.ranks] == [
        4 * kept["layer"], 3 * kept["layer"], 2 * kept["layer"], kept["layer"] + kept["last"]
    ]  # fmt: skip
    assert [rank.stash_bytes for rank in plan.ranks] == [
        left["layer"] + left["first"], left["layer"], left["layer"], left["layer"] + left["last"]
    ]  # fmt: skip
    assert {v.slots for v in plan.residuals if v.block == "layer"} == {4}
    assert {v.slots for v in plan.stash} == {1}
    for value in (*plan.residuals, *plan.recomputed, *plan.stash):
        assert value.total_bytes == value.bytes * value.slots * value.places


@pytest.mark.parametrize(
    ("axes", "gather"),
    [
        ({"pipe": 2}, "step"),
        ({"pipe": 2, "fsdp": 4}, "step"),
        ({"fsdp": 4, "tensor": 2}, "tick"),
        ({"data": 8}, "step"),
    ],
)
def test_memory_between_steps_is_the_state_of_the_step(axes, gather):
    assembly = assemble(
        config(
            mesh=mesh("2x2x2", **axes),
            pipeline={"microbatches": 2, "fsdp_gather": gather},
            model={"param_dtype": "float32", "dtype": "bfloat16"},
        )
    )
    memory = plan_of(assembly).memory
    state, batch, _ = Step(assembly, make_mesh(assembly.placement)).abstract_arguments()

    def on_one(leaf: jax.ShapeDtypeStruct) -> int:
        shard = leaf.sharding.shard_shape(leaf.shape)
        return leaf.dtype.itemsize * math.prod(shard)

    size = {name: sum(map(on_one, jax.tree.leaves(tree))) for name, tree in state._asdict().items()}
    assert memory.parameters == size["params"]
    assert 0 <= size["opt_state"] - memory.optimizer_state <= 16  # the counts of steps
    assert memory.batch == sum(map(on_one, jax.tree.leaves(batch)))


def test_gradients_and_copies_of_the_weights():
    """float32 accumulators of whole matrices, or with `tick` of the fsdp shards."""
    axes = mesh("8", pipe=2, fsdp=4)
    step, tick = (
        make_plan(config(mesh=axes, pipeline={"microbatches": 2, "fsdp_gather": gather}, model={"dtype": "bfloat16"}))
        for gather in ("step", "tick")
    )
    ends = next(stage for stage in step.stages if stage.embedding).parameters
    layer = step.stages[0].parameters - (ends - 2 * _layer(step))
    shared = step.parameters - 4 * _layer(step)
    assert layer == 2 * _layer(step)
    assert step.memory.gradients == 4 * (2 * _layer(step) + shared)
    assert tick.memory.gradients < step.memory.gradients
    assert tick.memory.gathered_weights < step.memory.gathered_weights
    one = make_plan(config(model={"layers": 1}))
    assert one.memory.gathered_weights == 0
    assert one.memory.gradients == one.memory.parameters == 4 * one.parameters


def _layer(plan: Plan) -> int:
    """Parameters of a layer of `config()`: attention, MLP, two norms."""
    d, heads, kv, ff = 32, 4, 2, 48
    return 2 * d * d + 2 * d * (d // heads) * kv + 3 * d * ff + 2 * d


def test_offloaded_values_are_on_the_host():
    plan = make_plan(config(pipeline={"microbatches": 2, "remat": "offload:context,mlpwi_0"}))
    away = {value.name for value in plan.residuals if value.on_host}
    assert away == {"context", "mlpwi_0"}
    assert plan.memory.host == sum(value.total_bytes for value in plan.residuals if value.on_host)
    assert "on the host" in describe(plan)


@pytest.mark.parametrize("remat", ["none", "full", "dots", "names:context"])
def test_description(remat):
    plan = make_plan(CUBE.model_copy(update={"pipeline": CUBE.pipeline.model_copy(update={"remat": remat})}))
    text = describe(plan)
    assert max(map(len, text.splitlines())) <= 110
    assert all(line == line.rstrip() for line in text.splitlines())
    for words in ("tiny", "pipe", "(1,1,1) pipe 1 data 1 tensor 1", "rank 1", "interleaved_1f1b", "workspace", remat):
        assert words in text
    for value in (*plan.residuals, *plan.recomputed, *plan.stash):
        assert value.name in text


def test_a_long_timeline_is_cut():
    text = describe(make_plan(config(mesh=mesh("4", pipe=4), pipeline={"schedule": "1f1b", "microbatches": 64},
                                     data={"batch_size": 64})))  # fmt: skip
    assert "more lines; `meshsys schedule show 1f1b --stages 4 --microbatches 64 --chunks 1` shows all" in text
    assert text.count("rank 0") < 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        config(
            model={"d_model": 64, "d_ff": 176},
            data={"sequence_length": 64, "batch_size": 32},
            mesh=mesh("4", pipe=4),
            pipeline={"schedule": "zb_h1", "microbatches": 8},
        ),
        config(
            model={"layers": 2, "d_model": 64, "d_ff": 176},
            data={"sequence_length": 64, "batch_size": 32},
            mesh=mesh("2", pipe=2),
            pipeline={"schedule": "gpipe", "microbatches": 8, "remat": "full"},
        ),
        config(
            model={"d_model": 64, "d_ff": 176},
            data={"sequence_length": 64, "batch_size": 32},
            mesh=mesh("2x2x2", pipe=2, data=2, tensor=2),
            pipeline={"schedule": "interleaved_1f1b", "microbatches": 4, "remat": "dots"},
        ),
        config(
            model={"d_model": 64, "d_ff": 176},
            data={"sequence_length": 64, "batch_size": 16},
            mesh=mesh("4x2", pipe=2, fsdp=4),
            pipeline={"schedule": "1f1b", "microbatches": 4, "remat": "full"},
        ),
        config(
            model={"d_model": 64, "d_ff": 176},
            data={"sequence_length": 64, "batch_size": 32},
            mesh=mesh("2", pipe=2),
            pipeline={"schedule": "chimera", "microbatches": 8},
        ),
        config(
            model={"d_model": 64, "d_ff": 176},
            data={"sequence_length": 64, "batch_size": 32},
            mesh=mesh("2", pipe=2),
            pipeline={"schedule": "pipedream_2bw", "microbatches": 8},
        ),
        config(
            model={"d_model": 64, "d_ff": 176},
            data={"sequence_length": 64, "batch_size": 32},
            mesh=mesh("4", pipe=4),
            pipeline={"schedule": "1f1b", "microbatches": 8, "remat": "auto", "activation_memory": "1400KiB"},
        ),
        config(
            model={"layers": 8, "d_model": 64, "d_ff": 176},
            data={"sequence_length": 64, "batch_size": 32},
            mesh=mesh("4", pipe=4),
            pipeline={"schedule": "zb_h1", "microbatches": 8, "remat": "auto", "activation_memory": "13MiB"},
        ),
    ],
    ids=[
        "zb_h1",
        "gpipe-full",
        "interleaved-tensor-dots",
        "fsdp-full",
        "borrowed-weights",
        "two-versions",
        "auto-mixed",
        "auto-apart",
    ],  # fmt: skip
)
def test_temporaries_are_near_the_compilers(asked, capsys):
    assembly = assemble(asked)
    predicted = plan_of(assembly).memory.temporaries
    compiled = Step(assembly, make_mesh(assembly.placement)).lower().compile()
    found = compiled.memory_analysis().temp_size_in_bytes
    with capsys.disabled():
        print(f"\n{asked.pipeline.schedule} {asked.pipeline.remat}: predicted {predicted}, found {found}, "
              f"ratio {predicted / found:.2f}")  # fmt: skip
    assert 0.75 <= predicted / found <= 1.25

"""Trees in another layout, beside the whole arrays in numpy: values, blocks, bytes that cross, and memory."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshsys.errors import ConfigError
from meshsys.reshard import Resharder, plan_reshard
from schedules.stages import StageLayout, split_layers
from tests.oracles.hlo_bytes import crossing_bytes

DEVICES = 8
SHAPES = [(2, 2, 2), (4, 2, 1), (1, 8, 1), (2, 1, 4), (1, 1, 8)]
FSDP, TENSOR = P("fsdp"), P(None, "tensor")


def mesh(order: list[int] | None = None, **axes: int) -> Mesh:
    devices = np.array(jax.devices())[order or slice(None)]
    return Mesh(devices.reshape(*axes.values()), tuple(axes))


def bits(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(f"uint{8 * array.dtype.itemsize}")


def check(found: jax.Array, whole, sharding: NamedSharding) -> None:
    """Every device holds its block of the whole, to the bit."""
    whole = np.asarray(whole)
    assert found.shape == whole.shape and found.dtype == whole.dtype
    assert found.sharding.is_equivalent_to(sharding, found.ndim)
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(bits(shard.data), bits(whole[shard.index]))


def any_spec(choose: random.Random, dims: int, axes: tuple[str, ...]) -> P:
    """Each axis, in any order, along one of the dimensions or none."""
    parts: list[list[str]] = [[] for _ in range(dims)]
    for axis in choose.sample(axes, len(axes)):
        at = choose.randrange(dims + 1)
        if at < dims:
            parts[at].append(axis)
    return P(*(tuple(part) or None for part in parts))


def any_case(seed: int) -> tuple[list[np.ndarray], list[NamedSharding], list[NamedSharding]]:
    """Four arrays of up to three dimensions, before and after; every third case shuffles the devices."""
    choose = random.Random(seed)
    order = choose.sample(range(DEVICES), DEVICES) if seed % 3 == 0 else None
    before = mesh(**dict(zip(("pipe", "fsdp", "tensor"), choose.choice(SHAPES), strict=True)))
    after = mesh(order, **dict(zip(("data", "tensor", "expert"), choose.choice(SHAPES), strict=True)))
    arrays, sources, destinations = [], [], []
    for _ in range(4):
        shape = tuple(choose.choice([16, 32, 48]) for _ in range(choose.randrange(4)))
        arrays.append(np.random.default_rng(seed).normal(size=shape).astype(np.float32))
        sources.append(NamedSharding(before, any_spec(choose, len(shape), before.axis_names)))
        destinations.append(NamedSharding(after, any_spec(choose, len(shape), after.axis_names)))
    return arrays, sources, destinations


@pytest.mark.parametrize("seed", range(12))
def test_any_layout_becomes_any_other_and_back(seed):
    arrays, sources, destinations = any_case(seed)
    tree = jax.device_put(arrays, sources)
    dtype = [None, jnp.bfloat16][seed % 2]
    plan = plan_reshard(tree, destinations, dtype=dtype, bucket_bytes=[64 << 20, 20_000][seed // 2 % 2])
    resharder = Resharder(plan)
    moved = resharder(tree)
    for found, array, sharding in zip(moved, arrays, destinations, strict=True):
        check(found, jnp.asarray(array).astype(dtype or array.dtype), sharding)
    assert plan.moved_bytes == plan.lower_bound_bytes == missing_bytes(tree, moved)
    back = Resharder(plan_reshard(moved, sources, dtype=jnp.float32), "in_place")(moved)
    for found, array in zip(back, arrays, strict=True):
        want = array if dtype is None else jnp.asarray(array).astype(dtype).astype(jnp.float32)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(want))


def missing_bytes(tree: list[jax.Array], moved: list[jax.Array]) -> int:
    """What the devices need and do not hold, element by element."""
    total = 0
    for before, after in zip(tree, moved, strict=True):
        wanted = {shard.device: shard.index for shard in after.addressable_shards}
        for old in before.addressable_shards:
            needed = np.zeros(before.shape, bool)
            needed[wanted[old.device]] = True
            needed[old.index] = False
            total += int(needed.sum()) * after.dtype.itemsize
    return total


@pytest.mark.parametrize("seed", range(0, 12, 2))
def test_bytes_and_memory_are_those_of_the_compiled_program(seed):
    arrays, sources, destinations = any_case(seed)
    plan = plan_reshard(jax.device_put(arrays, sources), destinations)
    (program,) = Resharder(plan).compiled()
    assert crossing_bytes(program.as_text(), DEVICES) == plan.moved_bytes
    memory = program.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    kept = sum(move.source_bytes for move in plan.moves if move.kept)
    assert held <= plan.peak_bytes - kept + 2048  # a table and an address for each array


PAIRS = {
    "fsdp to tensor": ({"fsdp": 8}, FSDP, {"data": 2, "tensor": 4}, TENSOR, "all_to_all"),
    "tensor to fsdp": ({"tensor": 4, "data": 2}, TENSOR, {"fsdp": 8}, FSDP, "all_to_all"),
    "fsdp to everyone": ({"fsdp": 8}, FSDP, {"data": 8}, P(), "all_gather"),
    "everyone to fsdp": ({"data": 8}, P(), {"fsdp": 8}, FSDP, "slice"),
    "coarser": ({"fsdp": 8}, FSDP, {"fsdp": 4, "data": 2}, FSDP, "all_gather"),
    "finer": ({"fsdp": 4, "data": 2}, FSDP, {"fsdp": 8}, FSDP, "slice"),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_the_collective_is_the_one_that_is_needed(pair):
    before, spec, after, wanted, kind = PAIRS[pair]
    array = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    destination = NamedSharding(mesh(**after), wanted)
    tree = jax.device_put(array, NamedSharding(mesh(**before), spec))
    plan = plan_reshard(tree, destination)
    assert plan.moves[0].route.kind == kind
    check(Resharder(plan)(tree), array, destination)


def test_moved_shards_take_one_permutation():
    array = np.arange(64, dtype=np.int32).reshape(8, 8)
    tree = jax.device_put(array, NamedSharding(mesh(fsdp=8), FSDP))
    destination = NamedSharding(mesh([3, 0, 1, 2, 5, 6, 7, 4], fsdp=8), FSDP)
    plan = plan_reshard(tree, destination)
    assert plan.moves[0].route.kind == "ppermute"
    check(Resharder(plan)(tree), array, destination)


def test_no_device_holds_a_whole_array():
    """From FSDP to tensor parallelism, a jit with output shardings puts the whole array on every device."""
    array = jax.ShapeDtypeStruct((1024, 512), jnp.float32, sharding=NamedSharding(mesh(fsdp=8), FSDP))
    whole = 1024 * 512 * 4
    (program,) = Resharder(plan_reshard(array, NamedSharding(mesh(data=2, tensor=4), TENSOR))).compiled()
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes <= whole // 2 + 1024
    assert memory.output_size_in_bytes < whole // 4 + 1024


@pytest.mark.parametrize("bucket", [1 << 20, 3 << 20, 64 << 20])
def test_a_program_holds_no_more_than_its_bucket(bucket):
    source, destination = NamedSharding(mesh(fsdp=8), FSDP), NamedSharding(mesh(data=2, tensor=4), TENSOR)
    tree = [jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=source) for _ in range(16)]
    plan = plan_reshard(tree, [destination] * 16, bucket_bytes=bucket)
    for program in Resharder(plan).compiled():
        memory = program.memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        assert held <= bucket + 4096
    assert 0 < plan.extra_bytes <= bucket
    assert (len(plan.buckets) > 1) == (bucket < 64 << 20)


def test_a_large_array_moves_in_pieces():
    array = np.random.default_rng(0).normal(size=(256, 512)).astype(np.float32)
    destination = NamedSharding(mesh(data=2, tensor=4), TENSOR)
    tree = jax.device_put(array, NamedSharding(mesh(fsdp=8), FSDP))
    plan = plan_reshard(tree, destination, bucket_bytes=64 << 10)
    assert plan.moves[0].pieces > 1
    check(Resharder(plan)(tree), array, destination)


def test_in_place_frees_and_a_copy_keeps():
    source, destination = NamedSharding(mesh(fsdp=8), FSDP), NamedSharding(mesh(data=2, tensor=4), TENSOR)
    arrays = [np.full((64, 32), k, np.float32) for k in range(6)]
    tree = jax.device_put(arrays, source)
    shardings = [destination] * 6
    moved = Resharder(plan_reshard(tree, shardings, bucket_bytes=8192))(tree)
    assert not any(leaf.is_deleted() for leaf in tree)
    again = Resharder(plan_reshard(tree, shardings, bucket_bytes=8192), "in_place")(tree)
    assert all(leaf.is_deleted() for leaf in tree)
    for one, other, array in zip(moved, again, arrays, strict=True):
        check(one, array, destination)
        check(other, array, destination)


def test_an_array_may_be_in_a_tree_twice():
    array = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    one = jax.device_put(array, NamedSharding(mesh(fsdp=8), FSDP))
    destination = NamedSharding(mesh(data=2, tensor=4), TENSOR)
    plan = plan_reshard([one, one], [destination] * 2, bucket_bytes=1024)
    assert len(plan.buckets) == 2
    for found in Resharder(plan, "in_place")([one, one]):
        check(found, array, destination)
    assert one.is_deleted()


def test_arrays_that_stay_are_handed_on():
    """The same blocks under other axis names; with another dtype there is something to do."""
    tree = jax.device_put(np.ones((16, 4), np.float32), NamedSharding(mesh(fsdp=8), FSDP))
    destination = NamedSharding(mesh(pipe=2, tensor=4), P(("pipe", "tensor")))
    plan = plan_reshard(tree, destination)
    assert plan.buckets == () and plan.moved_bytes == plan.extra_bytes == 0
    found = Resharder(plan, "in_place")(tree)
    assert not tree.is_deleted()
    pointers = [[s.data.unsafe_buffer_pointer() for s in one.addressable_shards] for one in (tree, found)]
    assert pointers[0] == pointers[1]
    check(found, np.ones((16, 4), np.float32), destination)
    cast = Resharder(plan_reshard(tree, destination, dtype=jnp.bfloat16))(tree)
    check(cast, jnp.ones((16, 4), jnp.bfloat16), destination)


def test_arrays_travel_in_the_narrower_dtype():
    wide, narrow = np.float32, jnp.bfloat16
    source, destination = NamedSharding(mesh(fsdp=8), FSDP), NamedSharding(mesh(data=8), P())
    array = np.random.default_rng(0).normal(size=(32, 16)).astype(wide)
    tree = {
        "kernel": jax.device_put(array, source),
        "step": jax.device_put(np.int32(7), NamedSharding(mesh(fsdp=8), P())),
    }
    down = plan_reshard(tree, {"kernel": destination, "step": destination}, dtype=narrow)
    assert down.moved_bytes == 7 * 32 * 16 * 2
    found = Resharder(down)(tree)
    assert found["step"].dtype == jnp.int32 and int(found["step"]) == 7
    check(found["kernel"], jnp.asarray(array).astype(narrow), destination)
    up = plan_reshard({"kernel": jax.device_put(array.astype(narrow), source)}, {"kernel": destination}, dtype=wide)
    assert up.moved_bytes == down.moved_bytes


def test_no_bit_changes_on_the_way():
    """NaNs with a payload, negative zero, infinities, and what bfloat16 keeps of them."""
    odd = np.array([0x7FC12345, 0x80000000, 0xFF800000, 0x00000001] * 64, np.uint32).view(np.float32).reshape(16, 16)
    destination = NamedSharding(mesh(data=2, tensor=4), TENSOR)
    for array in (odd, odd.astype(jnp.bfloat16), odd > 0, odd.astype(np.float16)):
        tree = jax.device_put(array, NamedSharding(mesh(fsdp=8), FSDP))
        check(Resharder(plan_reshard(tree, destination))(tree), array, destination)


# Only what changed


def test_only_changed_pieces_are_sent():
    source, destination = NamedSharding(mesh(fsdp=8), FSDP), NamedSharding(mesh(data=2, tensor=4), TENSOR)
    arrays = {name: np.random.default_rng(k).normal(size=(256, 64)).astype(np.float32) for k, name in enumerate("ab")}
    plan = plan_reshard(jax.device_put(arrays, source), {name: destination for name in arrays}, dtype=jnp.bfloat16)
    delta, copy = Resharder(plan, "delta", delta_bytes=2048), Resharder(plan)
    shares = []
    for change in (None, None, (3, 0.5), (3, 1e-9), (100, np.nan), (100, np.nan)):
        if change is not None:
            row, value = change
            arrays["a"][row, 5] = value if np.isnan(value) else arrays["a"][row, 5] + value
        tree = jax.device_put(arrays, source)
        found, wanted = delta(tree), copy(tree)
        for name in arrays:
            np.testing.assert_array_equal(bits(found[name]), bits(wanted[name]))
        assert delta.last is not None
        shares.append(delta.last.changed)
    # Four pieces of each: all at first; one that changed; none where bfloat16 does not show it; a NaN is sent once.
    assert shares == [1.0, 0.0, 0.125, 0.0, 0.125, 0.0]


@pytest.mark.parametrize("seed", range(4))
def test_updates_equal_copies(seed):
    arrays, sources, destinations = any_case(seed)
    plan = plan_reshard(jax.device_put(arrays, sources), destinations)
    delta = Resharder(plan, "delta", delta_bytes=256)
    for change in range(3):
        tree = jax.device_put(arrays, sources)
        for found, array, sharding in zip(delta(tree), arrays, destinations, strict=True):
            check(found, array, sharding)
        arrays = [array + np.float32(k == change) for k, array in enumerate(arrays)]


# Layers that are stacked by stage


def case_of_stages(layers: int, ranks: int, chunks: int):
    """Parameters by layer and by stage; one part is in every second layer only."""
    depth = ranks * chunks
    held = tuple(range(0, layers, 2))
    placement = tuple(stage % ranks for stage in range(depth))
    layout = StageLayout(split_layers(layers, depth), placement, ranks, holders=(("moe", held),))
    values = np.random.default_rng(0)
    by_layer = {
        "embed": values.normal(size=(32, 8)).astype(np.float32),
        "layers": {
            "attention": {"q": values.normal(size=(layers, 8, 16)).astype(np.float32)},
            "moe": {"up": values.normal(size=(len(held), 8, 4)).astype(np.float32)},
        },
    }
    staged = {
        name: layout.part(name).to_stages(part) for name, part in jax.tree.map(jnp.asarray, by_layer)["layers"].items()
    }
    return layout, by_layer, by_layer | {"layers": staged}


@pytest.mark.parametrize(
    ("layers", "ranks", "chunks"), [(8, 4, 1), (8, 2, 2), (7, 4, 1), (2, 4, 1), (10, 2, 4), (12, 2, 1)]
)
def test_stages_become_layers_and_back(layers, ranks, chunks):
    layout, by_layer, staged = case_of_stages(layers, ranks, chunks)
    train, sample = mesh(pipe=ranks, fsdp=8 // ranks), mesh([5, 4, 7, 6, 1, 0, 3, 2], data=2, tensor=4)
    stack = NamedSharding(train, P("pipe", None, None, "fsdp"))
    flat = NamedSharding(sample, P(None, None, "tensor"))
    before = {
        "embed": NamedSharding(train, P("pipe", "fsdp")),
        "layers": {"attention": {"q": stack}, "moe": {"up": stack}},
    }
    after = {
        "embed": NamedSharding(sample, P("tensor")),
        "layers": {"attention": {"q": flat}, "moe": {"up": flat}},
    }
    tree = jax.device_put(staged, before)
    plan = plan_reshard(tree, after, source_stages=layout)
    moved = Resharder(plan)(tree)
    jax.tree.map(check, moved, by_layer, after)
    assert plan.moved_bytes == plan.lower_bound_bytes
    back = Resharder(plan_reshard(moved, before, destination_stages=layout), "in_place")(moved)
    jax.tree.map(check, back, staged, before)


def test_a_pipeline_becomes_another_one():
    one, by_layer, staged = case_of_stages(8, 4, 1)
    two, _, wanted = case_of_stages(8, 2, 2)
    put = NamedSharding(mesh(pipe=4, fsdp=2), P("pipe"))
    to = NamedSharding(mesh(pipe=2, tensor=4), P("pipe"))
    tree = jax.device_put(staged["layers"], put)
    plan = plan_reshard(
        {"layers": tree}, {"layers": jax.tree.map(lambda _: to, tree)}, source_stages=one, destination_stages=two
    )
    found = Resharder(plan)({"layers": tree})["layers"]
    jax.tree.map(lambda leaf, whole: check(leaf, whole, to), found, wanted["layers"])


# Mistakes


def test_mistakes_are_named():
    tree = {"layers": {"up": jax.ShapeDtypeStruct((6, 8), jnp.float32, sharding=NamedSharding(mesh(fsdp=8), P()))}}
    with pytest.raises(ConfigError, match="layers.up has shape 6x8, which .* does not divide evenly"):
        plan_reshard(tree, {"layers": {"up": NamedSharding(mesh(tensor=8), P("tensor"))}})
    few = Mesh(np.array(jax.devices()[:4]), ("tensor",))
    with pytest.raises(ConfigError, match="layers.up goes between other devices"):
        plan_reshard(tree, {"layers": {"up": NamedSharding(few, P())}})
    with pytest.raises(ConfigError, match="the tree destination has another structure"):
        plan_reshard(tree, {"layers": NamedSharding(mesh(tensor=8), P())})
    plan = plan_reshard(tree, {"layers": {"up": NamedSharding(mesh(tensor=8), P(None, "tensor"))}})
    with pytest.raises(ConfigError, match="mode=move is not a way to reshard"):
        Resharder(plan, "move")  # type: ignore[arg-type]
    other = jax.device_put(np.ones((6, 8), np.float32), NamedSharding(mesh(fsdp=8), P(None, "fsdp")))
    with pytest.raises(ConfigError, match="layers.up is float32.6, 8. with"):
        Resharder(plan)({"layers": {"up": other}})


def test_a_plan_describes_itself():
    tree = [jax.ShapeDtypeStruct((1024, 2048), jnp.float32, sharding=NamedSharding(mesh(fsdp=8), FSDP))]
    text = plan_reshard(tree, [NamedSharding(mesh(data=2, tensor=4), TENSOR)]).describe()
    assert "1 arrays over 8 devices in 1 buckets: 1 all_to_all" in text
    assert "moved 14.0 MiB, lower bound 14.0 MiB (1.00x)" in text

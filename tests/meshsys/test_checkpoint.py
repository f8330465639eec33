"""Checkpoints: the same state on every layout, damage that is found whatever file it is in, and how many stay."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshsys.assemble import assemble
from meshsys.checkpoint import Checkpoints, restore_params
from meshsys.config import Config
from meshsys.errors import ConfigError
from meshsys.mesh import make_mesh
from meshsys.state import State
from meshsys.step import Step

# Where orbax fails to read an array, it leaves the reading of others unfinished.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

META = {"step": 2, "model": {"layers": 4, "dropout": 0.1}, "data": {"position": {"document": 7, "token": 123456}}}


def small_state(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {
        "weights": jnp.asarray(rng.normal(size=(32, 64)), jnp.float32),
        "halves": jnp.asarray(rng.normal(size=(7,)), jnp.bfloat16),
        "count": jnp.int32(seed),
    }


def small_host(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"tokens": rng.integers(0, 99, 50, np.int32), "seeds": rng.integers(0, 2**32, 3, np.uint32)}


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def restore(folder: Path, check: Callable[[dict], None] = lambda meta: None):
    """What is restored, as the step number or None, and the lines that were said."""
    checkpoints, said = Checkpoints(folder, keep=3), list[str]()
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
        jax.eval_shape(lambda: small_state(0)),
    )
    try:
        restored = checkpoints.restore(lambda _: shapes, check, said.append)
    finally:
        checkpoints.close()
    if restored is None:
        return None, said
    state, meta, host = restored
    number = int(state["count"])
    assert bits(state) == bits(small_state(number))
    assert bits(host) == bits(small_host(number)) and host.keys() == small_host(number).keys()
    assert {name: meta[name] for name in META} == META | {"step": number}
    return number, said


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """A folder with checkpoints 1 and 2; copy it before use."""
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    checkpoints = Checkpoints(folder, keep=3)
    for number in (1, 2):
        checkpoints.save(number, small_state(number), META | {"step": number}, small_host(number))
    checkpoints.close()
    return folder


@pytest.fixture
def folder(two, tmp_path) -> Path:
    return Path(shutil.copytree(two, tmp_path / "checkpoints"))


# --- Damage ---------------------------------------------------------------------------------------------------------


def delete(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 0x04
    path.write_bytes(content)


def overwrite(path: Path) -> None:
    path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [delete, truncate, empty, flip_one_bit, overwrite])
def test_damage_to_any_file(two, tmp_path, damage):
    """The newest checkpoint is restored exactly, where it does not need the file, or else the one before."""
    outcomes = {}
    for number, path in enumerate(sorted(path for path in (two / "2").rglob("*") if path.is_file())):
        folder = Path(shutil.copytree(two, tmp_path / str(number) / "checkpoints"))
        name = path.relative_to(two)
        damage(folder / name)
        restored, said = restore(folder)
        outcomes[str(name)] = restored
        aside = folder.with_name("checkpoints-damaged") / "2"
        if restored == 1:
            assert len(said) == 1 and said[0].startswith("checkpoint 2 is damaged, taking the one before: ")
            assert "\n" not in said[0] and len(said[0]) < 250
            assert aside.is_dir() and not (folder / "2").exists()
        else:
            assert restored == 2 and not said and not aside.exists()
    # The largest file holds the arrays.
    arrays = max((path for path in (two / "2").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    assert outcomes[str(arrays.relative_to(two))] == 1


def test_an_empty_folder(folder):
    shutil.rmtree(folder / "2")
    (folder / "2").mkdir()
    restored, said = restore(folder)
    assert restored == 1 and len(said) == 1 and (folder.with_name("checkpoints-damaged") / "2").is_dir()


def test_values_that_changed(folder):
    """An array that reads well but is not what was written."""
    checkpoints = Checkpoints(folder, keep=3)
    other = small_state(3) | {"weights": small_state(2)["weights"].at[5, 5].add(1e-6)}
    checkpoints.save(3, other, META)
    checkpoints.close()
    shutil.rmtree(folder / "2" / "state")
    shutil.copytree(folder / "3" / "state", folder / "2" / "state")
    shutil.rmtree(folder / "3")
    restored, said = restore(folder)
    assert restored == 1 and "checksum" in said[0]


def test_meta_that_changed(folder):
    path = folder / "2" / "meta" / "metadata"
    text = path.read_text()
    path.write_text(text.replace("123456", "123457"))
    assert text != path.read_text()
    restored, said = restore(folder)
    assert restored == 1 and "checksum" in said[0]


def test_all_damaged(folder):
    for number in ("1", "2"):
        for path in (folder / number / "state").rglob("*"):
            if path.is_file():
                path.unlink()
    with pytest.raises(ConfigError, match="no checkpoint in it can be read; restore checkpoints/ from a copy"):
        restore(folder)
    assert (folder / "1").is_dir() and (folder / "2").is_dir()


def test_of_another_model(folder):
    """The caller's refusal is not taken for damage."""

    def refuse(meta: dict) -> None:
        raise ConfigError(f"model.layers=5, but the checkpoint has {meta['model']['layers']}")

    with pytest.raises(ConfigError, match="model.layers=5, but the checkpoint has 4"):
        restore(folder, refuse)
    assert restore(folder) == (2, [])


def test_none(tmp_path):
    assert restore(tmp_path / "checkpoints") == (None, [])


def test_remains_of_a_killed_write(folder):
    """What orbax had not finished has another name, and is cleaned up."""
    shutil.copytree(folder / "2", folder / "3.orbax-checkpoint-tmp-0")
    assert restore(folder) == (2, [])
    deadline = time.monotonic() + 60  # orbax cleans up on a thread of its own
    while (folder / "3.orbax-checkpoint-tmp-0").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def test_damaged_twice(folder):
    """A number that was set aside before makes room for the next one."""
    for _ in range(2):
        checkpoints = Checkpoints(folder, keep=3)
        checkpoints.save(2, small_state(2), META, small_host(2))
        checkpoints.close()
        empty(folder / "2" / "meta" / "metadata")
        assert restore(folder)[0] == 1
    assert [path.name for path in folder.with_name("checkpoints-damaged").iterdir()] == ["2"]


# --- Keeping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2])
def test_keep(tmp_path, keep):
    for numbers in ((1, 2, 3), (3, 4)):  # the second writer finds 3 there and does not write it again
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep=keep)
        for number in numbers:
            checkpoints.save(number, small_state(number), META | {"step": number}, small_host(number))
        checkpoints.close()
        kept = range(numbers[-1] - keep + 1, numbers[-1] + 1)
        assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == list(kept)
    assert restore(tmp_path / "checkpoints") == (4, [])


def test_arrays_may_be_consumed_after_saving(tmp_path):
    """The step that follows writes over its buffers while the checkpoint is on its way to the disk."""
    overwrite = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0 - 1, state), donate_argnums=0)
    checkpoints, state = Checkpoints(tmp_path / "checkpoints", keep=3), small_state(2)
    checkpoints.save(2, state, META, small_host(2))
    jax.block_until_ready(overwrite(state))
    checkpoints.close()
    assert restore(tmp_path / "checkpoints") == (2, [])


# --- Layouts --------------------------------------------------------------------------------------------------------

LAYOUTS = """
schedule           chunks  pipe data fsdp tensor
zb_h1              1       4    1    1    1
gpipe              1       1    1    1    1
1f1b               1       2    2    1    1
1f1b               1       8    1    1    1
interleaved_1f1b   2       2    1    1    2
interleaved_1f1b   4       2    1    2    1
1f1b               1       2    1    2    2
1f1b               1       1    1    8    1
"""


@functools.cache
def make_step(row: str, layers: int = 8) -> Step:
    schedule, chunks, *sizes = row.split()
    axes = dict(zip(("pipe", "data", "fsdp", "tensor"), map(int, sizes), strict=True))
    config = Config.model_validate(
        {
            "run": {"name": "layouts"},
            "model": {"layers": layers, "d_model": 16, "heads": 4, "kv_heads": 2, "d_ff": 32},
            "data": {"sequence_length": 8, "batch_size": 16},
            "mesh": {"topology": "8", "axes": axes},
            "pipeline": {"schedule": schedule, "chunks": int(chunks), "microbatches": 2},
        }
    )
    assembly = assemble(config)
    return Step(assembly, make_mesh(assembly.placement))


def random_canonical(step: Step) -> State:
    """No two numbers are equal, so that every exchange of layers or of moments shows."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * (1 if leaf.shape else 100), leaf.dtype),
        step.canonical(previous=False),
    )


def layouts() -> list[str]:
    return [" ".join(row.split()) for row in LAYOUTS.strip().splitlines()[1:]]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, State]:
    """A checkpoint of the first layout, and the state that is in it."""
    step = make_step(layouts()[0])
    canonical = random_canonical(step)
    folder = tmp_path_factory.mktemp("written") / "checkpoints"
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(5, step.to_canonical(step.from_canonical(canonical)), META)
    checkpoints.close()
    return folder, canonical


@pytest.mark.parametrize("row", layouts())
def test_restored_on_another_layout(written, row):
    folder, canonical = written
    step, said = make_step(row), list[str]()
    checkpoints = Checkpoints(folder, keep=1)
    restored = checkpoints.restore(lambda _: step.canonical(previous=False), lambda meta: None, said.append)
    checkpoints.close()
    assert restored is not None and not said
    assert bits(restored[0]) == bits(canonical)
    staged = step.from_canonical(restored[0])
    assert jax.tree.map(lambda leaf: leaf.sharding, staged) == step.shardings
    assert bits(step.to_canonical(staged)) == bits(canonical)


@pytest.mark.parametrize("layers", [1, 3, 5])
def test_layers_that_stages_do_not_divide(layers):
    step = make_step("interleaved_1f1b 2 4 1 1 1", layers)
    canonical = random_canonical(step)
    assert bits(step.to_canonical(step.from_canonical(canonical))) == bits(canonical)


# --- Parameters alone -----------------------------------------------------------------------------------------------


def test_restore_params(written):
    folder, canonical = written
    params = restore_params(folder, make_step(layouts()[0]).canonical(previous=False).params)
    assert bits(params) == bits(canonical.params)
    assert {leaf.sharding.device_set == {jax.devices()[0]} for leaf in jax.tree.leaves(params)} == {True}


def test_restore_params_where_there_are_none(tmp_path):
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        restore_params(tmp_path / "checkpoints", {})
    assert not any(tmp_path.iterdir())


def test_restore_params_of_a_damaged_checkpoint(written, tmp_path):
    folder = Path(shutil.copytree(written[0], tmp_path / "checkpoints"))
    shutil.rmtree(folder / "5" / "state")
    with pytest.raises(ConfigError, match="checkpoint 5 .* cannot be read"):
        restore_params(folder, make_step(layouts()[0]).canonical(previous=False).params)

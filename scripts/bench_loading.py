"""What loading a checkpoint takes: memory of the process, and time beside safetensors reading it into numpy.

    python scripts/bench_loading.py fsdp|tensor|replicated|all [--json]

Needs `pip install safetensors`. A float32 checkpoint of 538 MB with the shape of SmolLM2-135M is loaded onto four fake
CPU devices, whose memory is all in one process, with parameters divided over an axis of the mesh, or whole on one
device. Each load has a process of its own, after the file has been read once, so that it is in the system's cache;
what is compared runs in turn, and the best of each counts. `time of all cores` suffers less from what else runs.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

# JAX reads these once, when its backend starts; the processes that load inherit them.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
# As a script, Python looks beside this file; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench_table import Row, run  # noqa: E402

DEVICES, ROUNDS = 4, 5
MOST_MEMORY, MOST_TIME = 1.3, 1.5  # of the file's size; of the time that safetensors takes


class Load(NamedTuple):
    """What one load took: seconds on the clock and of all cores, and bytes that the process had more at its largest."""

    wall: float
    cores: float
    peak: int


def compare(axis: str | None) -> Iterator[Row]:
    """Ours beside safetensors, the parameters divided over an axis."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        _alone(_write, path)
        size = (path / "model.safetensors").stat().st_size
        loads: dict[str, list[Load]] = {"ours": [], "numpy": []}
        for _ in range(ROUNDS):
            loads["numpy"].append(_alone(_numpy, path))
            loads["ours"].append(_alone(partial(_ours, axis), path))
    best = {name: Load(*map(min, zip(*found, strict=True))) for name, found in loads.items()}
    yield Row("the checkpoint", size / 1e6, "MB")
    yield Row("peak of the process, less what it had before, over its size", best["ours"].peak / size, "x", MOST_MEMORY)
    for what, unit in (("wall", "time"), ("cores", "time of all cores")):
        ours, numpy = getattr(best["ours"], what), getattr(best["numpy"], what)
        yield Row(f"safetensors.numpy.load_file: {unit}", numpy, "s")
        yield Row(f"load_pretrained: {unit}", ours, "s")
        yield Row("  over safetensors'", ours / numpy, "x", MOST_TIME if what == "wall" else None)


def _alone(function: Callable, path: Path) -> Load:
    """Calls it in a process of its own."""
    if path.exists():
        with (path / "model.safetensors").open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, path).result()


def _write(path: Path) -> None:
    """A model of 134.5 million parameters."""
    import jax
    import numpy as np

    from models import Decoder, ModelConfig, save_pretrained

    config = ModelConfig(layers=30, d_model=576, heads=9, kv_heads=3, d_ff=1536, vocab_size=49152, tie_embeddings=True)
    shapes = jax.eval_shape(Decoder(config).init, jax.eval_shape(jax.random.key, 0))
    save_pretrained(config, jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes), path)


def _numpy(path: Path) -> Load:
    from safetensors.numpy import load_file

    return _measured(lambda: load_file(path / "model.safetensors"))


def _ours(axis: str | None, path: Path) -> Load:
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from meshsys.sharding import canonical_specs, named
    from models import Decoder, load_pretrained
    from models.pretrained import open_pretrained
    from models.pretrained.tree import shapes_of

    names = ("pipe", "data", "fsdp", "tensor", "expert", "context")
    sizes = {name: DEVICES if name == axis else 1 for name in names}
    shardings = None
    if axis is not None:
        config = open_pretrained(path).config
        mesh = Mesh(np.array(jax.devices()).reshape(list(sizes.values())), names)
        shardings = named(mesh, canonical_specs(Decoder(config).logical_axes(), shapes_of(config), sizes))
    jax.block_until_ready(jax.device_put(np.ones(8)))  # JAX has started
    return _measured(lambda: jax.block_until_ready(load_pretrained(path, shardings=shardings)))


def _measured(load: Callable) -> Load:
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    wall, cores = time.perf_counter(), _cores()
    kept = load()
    found = Load(time.perf_counter() - wall, _cores() - cores, _status("VmHWM") - before)
    del kept
    return found


def _cores() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _status(name: str) -> int:
    """Bytes, from the kernel's account of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


BENCHMARKS = {
    "fsdp": (partial(compare, "fsdp"), "d_model divided over four devices"),
    "tensor": (partial(compare, "tensor"), "d_ff and the vocabulary divided over four devices"),
    "replicated": (partial(compare, None), "whole, on the first device"),
}


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", BENCHMARKS))

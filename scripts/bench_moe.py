"""What a mixture of experts costs beside a dense network of the same active FLOPs, on fake CPU devices.

Times are of one feed-forward network and its gradients, parameters' sums over devices included; the two sides run in
turn and the best of each counts. Run `scripts/setup.sh` first.

    .venv/bin/python scripts/bench_moe.py layer
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()

import time  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from typing import Any  # noqa: E402

import flax.linen as nn  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from bench_table import Row, run  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from models import ModelConfig  # noqa: E402
from models.config import MoeConfig  # noqa: E402
from models.layers import Mlp  # noqa: E402
from models.moe import Moe  # noqa: E402
from models.parallel import ManualAxes  # noqa: E402

DEVICES, EXPERTS, CHOSEN = 4, 8, 2
D, F, S = 256, 512, 512  # d_model, width of an expert, tokens of a device
REPEATS = 15
CONFIG = ModelConfig(
    d_model=D,
    d_ff=CHOSEN * F,
    moe=MoeConfig(experts=EXPERTS, experts_per_token=CHOSEN, d_ff=F, aux_loss=0.01, z_loss=0.001),
)
OWN = ("gate", "up", "down")  # leaves that are divided over devices, where there are experts

PyTree = Any


def layer() -> Iterator[Row]:
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("expert",))
    whole = ManualAxes()
    runs = {
        "a dense network of the same active FLOPs": _on_devices(mesh, Mlp(CONFIG), Mlp(CONFIG), ()),
        "experts on every device": _on_devices(mesh, Moe(CONFIG, whole), Moe(CONFIG, whole), ()),
        "experts divided over 4 devices": _on_devices(mesh, Moe(CONFIG, whole), Moe(CONFIG, ManualAxes("expert")), OWN),
    }
    wall, cpu = _best(runs)
    dense, *others = runs
    yield Row(dense, 1e3 * wall[dense], "ms")
    for name in others:
        yield Row(name, 1e3 * wall[name], "ms")
        yield Row(f"{name}: over dense", wall[name] / wall[dense], "x", at_most=1.6)
        yield Row(f"{name}: over dense, time of all cores", cpu[name] / cpu[dense], "x")


def _on_devices(mesh: Mesh, whole: nn.Module, module: nn.Module, own: tuple[str, ...]) -> Callable[[], PyTree]:
    """The network and its gradients, each device having S tokens of its own.

    Args:
        whole: makes the parameters; `module` has this device's.
    """
    each, same = PartitionSpec("expert"), PartitionSpec()
    noise = np.random.default_rng(0).normal(size=(DEVICES, S, D))
    x_BSD = jax.device_put(noise.astype(np.float32), NamedSharding(mesh, each))
    rest = () if isinstance(module, Mlp) else (jnp.ones((1, S)), jnp.ones((1, S), jnp.int32))
    params = nn.meta.unbox(whole.init(jax.random.key(0), x_BSD[:1], *rest))["params"]
    specs = {name: each if name in own else same for name in params}
    params = {name: jax.device_put(leaf, NamedSharding(mesh, specs[name])) for name, leaf in params.items()}

    def body(params: PyTree, x_BSD: jax.Array) -> PyTree:
        def loss(params: PyTree, x_BSD: jax.Array) -> jax.Array:
            out = module.apply({"params": params}, x_BSD, *rest)
            y_BSD, extra = out if rest else (out, jnp.zeros(()))
            return jnp.sum(jnp.square(y_BSD)) + extra

        grads, dx_BSD = jax.grad(loss, (0, 1))(params, x_BSD)
        summed = {name: grad if name in own else jax.lax.psum(grad, "expert") for name, grad in grads.items()}
        return summed, dx_BSD

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(specs, each), out_specs=(specs, each), check_vma=False)
    compiled = jax.jit(mapped).lower(params, x_BSD).compile()
    return lambda: jax.block_until_ready(compiled(params, x_BSD))


def _best(runs: dict[str, Callable[[], PyTree]]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each, by the clock and of all cores."""
    wall, cpu = dict.fromkeys(runs, float("inf")), dict.fromkeys(runs, float("inf"))
    for _ in range(REPEATS + 1):
        for name, once in runs.items():
            start = time.perf_counter(), time.process_time()
            once()
            wall[name] = min(wall[name], time.perf_counter() - start[0])
            cpu[name] = min(cpu[name], time.process_time() - start[1])
    return wall, cpu


if __name__ == "__main__":
    raise SystemExit(
        run(__doc__ or "", {"layer": (layer, f"{DEVICES} devices, {EXPERTS} experts, {CHOSEN} a token, {D} x {F}")})
    )

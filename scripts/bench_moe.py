"""What a mixture of experts costs beside a dense network of the same active FLOPs, and whether it drops tokens.

    python scripts/bench_moe.py step|layer|dropped|all [--json]

On fake CPU devices. `step` times whole training steps, `layer` one feed-forward network and its gradients, summed over
devices where they must be. What is compared runs in turn, and the best of each counts. `time of all cores` suffers less
from what else runs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# JAX reads these once, when its backend starts.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
# As a script, Python looks beside this file; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import flax.linen as nn  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from meshsys.assemble import assemble  # noqa: E402
from meshsys.config import Config  # noqa: E402
from meshsys.data import Batch  # noqa: E402
from meshsys.mesh import make_mesh  # noqa: E402
from meshsys.step import Step  # noqa: E402
from models import ModelConfig  # noqa: E402
from models.config import MoeConfig  # noqa: E402
from models.layers import Mlp  # noqa: E402
from models.moe import Moe  # noqa: E402
from models.parallel import ManualAxes  # noqa: E402
from scripts.bench_table import Row, run  # noqa: E402

DEVICES, EXPERTS, CHOSEN = 4, 8, 2
D, F, S = 256, 512, 512  # d_model, width of an expert, tokens of a device
ROUNDS = 15
CONFIG = ModelConfig(
    d_model=D,
    d_ff=CHOSEN * F,
    moe=MoeConfig(experts=EXPERTS, experts_per_token=CHOSEN, d_ff=F, aux_loss=0.01, z_loss=0.001),
)
EACH, SAME = PartitionSpec("expert"), PartitionSpec()

PyTree = Any


def step() -> Iterator[Row]:
    """Seconds of a training step of two layers."""
    runs = {
        "a dense model of the same active FLOPs": _training({"data": DEVICES}, None),
        "experts divided over the devices": _training({"expert": DEVICES}, vars(CONFIG.moe)),
    }
    wall, cpu = _best(runs)
    dense, experts = runs
    yield Row(dense, 1e3 * wall[dense], "ms")
    yield Row(experts, 1e3 * wall[experts], "ms")
    yield Row("  over dense", wall[experts] / wall[dense], "x", at_most=1.6)
    yield Row("  over dense, time of all cores", cpu[experts] / cpu[dense], "x")


def _training(axes: dict[str, int], moe: dict[str, Any] | None) -> Callable[[], None]:
    """Optimizer steps on random tokens."""
    sizes = {"layers": 2, "d_model": D, "heads": 4, "d_ff": CHOSEN * F, "vocab_size": 512}
    config = Config.model_validate(
        {
            "run": {"name": "bench"},
            "model": sizes | ({"moe": moe} if moe else {}),
            "data": {"batch_size": 2 * DEVICES, "sequence_length": S // 2},
            "mesh": {"topology": str(DEVICES), "axes": axes},
        }
    )
    assembly = assemble(config)
    stepper = Step(assembly, make_mesh(assembly.placement))
    tokens = np.random.default_rng(0).integers(0, 512, (2 * DEVICES, S // 2), np.int32)
    places = np.broadcast_to(np.arange(S // 2, dtype=np.int32), tokens.shape)
    ones, rows = np.ones_like(tokens), np.arange(2 * DEVICES, dtype=np.int32)
    batch = Batch(tokens, tokens, places, ones, ones.astype(np.float32), rows)
    state = [stepper.init()]

    def once() -> None:
        state[0], metrics = stepper(state[0], batch, batch)
        jax.block_until_ready(metrics)

    return once


def layer() -> Iterator[Row]:
    """Seconds of a layer's network with its gradients."""
    mesh = _mesh()
    runs = {
        "a dense network of the same active FLOPs": _step(mesh, Mlp(CONFIG)),
        "all experts on each device": _step(mesh, Moe(CONFIG)),
        "experts divided over the devices": _step(mesh, Moe(CONFIG, ManualAxes(expert="expert"))),
    }
    wall, cpu = _best(runs)
    dense, *others = runs
    yield Row(dense, 1e3 * wall[dense], "ms")
    for name in others:
        yield Row(name, 1e3 * wall[name], "ms")
        yield Row("  over dense", wall[name] / wall[dense], "x", at_most=1.6)
        yield Row("  over dense, time of all cores", cpu[name] / cpu[dense], "x")


def dropped() -> Iterator[Row]:
    """Tokens that miss one of their experts, counted: every expert returns ones, and a token's weights sum to one."""
    mesh, module = _mesh(), Moe(CONFIG, ManualAxes(expert="expert"))
    for what, skew in (("a random router", 0.0), ("a router that sends all tokens to one device", 100.0)):
        rng = np.random.default_rng(0)
        # The router sees noise and, with skew, what all tokens have; the experts see what all tokens have.
        x_BSD = np.concatenate([rng.normal(size=(DEVICES, S, D - 1)), np.ones((DEVICES, S, 1))], -1)
        router_DE = rng.normal(size=(D, EXPERTS)) / D**0.5
        router_DE[-1, -CHOSEN:] += skew
        gate_EDF, down_EFD = np.zeros((EXPERTS, D, F)), np.ones((EXPERTS, F, D)) / F
        gate_EDF[:, -1] = 1.0
        up_EDF = gate_EDF / jax.nn.silu(1.0)
        params = {"router": router_DE, "gate": gate_EDF, "up": up_EDF, "down": down_EFD}
        params, x_BSD = jax.tree.map(jnp.float32, (params, x_BSD))
        y_BSD = _mapped(mesh, module, params, lambda params, x_BSD: _apply(module, params, x_BSD)[0], EACH)(
            params, x_BSD
        )
        missing = (np.abs(np.asarray(y_BSD) - 1.0) > 1e-3).any(axis=-1)
        yield Row(f"{what}: of {missing.size} tokens, dropped", float(missing.sum()), "", at_most=0)


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:DEVICES]), ("expert",))


def _step(mesh: Mesh, module: nn.Module) -> Callable[[], PyTree]:
    """The gradients of a function of the outputs, each device having S tokens of its own."""
    x_BSD = np.random.default_rng(0).normal(size=(DEVICES, S, D)).astype(np.float32)
    whole = Mlp(CONFIG) if isinstance(module, Mlp) else Moe(CONFIG)
    params = nn.meta.unbox(whole.init(jax.random.key(0), x_BSD[:1], *_rest(module)))["params"]
    specs = _specs(module, params)

    def objective(params: PyTree, x_BSD: jax.Array) -> jax.Array:
        y_BSD, loss = _apply(module, params, x_BSD)
        return jnp.square(y_BSD).sum() + loss

    def gradients(params: PyTree, x_BSD: jax.Array) -> PyTree:
        grads, dx_BSD = jax.grad(objective, (0, 1))(params, x_BSD)
        own = _own(module)
        return {name: g if name in own else jax.lax.psum(g, "expert") for name, g in grads.items()}, dx_BSD

    compiled = _mapped(mesh, module, params, gradients, (specs, EACH))
    params = jax.device_put(params, {name: NamedSharding(mesh, spec) for name, spec in specs.items()})
    x_BSD = jax.device_put(x_BSD, NamedSharding(mesh, EACH))
    return lambda: jax.block_until_ready(compiled(params, x_BSD))


def _mapped(mesh: Mesh, module: nn.Module, params: PyTree, function: Callable, out_specs: PyTree) -> Callable:
    """`function(params, x_BSD)` on every device."""
    in_specs = (_specs(module, params), EACH)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def _apply(module: nn.Module, params: PyTree, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
    out = module.apply({"params": params}, x_BSD, *_rest(module))
    return (out, jnp.zeros(())) if isinstance(module, Mlp) else out


def _rest(module: nn.Module) -> tuple[jax.Array, ...]:
    """Arguments beside the tokens."""
    return () if isinstance(module, Mlp) else (jnp.ones((1, S)), jnp.ones((1, S), jnp.int32))


def _own(module: nn.Module) -> tuple[str, ...]:
    """Leaves of which each device has a part."""
    return ("gate", "up", "down") if isinstance(module, Moe) and module.manual.expert else ()


def _specs(module: nn.Module, params: PyTree) -> dict[str, PartitionSpec]:
    return {name: EACH if name in _own(module) else SAME for name in params}


def _best(runs: dict[str, Callable[[], PyTree]]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each, by the clock and of all cores."""
    wall, cpu = dict.fromkeys(runs, float("inf")), dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS + 1):
        for name, once in runs.items():
            start = time.perf_counter(), time.process_time()
            once()
            wall[name] = min(wall[name], time.perf_counter() - start[0])
            cpu[name] = min(cpu[name], time.process_time() - start[1])
    return wall, cpu


if __name__ == "__main__":
    experts = f"{EXPERTS} experts of {D} x {F}, {CHOSEN} a token"
    size = f"{DEVICES} devices of {S} tokens, {experts}"
    whole = f"2 layers, {DEVICES} devices with 2 sequences of {S // 2}, {experts}"
    benchmarks = {"step": (step, whole), "layer": (layer, size), "dropped": (dropped, size)}
    raise SystemExit(run(__doc__ or "", benchmarks))

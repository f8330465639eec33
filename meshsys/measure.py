"""What each action of a model takes on the local device: the times that schedules are simulated and searched with."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshsys.assemble import Assembly
from meshsys.blocks import pipeline_model
from meshsys.errors import ConfigError
from meshsys.inputs import abstract_params, random_batch
from meshsys.sharding import BATCH_AXES
from meshsys.stage_actions import StageActions
from models import Batch
from schedules.costs import Costs
from schedules.stages import StageKind

__all__ = ["Measured", "measure", "send_seconds"]

PyTree = Any

_KINDS = ("F", "R", "I", "W", "B")
_SAMPLE = 5e-3  # seconds that a sample takes at least; a shorter one is mostly the call itself
_TRANSFERS = 16


@dataclass(frozen=True)
class Measured:
    """Seconds and FLOPs of a model's actions.

    Attributes:
        kinds: `kinds[stage]` is what the stage consists of.
        seconds: medians for each kind of stage and action.
        flops: XLA's count for the same programs, None where it has none; a scan over layers counts as one layer.
        send: seconds of one transfer of an activation between devices, 0 where there is one device.
        notes: what the figures leave out.
        device: what ran them.
    """

    kinds: tuple[StageKind, ...]
    seconds: dict[StageKind, dict[str, float]]
    flops: dict[StageKind, dict[str, float | None]]
    send: float
    notes: tuple[str, ...]
    device: str

    @property
    def costs(self) -> Costs:
        """Times by stage, in seconds."""
        measured = self.seconds[self.kinds[0]]
        times = {name: tuple(self.seconds[kind][name] for kind in self.kinds) for name in _KINDS if name in measured}
        return Costs(**times, send=self.send)  # type: ignore[arg-type]

    def describe(self) -> str:
        """A table for the terminal: milliseconds a kind of stage."""
        names = list(self.seconds[self.kinds[0]])
        lines = [f"milliseconds on {self.device}", "stages  layers" + "".join(name.rjust(10) for name in names)]
        for kind, seconds in self.seconds.items():
            stages = [stage for stage, one in enumerate(self.kinds) if one == kind]
            ends = [end for end, has in (("embedding", kind[0]), ("head", kind[2])) if has]
            times = "".join(f"{1e3 * seconds[name]:10.3f}" for name in names)
            span = f"{stages[0]}-{stages[-1]}" if len(stages) > 1 else str(stages[0])
            lines.append(f"{span:6}  {kind[1]:6}{times}  {' and '.join(ends)}".rstrip())
        return "\n".join([*lines, f"send {1e3 * self.send:.3f}", *self.notes])

    def to_json(self) -> str:
        """A cost file."""
        stages = [
            {
                "stages": [stage for stage, kind in enumerate(self.kinds) if kind == (first, count, last)],
                "embedding": first,
                "layers": count,
                "head": last,
                "flops": self.flops[first, count, last],
            }
            for first, count, last in dict.fromkeys(self.kinds)
        ]
        about = {"unit": "seconds", "device": self.device, "jax": jax.__version__, "kinds": stages, "notes": self.notes}
        return self.costs.to_json(about)


def measure(assembly: Assembly, rounds: int = 7) -> Measured:
    """Compiles each action of each kind of stage alone and times it, for one device's share of a microbatch.

    Args:
        rounds: samples of each action; they take turns, so that a slow moment of the machine hits all alike.
    """
    layout = assembly.program.layout
    if layout.part_places:
        moe = assembly.config.model.moe
        raise ConfigError(
            f"model.moe.dense_layers={list(moe.dense_layers) if moe else []} makes layers of two kinds, and stages are "
            "measured with one; leave it out to measure, or give pipeline.costs yourself"
        )
    spread = assembly.program.vocab_parallel
    kinds = tuple(
        (first and not spread, count, last and not spread)
        for first, count, last in layout.kinds()[: assembly.schedule.depth]
    )
    random = np.random.default_rng(0)
    shapes = abstract_params(assembly.decoder)
    # Any values of a sane size do; compiling the initialisers would take longer than much of the rest.
    params = jax.tree.map(lambda a: jnp.asarray(0.02 * random.standard_normal(a.shape, np.float32), a.dtype), shapes)
    shares = math.prod(assembly.axes[axis] for axis in BATCH_AXES)
    config = assembly.config
    batch = random_batch(config.model.vocab_size, assembly.microbatch_size // shares, config.data.sequence_length)
    seconds: dict[StageKind, dict[str, float]] = {}
    flops: dict[StageKind, dict[str, float | None]] = {}
    calls: dict[tuple[StageKind, str], Callable[[], PyTree]] = {}
    for kind in dict.fromkeys(kinds):
        flops[kind] = {}
        for name, (call, count) in _calls(assembly, kind, params, batch).items():
            calls[kind, name], flops[kind][name] = call, count
    for (kind, name), samples in _samples(calls, rounds).items():
        seconds.setdefault(kind, {})[name] = statistics.median(samples)
    send, note = send_seconds(assembly.x, assembly.schedule.ranks, rounds)
    notes = [note, "an action's time is that of its program alone, without the tick around it"]
    if not assembly.program.unroll:
        notes.append("flops count one layer of a stage, whose layers are a loop")
    if spread:
        notes.append("embedding and head, of which each rank has a part, are in no stage's time")
    if assembly.axes["tensor"] > 1:
        notes.append(f"matrices are whole: tensor={assembly.axes['tensor']} devices would share them")
    device = jax.devices()[0]
    return Measured(kinds, seconds, flops, send, tuple(notes), f"{device.platform} {device.device_kind}")


def _calls(
    assembly: Assembly, kind: StageKind, params: PyTree, batch: Batch
) -> dict[str, tuple[Callable[[], PyTree], float | None]]:
    """Each action as a call without arguments, and its FLOPs. W and B add to sums of gradients, as in a schedule."""
    first, count, last = kind
    unroll = assembly.program.unroll
    layers = jax.tree.map(lambda a: a[:count], params["layers"])
    if unroll:
        layers = tuple(jax.tree.map(lambda a, i=i: a[i], layers) for i in range(count))
    weights = {"shared": params["shared"], "layers": layers}
    # Where some stages have R apart, all are measured so.
    split = next((one for one in assembly.splits.values() if one.layer.recomputed), assembly.splits["layer"])
    model = pipeline_model(assembly.decoder)  # of one device, whatever axes the blocks of the program know
    actions = StageActions(model, split, (split.layer,) * count, first, last, jax.random.key(0), unroll)
    programs: dict[str, Any] = {}

    def run(name: str, function: Callable, *given: PyTree, **options: Any) -> PyTree:
        programs[name] = jax.jit(function, **options).lower(*given).compile()
        return programs[name](*given)

    x = () if first else jnp.zeros(assembly.x.shape, assembly.x.dtype)
    y, left = run("F", actions.forward, weights, x, batch)
    given = weights, batch, left
    again = run("R", actions.recompute, *given)
    _, stash = run("I", actions.input_gradient, *given, again, y)
    shapes = jax.eval_shape(actions.weight_gradient, *given, again, stash)
    sums = jax.tree.map(lambda grad: jnp.zeros(grad.shape, jnp.float32), shapes)

    def weight(sums: PyTree, *given: PyTree) -> PyTree:
        return _add(sums, actions.weight_gradient(*given))

    def backward(sums: PyTree, *given: PyTree) -> tuple[PyTree, PyTree]:
        dx, grads = actions.backward(*given)
        return _add(sums, grads), dx

    sums = run("W", weight, sums, *given, again, stash, donate_argnums=0)
    sums, _ = run("B", backward, sums, *given, again, y, donate_argnums=0)

    def add(name: str, *given: PyTree) -> PyTree:
        nonlocal sums
        out = programs[name](sums, *given)
        sums, rest = (out, ()) if name == "W" else out
        return sums, rest

    calls: dict[str, Callable[[], PyTree]] = {
        "F": partial(programs["F"], weights, x, batch),
        "R": partial(programs["R"], *given),
        "I": partial(programs["I"], *given, again, y),
        "W": partial(add, "W", *given, again, stash),
        "B": partial(add, "B", *given, again, y),
    }
    if not split.layer.recomputed:
        del calls["R"]
    return {name: (call, _flops(programs[name])) for name, call in calls.items()}


def _add(sums: PyTree, grads: PyTree) -> PyTree:
    return jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), sums, grads)


def _flops(compiled: Any) -> float | None:
    return (compiled.cost_analysis() or {}).get("flops")


def _samples(calls: dict[Any, Callable[[], PyTree]], rounds: int) -> dict[Any, list[float]]:
    """Seconds a call, `rounds` of them for each."""

    def sample(call: Callable[[], PyTree], repeats: int) -> float:
        begun = time.perf_counter()
        for _ in range(repeats):
            out = call()
        jax.block_until_ready(out)
        return (time.perf_counter() - begun) / repeats

    for call in calls.values():
        sample(call, 1)
    repeats = {name: math.ceil(min(_SAMPLE / sample(call, 1), 100)) for name, call in calls.items()}
    found: dict[Any, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(sample(call, repeats[name]))
    return found


def send_seconds(x: jax.ShapeDtypeStruct, ranks: int, rounds: int = 7) -> tuple[float, str]:
    """Seconds of one activation from each rank to the next, all at once, and a note on how that was found."""
    devices = jax.devices()[:ranks]
    if len(devices) < 2:
        return 0.0, "send is 0: there is no second device to send to"
    mesh = Mesh(np.array(devices), ("pipe",))
    spec = PartitionSpec("pipe")
    pairs = [(rank, (rank + 1) % len(devices)) for rank in range(len(devices))]

    def send(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (jax.lax.ppermute(x, "pipe", pairs), None), x, None, _TRANSFERS)[0]

    value = jax.device_put(jnp.zeros((len(devices), *x.shape), x.dtype), NamedSharding(mesh, spec))
    call = partial(jax.jit(jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec)), value)
    seconds = statistics.median(_samples({"send": call}, rounds)["send"]) / _TRANSFERS
    return seconds, f"send is one of {_TRANSFERS} ppermutes in a row over {len(devices)} devices"

"""The best way to lay a model out on a topology: mesh axes, schedule, chunks, microbatches and remat.

Candidates are tried in the order of a bound on their time, the work of the busiest rank at the chip's peak, until no
other can be better than the best that fits. A candidate's memory is the plan's (`meshsys.planner.memory`), its time the
estimate's (`meshsys.planner.estimate`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshsys.assemble import assemble
from meshsys.config import Config
from meshsys.data import load_tokenizer
from meshsys.errors import ConfigError
from meshsys.planner import memory
from meshsys.planner.estimate import estimate
from meshsys.planner.plan import ChoicePlan, LayoutPlan, SearchPlan
from meshsys.torus import Topology
from meshsys.torus.generations import Chip
from models import ModelConfig
from models.counting import LayerWeights, layer_weights
from schedules import families

__all__ = ["config_of", "search"]

MARGIN = 0.10
"""Part of a device's memory that is left free: how far predicted memory may be off."""

_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv")
_REMATS = ("none", "dots", "full")
_CHUNKS = (2, 4)
_MOST_MICROBATCHES = 256
_ENOUGH, _MOST_TRIED = 12, 40  # rows of the table; candidates that are looked at in full, if one of them fits
_MOST_MISFITS = 200  # candidates that are looked at in full while none fits


@dataclass(frozen=True, order=True)
class _Candidate:
    """Sorts by the bound on its time, then with less remat first."""

    bound: float
    recompute: int
    layout: LayoutPlan


def search(config: Config) -> SearchPlan:
    """Ranks the candidates for the model, topology and batch of a configuration; its mesh and pipeline do not matter.

    Raises:
        ConfigError: chips of no particular kind, or a batch that no mesh of so many devices divides.
    """
    topology = Topology.parse(config.mesh.topology)
    chip = topology.chip
    if chip is None:
        raise ConfigError(
            f"mesh.topology={topology} names no TPU generation, so there are no peak numbers to search by; "
            "write one, as in --topology v5p:4x4x4"
        )
    vocabulary = config.model.vocab_size or load_tokenizer(config.data.tokenizer or "bytes").vocab_size
    queue = list(_candidates(config, topology.size, vocabulary, chip))
    heapq.heapify(queue)
    found: list[ChoicePlan] = []
    tried = fitting = 0
    best = math.inf
    while queue and (fitting < _ENOUGH or queue[0].bound < best):
        if tried >= (_MOST_TRIED if fitting else _MOST_MISFITS):
            break
        candidate = heapq.heappop(queue)
        tried += 1
        choice = _evaluate(config, candidate.layout, chip)
        if choice is not None:
            found.append(choice)
            fitting += choice.fits
            best = min(best, choice.step_seconds) if choice.fits else best
    found.sort(key=lambda choice: (not choice.fits, choice.step_seconds if choice.fits else choice.bytes))
    return SearchPlan(str(topology), int(chip.hbm), MARGIN, tried + len(queue), tuple(found))


def config_of(config: Config, layout: LayoutPlan) -> Config:
    """The configuration with a layout's mesh and pipeline."""
    axes = config.mesh.axes.model_copy(
        update={"data": layout.data, "fsdp": layout.fsdp, "tensor": layout.tensor, "pipe": layout.pipe}
        | {"expert": 1, "context": 1}
    )
    pipeline = config.pipeline.model_copy(
        update={
            "schedule": layout.schedule,
            "microbatches": layout.microbatches,
            "chunks": layout.chunks if layout.chunks > 1 else None,
            "remat": layout.remat,
            "activation_memory": None,
            "group": None,
            "split_backward": None,
        }
    )
    return config.model_copy(update={"mesh": config.mesh.model_copy(update={"axes": axes}), "pipeline": pipeline})


# --- Candidates -----------------------------------------------------------------------------------------------


def _candidates(config: Config, devices: int, vocabulary: int, chip: Chip) -> Iterator[_Candidate]:
    """Everything that divides evenly and whose state alone does not fill the memory.

    Raises:
        ConfigError: there is nothing.
    """
    model, batch = config.model, config.data.batch_size
    known = [name for name in _SCHEDULES if name in families.names()]
    meshes = [
        (_state(config, vocabulary, fsdp, tensor, pipe), (data, fsdp, tensor, pipe))
        for data, fsdp, tensor, pipe in _meshes(devices)
        if not (model.heads % tensor or model.num_kv_heads % tensor or model.d_ff % tensor or model.d_model % fsdp)
        and batch % (data * fsdp) == 0
        and pipe <= model.layers
    ]
    if not meshes:
        raise ConfigError(
            f"data.batch_size={batch}: no mesh of {devices} devices divides it and the model; use a multiple of the "
            "devices, or a smaller --topology"
        )
    least, shape = min(meshes)
    if least > chip.hbm * (1 - MARGIN):
        names = zip(("data", "fsdp", "tensor", "pipe"), shape, strict=True)
        closest = ", ".join(f"{name}={size}" for name, size in names)
        raise ConfigError(
            f"mesh.topology={config.mesh.topology}: nothing fits; the closest, {closest}, "
            f"needs {least / 2**30:.3g} GiB a device for parameters, moments and gradients alone, and "
            f"{chip.hbm * (1 - MARGIN) / 2**30:.3g} GiB are there; use a larger --topology or a smaller model"
        )
    for state, shape in meshes:
        if state > chip.hbm * (1 - MARGIN):
            continue
        data, fsdp, _, pipe = shape
        for microbatches in _microbatches(batch // (data * fsdp), pipe):
            for schedule, chunks in _schedules(known, pipe, model.layers):
                for recompute, remat in enumerate(_REMATS):
                    layout = LayoutPlan(*shape, chunks, microbatches, schedule, remat)
                    yield _Candidate(_bound(config, vocabulary, layout, chip), recompute, layout)


def _meshes(devices: int) -> Iterator[tuple[int, int, int, int]]:
    divisors = [d for d in range(1, devices + 1) if devices % d == 0]
    for data, fsdp, tensor in itertools.product(divisors, repeat=3):
        if devices % (data * fsdp * tensor) == 0:
            yield data, fsdp, tensor, devices // (data * fsdp * tensor)


def _microbatches(sequences: int, pipe: int) -> list[int]:
    """Divisors of a device's sequences; with a pipeline at least one a rank, as far as there are so many."""
    divisors = [d for d in range(1, min(sequences, _MOST_MICROBATCHES) + 1) if sequences % d == 0]
    return [d for d in divisors if d >= min(pipe, divisors[-1])] if pipe > 1 else divisors


def _schedules(known: Sequence[str], pipe: int, layers: int) -> Iterator[tuple[str, int]]:
    if pipe == 1:
        yield "1f1b", 1
        return
    for name in known:
        family = families.describe(name)
        if family.max_chunks == 1:
            yield name, 1
        else:
            most = family.max_chunks or max(_CHUNKS)
            yield from ((name, chunks) for chunks in _CHUNKS if chunks <= most and pipe * chunks <= layers)


def _state(config: Config, vocabulary: int, fsdp: int, tensor: int, pipe: int) -> float:
    """Parameters with their moments, and gradients: the least that a device holds."""
    model = config.model
    layers = sum(layer.always + layer.experts for layer in _weights(model))
    parameters = vocabulary * model.d_model + layers
    return 12.0 * parameters / (fsdp * tensor * pipe) + 4.0 * layers / (tensor * pipe)


def _weights(model: ModelConfig) -> tuple[LayerWeights, ...]:
    return layer_weights(replace(model, vocab_size=model.vocab_size or 1))  # the vocabulary has no part in it


def _bound(config: Config, vocabulary: int, layout: LayoutPlan, chip: Chip) -> float:
    """No step takes less: the busiest rank's products at the peak, and a bubble of one pass for the farthest rank."""
    model, pipe = config.model, layout.pipe
    sequences = config.data.batch_size / (layout.data * layout.fsdp * layout.microbatches)
    tokens = sequences * config.data.sequence_length
    attention = 2.0 * config.data.sequence_length * model.heads * (model.size_of_head + model.size_of_value)
    active = min(layer.active for layer in _weights(model))
    layer = tokens * (2.0 * active + attention * (not model.window)) / layout.tensor
    head = tokens * 2.0 * model.d_model * vocabulary / layout.tensor
    passes = 4 if layout.remat == "full" else 3
    per_rank = max(passes * layer * math.ceil(model.layers / pipe), passes * layer * (model.layers // pipe) + 3 * head)
    fill = 0.0 if layout.schedule.startswith("zb") else (pipe - 1) / layout.chunks * layer * (model.layers // pipe)
    return (layout.microbatches * per_rank + fill) / chip.flops


# --- In full --------------------------------------------------------------------------------------------------


def _evaluate(config: Config, layout: LayoutPlan, chip: Chip) -> ChoicePlan | None:
    """None where the parts do not fit together after all."""
    try:
        assembly = assemble(config_of(config, layout))
    except ConfigError:
        return None
    time = estimate(assembly)
    assert time is not None
    size = memory.on_device(assembly, memory.waiting_values(assembly)).total
    return ChoicePlan(
        **vars(layout),
        step_seconds=time.step_seconds,
        bubble_fraction=time.bubble_fraction,
        mfu=time.mfu,
        bytes=size,
        fits=size <= chip.hbm * (1 - MARGIN),
    )

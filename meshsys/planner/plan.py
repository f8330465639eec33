"""The plan of a run as frozen records; their fields are the keys of its JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import TypeAdapter

__all__ = [
    "AxisPlan",
    "BatchPlan",
    "ChipPlan",
    "ChoicePlan",
    "CollectivePlan",
    "CompiledPlan",
    "EstimatePlan",
    "FlowPlan",
    "JaxOrderPlan",
    "LayoutPlan",
    "MemoryPlan",
    "MeshPlan",
    "Plan",
    "RankPlan",
    "RematPlan",
    "SchedulePlan",
    "SearchPlan",
    "StagePlan",
    "ValuePlan",
]


@dataclass(frozen=True)
class AxisPlan:
    """A mesh axis, the torus dimensions that it runs along, and its hops (`meshsys.torus.Placement`)."""

    name: str
    size: int
    dims: str
    hops: int
    closes: int


@dataclass(frozen=True)
class FlowPlan:
    """The collectives of one kind along the same axes that a step is known to run, without compiling it.

    Attributes:
        kind: all-gather, all-reduce, reduce-scatter, all-to-all, permute (to the next device along the axis) or rotate
            (from the last to the first too).
        axes: mesh axes, as in "tensor" or "pipe+fsdp".
        count: how many run.
        bytes: of the full array over the group, one run; what a device sends, for permute and rotate.
        seconds: by the closed forms, all runs.
        jax_seconds: with the order of JAX's `create_device_mesh`; None where it has none.
    """

    kind: str
    axes: str
    count: float
    bytes: float
    seconds: float
    jax_seconds: float | None


@dataclass(frozen=True)
class JaxOrderPlan:
    """What JAX's `create_device_mesh` makes of the same mesh.

    Attributes:
        error: the name of the error with which it fails; None where it does not.
        axes: empty where it fails.
    """

    error: str | None
    axes: tuple[AxisPlan, ...]


@dataclass(frozen=True)
class ChipPlan:
    """A device in use: its coordinates on the torus, and its position on each axis longer than 1."""

    coords: tuple[int, ...]
    position: Mapping[str, int]


@dataclass(frozen=True)
class MeshPlan:
    """The torus and what the run takes of it.

    Attributes:
        dims: devices along each dimension of the torus, named in `dim_names`.
        wrap: for each dimension whether its last device is linked to its first.
        twist: for each dimension how far a step over its end goes along each dimension; () without a twist.
        collectives: those that the axes are laid for; none for chips of no particular kind, and neither is jax.
        jax: the order that JAX would choose.
    """

    topology: str
    dims: tuple[int, ...]
    dim_names: tuple[str, ...]
    wrap: tuple[bool, ...]
    devices: int
    devices_used: int
    axes: tuple[AxisPlan, ...]
    chips: tuple[ChipPlan, ...]
    collectives: tuple[FlowPlan, ...] = ()
    jax: JaxOrderPlan | None = None
    twist: tuple[tuple[int, ...], ...] = ()

    @property
    def twisted(self) -> dict[int, tuple[int, ...]]:
        """The dimensions that close with a twist, and how far it goes."""
        return {dim: shift for dim, shift in enumerate(self.twist) if any(shift)}


@dataclass(frozen=True)
class StagePlan:
    """One stage of the pipeline.

    Attributes:
        layers: global layer numbers.
        remat: the policy of its layers, as `pipeline.remat` names them.
        recompute_apart: what F did not keep is recomputed in R, and not in I or B.
        parameters: over all devices; a tied table counts with the embedding.
        residual_bytes: what one microbatch's F keeps, on each device.
        stash_bytes: what its I leaves for W, on each device.
        peak_microbatches: the most microbatches between F and the end of their backward.
    """

    stage: int
    rank: int
    chunk: int
    layers: tuple[int, ...]
    embedding: bool
    head: bool
    remat: str
    recompute_apart: bool
    parameters: int
    residual_bytes: int
    stash_bytes: int
    peak_microbatches: int


@dataclass(frozen=True)
class SchedulePlan:
    """The schedule in lock step.

    Attributes:
        name: `pipeline.schedule`.
        bubble_fraction: predicted, at pipeline.costs.
        peak_activations: per rank, the most (stage, microbatch) pairs held at once.
        period: `schedules.actions.Schedule.period`, 0 with a flush.
        timeline: `timeline[rank][tick]`, as in "0F3"; None is a bubble.
    """

    name: str
    ranks: int
    stages: int
    chunks: int
    microbatches: int
    ticks: int
    bubble_fraction: float
    peak_activations: tuple[int, ...]
    period: int
    timeline: tuple[tuple[str | None, ...], ...]


@dataclass(frozen=True)
class BatchPlan:
    """What a step reads.

    Attributes:
        microbatch_size: sequences in a microbatch, over all devices.
        sequences_a_device: those of a microbatch that one device runs.
    """

    batch_size: int
    sequence_length: int
    microbatch_size: int
    sequences_a_device: int
    tokens_a_step: int


@dataclass(frozen=True)
class ValuePlan:
    """A value that waits in slots: a residual (F leaves it), a recomputed one (R) or a part of the stash (I).

    Attributes:
        block: `first` (the embedding), `layer` or `last` (the head).
        name: the model's name for it, or the operation that made it.
        shape: for one device's sequences; whole along what `tensor` divides.
        tensor: into how many parts the `tensor` axis divides it, as predicted.
        bytes: one device's part, for one microbatch and one layer.
        until: the action that ends its wait, R, I or W.
        slots: how many of it a device can hold for each of its places.
        places: layers of a stage, 1 for `first` and `last`.
        total_bytes: bytes x slots x places, which every device allocates.
    """

    block: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    tensor: int
    bytes: int
    until: str
    slots: int
    places: int
    total_bytes: int
    on_host: bool


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device. One program runs on all, so each allocates what the busiest rank needs.

    Attributes:
        parameters, optimizer_state: what stays between steps.
        batch: the tokens, positions and weights of a step.
        gradients: the accumulators, float32 at least.
        gathered_weights: copies of the weights as the layers read them.
        residual_slots, recomputed_slots, stash_slots, inbox_slots: what waits between actions.
        transfers: what an action hands on and what arrives, until it is in the inbox.
        workspace: what an action uses while it runs, as predicted.
        copies: of what the optimizer overwrites, none on a TPU; without a flush of gradients that go on.
        temporaries: all that lives within a step, from `gradients` to `copies`; without a flush what waits, gradients
            and slots, goes on to the next step and is not among them.
        total: all of these, what stays included.
        host: residuals that wait in host memory.
    """

    parameters: int
    optimizer_state: int
    batch: int
    gradients: int
    gathered_weights: int
    residual_slots: int
    recomputed_slots: int
    stash_slots: int
    inbox_slots: int
    transfers: int
    workspace: int
    copies: int
    temporaries: int
    total: int
    host: int


@dataclass(frozen=True)
class RankPlan:
    """What a rank of `pipe` fills of the slots that it has, in bytes on each device.

    Attributes:
        residual_bytes, stash_bytes: the most that waits of each, maybe in different ticks.
        inbox_bytes: the slots of its inbox that it ever fills.
        peak_bytes: the most residuals, recomputed values and stash that wait at once.
    """

    rank: int
    stages: tuple[int, ...]
    layers: int
    peak_activations: int
    residual_bytes: int
    stash_bytes: int
    inbox_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class RematPlan:
    """What `pipeline.remat: auto` chose, beside `none` and `full` everywhere; each stage's policy is in `StagePlan`.

    Attributes:
        cap: `pipeline.activation_memory` in bytes.
        bytes: predicted, of slots on each device.
        makespan: predicted, in lock step, in the unit of pipeline.costs, or if null in forwards of one layer by FLOPs.
        keep_all_bytes, keep_all_makespan: with `pipeline.remat: none`.
        full_bytes, full_makespan: with `pipeline.remat: full`.
    """

    cap: int
    bytes: int
    makespan: float
    keep_all_bytes: int
    keep_all_makespan: float
    full_bytes: int
    full_makespan: float


@dataclass(frozen=True)
class EstimatePlan:
    """A step's time by the chip's peak numbers and the closed forms of collectives, without compiling it.

    Attributes:
        step_seconds: the sum of the next three.
        ticks_seconds: actions in lock step, each tick as long as its slowest rank.
        send_seconds: transfers between ticks.
        around_seconds: gathers, reductions and the optimizer, once a step.
        bubble_fraction: of the ticks' time.
        mfu: the model's FLOPs over what all devices could do in that time.
    """

    step_seconds: float
    ticks_seconds: float
    send_seconds: float
    around_seconds: float
    bubble_fraction: float
    mfu: float


@dataclass(frozen=True)
class CollectivePlan:
    """The collectives of one kind among devices that differ along the same axes, in a step of the busiest rank.

    Attributes:
        kind: all-gather, all-reduce, reduce-scatter, all-to-all or permute.
        axes: mesh axes, as in "tensor" or "pipe+fsdp".
        count: how many run.
        bytes: of the full arrays over the group, all runs together; what a device sends, for a permute.
        seconds: by the closed forms, all runs; None for chips of no particular kind.
    """

    kind: str
    axes: str
    count: int
    bytes: float
    seconds: float | None


@dataclass(frozen=True)
class CompiledPlan:
    """What the compiler says of the step, in bytes on each device, and what its program does.

    Attributes:
        seconds: that it took to compile.
        arguments, outputs: of a step; `reused` bytes of the outputs lie in the arguments.
        temporaries: all that lives within a step.
        host_temporaries: of those in host memory.
        program: the code.
        total: what a device must have: arguments, outputs that are not reused, temporaries and program.
        limit: what the compiler lets a program have; None for chips of no particular kind.
        flops: of the busiest rank's devices, for one step.
        traffic: bytes to and from a device's memory, likewise.
        step_seconds: estimated from the chip's peak numbers and the closed forms of collectives, ticks in lock
            step; None for chips of no particular kind.
        mfu: the model's FLOPs over what all devices could do in that time.
    """

    seconds: float
    arguments: int
    outputs: int
    reused: int
    temporaries: int
    host_temporaries: int
    program: int
    total: int
    limit: int | None
    flops: float
    traffic: float
    collectives: tuple[CollectivePlan, ...]
    step_seconds: float | None
    mfu: float | None


@dataclass(frozen=True, order=True)
class LayoutPlan:
    """How a model lies on a topology: the mesh axes and pipeline options that a search chooses.

    It is ordered so that a search that finds several as good always takes them in the same order.
    """

    data: int
    fsdp: int
    tensor: int
    pipe: int
    chunks: int
    microbatches: int
    schedule: str
    remat: str


@dataclass(frozen=True)
class ChoicePlan(LayoutPlan):
    """One row of a search: a layout, and what it comes to.

    Attributes:
        step_seconds, bubble_fraction, mfu: as in `EstimatePlan`.
        bytes: of each device, predicted.
        fits: within the search's limit and margin.
        verified: the compiler's bytes, where it was asked and accepted them.
    """

    step_seconds: float
    bubble_fraction: float
    mfu: float
    bytes: int
    fits: bool
    verified: int | None = None


@dataclass(frozen=True)
class SearchPlan:
    """What a search found.

    Attributes:
        limit: bytes that the compiler lets a program have on a device.
        margin: the part of it that stays free.
        candidates: how many there were.
        choices: those that were looked at in full: what fits, the fastest first; then the rest, the smallest first.
    """

    topology: str
    limit: int
    margin: float
    candidates: int
    choices: tuple[ChoicePlan, ...]

    def to_json(self) -> str:
        """One JSON object; its keys are the names of the fields."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)


@dataclass(frozen=True)
class Plan:
    """Everything that is known before a run.

    Attributes:
        run: `run.name`.
        parameters: number of parameters of the model, tied ones once.
        remat, fsdp_gather: as in the configuration's `pipeline` section.
        choice: what `remat: auto` chose; None under another policy.
        predictions: which numbers are estimates; the others are those that the program is built from.
        estimate: of the step's time; None for chips of no particular kind.
        compiled: the compiler's figures, where it was asked.
    """

    run: str
    parameters: int
    mesh: MeshPlan
    stages: tuple[StagePlan, ...]
    schedule: SchedulePlan
    batch: BatchPlan
    remat: str
    choice: RematPlan | None
    fsdp_gather: str
    residuals: tuple[ValuePlan, ...]
    recomputed: tuple[ValuePlan, ...]
    stash: tuple[ValuePlan, ...]
    memory: MemoryPlan
    ranks: tuple[RankPlan, ...]
    predictions: tuple[str, ...]
    estimate: EstimatePlan | None = None
    compiled: CompiledPlan | None = None

    def to_json(self) -> str:
        """One JSON object; its keys are the names of the fields."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: the text is something else.
        """
        return TypeAdapter(cls).validate_json(text)

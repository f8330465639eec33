"""What a configuration means: its placement, schedule, model and program, checked against one another.

No device is touched here, so `meshsys plan` and every refusal of a bad configuration need none.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from meshsys.blocks import BlockAction, block_actions, cut_blocks, pipeline_model
from meshsys.config import Config
from meshsys.cost_file import read_costs
from meshsys.data import Tokenizer, check_source, load_tokenizer
from meshsys.errors import ConfigError
from meshsys.pretrained import with_pretrained
from meshsys.remat_choice import RematChoice, RematSpace, choose_remat
from meshsys.searched import searched
from meshsys.sharding import BATCH_AXES, manual_axes
from meshsys.torus import Placement, Topology, TopologyError, Traffic, place
from meshsys.traffic import training_traffic
from models import SAVEABLE_NAMES, Decoder, ModelConfig
from schedules import families
from schedules.actions import Kind, Schedule, ScheduleError, from_csv, split_backward
from schedules.backward import SplitBlock
from schedules.costs import Costs
from schedules.pipeline_model import PipelineModel, SplitModel
from schedules.program import Program
from schedules.recompute import add_recompute
from schedules.remat import Remat
from schedules.validate import recomputing_stages, validate

__all__ = ["Assembly", "assemble", "topology_of"]


@dataclass(frozen=True)
class Assembly:
    """A checked configuration and what follows from it.

    Attributes:
        config: with the architecture of `model.pretrained`, `model.vocab_size` and `data.tokenizer` filled in.
        traffic: what a step sends along the mesh axes, for which the placement is the best.
        costs: of the schedule's actions: `pipeline.costs`, or with `pipeline.remat: auto` those of the choice.
        splits: the model's blocks with their backwards cut, one for each of `program.ways`, for one device's share of
            a microbatch; shapes of dimensions that `tensor` divides are whole.
        search_record: what a run keeps of the search for its schedule (`meshsys.searched`); None if there was none.
        choice: what `pipeline.remat: auto` chose; None under another policy.
    """

    config: Config
    tokenizer: Tokenizer
    placement: Placement
    traffic: Traffic
    schedule: Schedule
    costs: Costs
    decoder: Decoder
    model: PipelineModel
    program: Program
    splits: Mapping[str, SplitModel]
    search_record: str | None
    choice: RematChoice | None

    @property
    def axes(self) -> dict[str, int]:
        return dict(self.placement.axes)

    @property
    def microbatch_size(self) -> int:
        """Sequences in a microbatch, over all devices."""
        return self.config.data.batch_size // self.config.pipeline.microbatches

    @property
    def x(self) -> jax.ShapeDtypeStruct:
        """What travels between stages."""
        return self.splits["layer"].x

    @property
    def blocks(self) -> Mapping[str, SplitBlock]:
        """By the names that the program's lifetimes have."""
        ends = self.splits["layer"]
        return {"first": ends.first, **{name: split.layer for name, split in self.splits.items()}, "last": ends.last}

    @property
    def actions(self) -> Mapping[tuple[str, Kind], BlockAction]:
        """F, I, W and B of each block, and R of layers where it is apart."""
        return {
            (name if block == "layer" else block, kind): action
            for name, way in self.program.ways.items()
            for (block, kind), action in block_actions(*_sizes(self.config), *way).items()
        }


def assemble(config: Config, *, poison: bool = False) -> Assembly:
    """Checks a configuration as a whole.

    Raises:
        ConfigError: parts that do not fit; the message names the options.
    """
    check_source(config.data.source)
    config = with_pretrained(config)
    tokenizer = load_tokenizer(config.data.tokenizer or "bytes", chat_template=config.data.chat_template)
    config = _with_vocabulary(config, tokenizer)
    _place(config)
    _check_axes(config)
    _check_batch(config)
    costs = read_costs(config.pipeline.costs, "pipeline.costs")
    found, record = searched(config) if config.pipeline.schedule == "search" else (None, None)
    schedule = _schedule(config, costs, found)
    _check_costs(config, schedule, costs)
    decoder = Decoder(config.model)
    model = pipeline_model(Decoder(config.model, manual_axes(config.mesh.axes.model_dump())))
    spread = config.pipeline.head == "vocab_parallel"
    remat: Remat | Sequence[Remat]
    if config.pipeline.remat == "auto":
        choice = _choose_remat(config, schedule, costs)
        schedule, remat, costs = choice.schedule, choice.remats, choice.costs
    else:
        choice, remat = None, _remat(config)
        _check_remat(config, remat)
        schedule = _with_recompute(config, schedule, costs)
    layers, holders = config.model.layers, decoder.holders
    program = Program(schedule, layers, remat, vocab_parallel=spread, holders=holders, poison=poison)
    splits = {name: cut_blocks(*_sizes(config), *way) for name, way in program.ways.items()}
    traffic = training_traffic(config, program, splits["layer"].x)
    placement = _place(config, traffic)
    return Assembly(
        config, tokenizer, placement, traffic, schedule, costs, decoder, model, program, splits, record, choice
    )


def _with_vocabulary(config: Config, tokenizer: Tokenizer) -> Config:
    asked, have = config.model.vocab_size, tokenizer.vocab_size
    if asked and asked < have:
        raise ConfigError(
            f"model.vocab_size={asked} is below the {have} tokens of data.tokenizer={config.data.tokenizer}; "
            f"set it to {have} or more, or leave it out"
        )
    model: ModelConfig = dataclasses.replace(config.model, vocab_size=asked or have)
    return config.model_copy(update={"model": model})


def topology_of(config: Config) -> Topology:
    """The torus of a configuration.

    Raises:
        ConfigError: there is no such torus, or the mesh axes do not fit on it.
    """
    return _place(config).topology


def _place(config: Config, traffic: Traffic = ()) -> Placement:
    try:
        return place(Topology.parse(config.mesh.topology), config.mesh.axes.model_dump(), traffic)
    except TopologyError as error:
        raise ConfigError(str(error)) from None


def _check_axes(config: Config) -> None:
    axes, model = config.mesh.axes, config.model
    if axes.expert > 1 and model.moe is None:
        raise ConfigError(f"mesh.axes.expert={axes.expert}, but this model has no experts; set mesh.axes.expert=1")
    if axes.context > 1 and axes.context % 2:
        raise ConfigError(
            f"mesh.axes.context={axes.context} is odd, and ring attention pairs the devices that share a sequence; set "
            f"mesh.axes.context={axes.context - 1 if axes.context > 3 else 2} or {axes.context + 1}"
        )
    length, shares = config.data.sequence_length, 2 * axes.context
    if axes.context > 1 and length % shares:
        raise ConfigError(
            f"data.sequence_length={length} is not a multiple of 2 x mesh.axes.context = {shares}, by which sequences "
            f"are divided; set data.sequence_length={length - length % shares or shares}"
        )
    for axis, option, size in (
        # Heads of a pretrained model are as they are: what does not divide is computed whole on every device.
        ("tensor", "model.heads", 0 if model.pretrained else model.heads),
        ("tensor", "model.d_ff", model.d_ff),
        ("tensor", "model.moe.d_ff", model.moe.d_ff if model.moe else 0),
        ("expert", "model.moe.experts", model.moe.experts if model.moe else 0),
        ("fsdp", "model.d_model", model.d_model),
        ("pipe", "model.vocab_size", model.vocab_size if config.pipeline.head == "vocab_parallel" else 0),
    ):
        ways = getattr(axes, axis)
        if size % ways:
            raise ConfigError(
                f"mesh.axes.{axis}={ways} does not divide {option}={size}; use {_divisors(size, ways)}, "
                f"or another {option}"
            )


def _check_costs(config: Config, schedule: Schedule, costs: Costs) -> None:
    try:
        costs.check(schedule.depth, schedule.ranks)
    except ScheduleError as error:
        raise ConfigError(f"pipeline.costs={config.pipeline.costs}: {error}") from None


def _schedule(config: Config, costs: Costs, found: Schedule | None) -> Schedule:
    """The schedule as it is named, with full backwards if it has them; `found` is what a search found."""
    pipeline = config.pipeline
    said = f"pipeline.schedule={pipeline.schedule}"
    try:
        if found is not None:
            schedule = found
        else:
            schedule = _read_csv(config) if pipeline.schedule.startswith("csv:") else _make(config, costs)
        validate(schedule)
    except ScheduleError as error:
        raise ConfigError(f"{said}: {error}") from None
    for option, asked, held in (
        ("mesh.axes.pipe", config.mesh.axes.pipe, schedule.ranks),
        ("pipeline.microbatches", pipeline.microbatches, schedule.microbatches),
        ("pipeline.chunks", pipeline.chunks, schedule.chunks),
    ):
        if asked not in (None, held):
            raise ConfigError(f"{option}={asked}, but {said} is made for {held}; set {option}={held}")
    if schedule.period:
        _check_stream(config)
    return schedule


def _choose_remat(config: Config, schedule: Schedule, costs: Costs) -> RematChoice:
    pipeline, cap = config.pipeline, config.pipeline.activation_bytes
    if recomputing_stages(schedule):
        raise ConfigError(
            f"pipeline.remat=auto places R itself, and pipeline.schedule={pipeline.schedule} has R actions; remove "
            "them, or set pipeline.remat=full, say"
        )
    cut = split_backward(schedule)
    forms = [schedule if pipeline.split_backward is False else cut]
    if pipeline.split_backward is None and cut != schedule:
        forms.append(schedule)
    spread = pipeline.head == "vocab_parallel"
    given = costs if pipeline.costs else None
    space = RematSpace(forms, given, *_sizes(config), tensor=config.mesh.axes.tensor, spread=spread)
    assert cap is not None  # the configuration was checked
    return choose_remat(space, cap, pipeline.activation_memory)


def _with_recompute(config: Config, schedule: Schedule, costs: Costs) -> Schedule:
    """The schedule with its backwards cut, and with R, as the configuration has it."""
    pipeline = config.pipeline
    split = pipeline.remat != "full" if pipeline.split_backward is None else pipeline.split_backward
    schedule = split_backward(schedule) if split else schedule
    apart = pipeline.split_recompute or bool(recomputing_stages(schedule))
    if apart and pipeline.remat == "none":
        said = f"pipeline.schedule={pipeline.schedule} has R actions, but"
        what = "pipeline.split_recompute=true" if pipeline.split_recompute else said
        raise ConfigError(f"{what} finds nothing to recompute with pipeline.remat=none; set pipeline.remat=full, say")
    return add_recompute(schedule, costs if pipeline.costs else _EQUAL) if pipeline.split_recompute else schedule


def _check_stream(config: Config) -> None:
    pipeline = config.pipeline
    for option, value, instead in (
        ("head", pipeline.head, "last_stage" if pipeline.head != "last_stage" else None),
        ("split_recompute", "true", "false" if pipeline.split_recompute else None),
        ("remat", pipeline.remat, "full" if pipeline.remat.startswith(("offload", "auto")) else None),
    ):
        if instead:
            raise ConfigError(
                f"pipeline.{option}={value} needs a schedule that ends with a flush, and {pipeline.schedule} has none; "
                f"set pipeline.{option}={instead}, or another pipeline.schedule"
            )


# Under full remat R is about a forward, and with it apart I and W are too.
_EQUAL = Costs(F=1, R=1, I=1, W=1)


def _make(config: Config, costs: Costs) -> Schedule:
    pipeline = config.pipeline
    family = families.describe(pipeline.schedule)
    try:
        return families.make(
            pipeline.schedule,
            ranks=config.mesh.axes.pipe,
            microbatches=pipeline.microbatches,
            chunks=pipeline.chunks,
            group=pipeline.group,
            costs=costs if family.takes_costs else None,
        )
    except ScheduleError as error:
        option, _, rest = str(error).partition("=")  # it begins with the number that the family cannot have
        if option not in ("ranks", "microbatches", "chunks", "group"):
            raise ConfigError(f"pipeline.costs={pipeline.costs}: {error}") from None
        raise ConfigError(f"{'mesh.axes.pipe' if option == 'ranks' else f'pipeline.{option}'}={rest}") from None


def _read_csv(config: Config) -> Schedule:
    said = f"pipeline.schedule={config.pipeline.schedule}"
    if config.pipeline.group is not None:
        raise ConfigError(f"pipeline.group={config.pipeline.group}, but the order of {said} is given; leave it out")
    path = Path(os.path.expanduser(config.pipeline.schedule.removeprefix("csv:")))
    try:
        return from_csv(path.read_text(encoding="utf-8"), path.name)
    except OSError as error:
        raise ConfigError(f"{said} cannot be read: {error.strerror}; give the path of a CSV file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{said} is not text; give the path of a CSV file, one row a rank") from None


def _check_batch(config: Config) -> None:
    batch, microbatches = config.data.batch_size, config.pipeline.microbatches
    shares = math.prod(getattr(config.mesh.axes, axis) for axis in BATCH_AXES)
    unit = microbatches * shares
    if batch % unit:
        axes = [axis for axis in BATCH_AXES if axis != "expert" or config.mesh.axes.expert > 1]
        named = "".join(f" x mesh.axes.{axis}" for axis in axes)
        spread = f"{named} = {unit}" if shares > 1 else ""
        below = batch - batch % unit
        choices = f"{below} or {below + unit}" if below else str(unit)
        raise ConfigError(
            f"data.batch_size={batch} is not a multiple of pipeline.microbatches={microbatches}{spread}; "
            f"set data.batch_size={choices}, or fewer microbatches"
        )


def _remat(config: Config) -> Remat:
    try:
        return Remat.parse(config.pipeline.remat, SAVEABLE_NAMES)
    except ValueError as error:
        raise ConfigError(f"pipeline.remat={config.pipeline.remat} {error}") from None


def _sizes(config: Config) -> tuple[ModelConfig, int, int]:
    """The model, and one device's share of a microbatch: sequences and their length."""
    shares = config.pipeline.microbatches * math.prod(getattr(config.mesh.axes, axis) for axis in BATCH_AXES)
    return config.model, config.data.batch_size // shares, config.data.sequence_length // config.mesh.axes.context


def _check_remat(config: Config, remat: Remat) -> None:
    """A policy that changes nothing would be a mistake that nobody sees."""
    if not remat.names:
        return
    idle = [name for name in remat.names if name not in _kept(config, remat)]
    if idle:
        others = Remat("names", tuple(name for name in SAVEABLE_NAMES if name not in idle))
        kept = _kept(config, others)
        useful = [name for name in others.names if name in kept]
        raise ConfigError(
            f"pipeline.remat={remat} has no effect for {', '.join(idle)}: the backward does not read "
            f"{'it' if len(idle) == 1 else 'them'}; use {', '.join(useful)}"
        )


def _kept(config: Config, remat: Remat) -> set[str]:
    decoder = Decoder(config.model)
    signatures = {decoder.signature(layer) for layer in range(config.model.layers)}
    cuts = [cut_blocks(*_sizes(config), remat, parts=parts) for parts in signatures]
    return {crossing.name for cut in cuts for crossing in cut.layer.residuals}


def _divisors(size: int, near: int) -> str:
    divisors = sorted((d for d in range(1, size + 1) if size % d == 0), key=lambda d: (abs(d - near), d))[:2]
    return " or ".join(str(d) for d in sorted(divisors))

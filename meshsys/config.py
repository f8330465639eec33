"""The configuration: YAML files and `section.key=value` overrides, checked into one frozen record.

Values are never converted between kinds: `layers: "4"`, `layers: 4.0` and `layers: true` are errors.
Whether a mesh fits its devices, or a schedule its stages, is for `meshsys.planner` to say.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler, field_validator, model_validator
from pydantic_core import CoreSchema

from meshsys import yaml_core
from meshsys.config_file import INT32_MAX, Count, Label, Section, Text, Torus, load, show_value
from meshsys.rl.config import RlConfig
from models.config import ModelConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "MeshAxes",
    "MeshConfig",
    "PipelineConfig",
    "RunConfig",
    "SearchConfig",
    "TrainConfig",
    "load_config",
    "to_yaml",
]

_LARGEST = 1e30  # float32 holds it, and its products with small numbers
_LARGEST_SIZE = 2**50  # bytes; no device has so many
_UNITS = {f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGT", 1)}


def _is_a_size(size: Any) -> Any:
    if size is not None:
        _bytes_of(size)
    return size


def _bytes_of(size: Any) -> int:
    """Reads a number of bytes, or one with a binary unit."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?) ?([KMGT]iB)", size) if isinstance(size, str) else None
    value = round(float(found[1]) * _UNITS[found[2]]) if found else size
    if type(value) is not int:
        raise ValueError("is not a size; write bytes, as in 536870912, or 512MiB or 1.5GiB")
    if not 1 <= value <= _LARGEST_SIZE:
        raise ValueError(f"is not a size; use 1 byte to {_LARGEST_SIZE // _UNITS['TiB']}TiB")
    return value


class _FromMapping:
    """Lets a strict model build its dataclass field from mappings; the dataclasses' own fields stay strict."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _open_dataclasses(schema, handler)
        return schema


def _open_dataclasses(schema: Any, handler: GetCoreSchemaHandler) -> None:
    """Lets every dataclass and tuple within a schema be built from YAML's mappings and lists."""
    if isinstance(schema, dict):
        if schema.get("type") == "definition-ref":
            schema = cast(dict[str, Any], handler.resolve_ref_schema(cast(CoreSchema, schema)))
        if schema.get("type") in ("dataclass", "tuple"):
            schema["strict"] = False
        for part in list(schema.values()):
            _open_dataclasses(part, handler)
    elif isinstance(schema, list):
        for part in schema:
            _open_dataclasses(part, handler)


class RunConfig(Section):
    """Where a run lives, and its randomness.

    Attributes:
        name: the run's name, a valid folder name.
        dir: folder of checkpoints, metrics and report; null means `runs/NAME`. See `Config.run_dir`.
        seed: of parameters, dropout and data order.
    """

    name: Label
    dir: Text | None = None
    seed: int = Field(default=0, ge=0, le=INT32_MAX)

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name):
            raise ValueError(
                "is not a folder name; use letters, digits, `.`, `_` and `-` (100 at most, the first no `.` or `-`)"
            )
        return name


class DataConfig(Section):
    """What the model reads.

    Attributes:
        source: `python_docs` for the text that every Python carries, or a file, a folder or a glob
            (.txt, .md, .py, .rst, .jsonl).
        format: of the documents: `text`, or `chat`, JSONL with messages, of which the assistant's are learned.
        text_field: the field that holds the text in JSONL.
        too_long: whether a conversation that a row is too short for is cut (`truncate`), left out (`drop`) or an
            `error`.
        tokenizer: `bytes`, or a Hugging Face `tokenizer.json`, or a SentencePiece `*.model`, or a GGUF file; null means
            that of `model.pretrained`, or `bytes` without one.
        chat_template: a file of Jinja source, in place of the tokenizer's own template.
        sequence_length: tokens in a sequence, inputs and targets overlapping by all but one.
        batch_size: sequences in a step, over all devices.
    """

    source: Text = "python_docs"
    format: Literal["text", "chat"] = "text"
    text_field: Text = "text"
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    tokenizer: Text | None = None
    chat_template: Text | None = None
    sequence_length: int = Field(default=128, ge=2, le=INT32_MAX)
    batch_size: Count = 16


class MeshAxes(Section):
    """Devices along each mesh axis.

    Attributes:
        pipe: ranks of the pipeline.
        data: copies of the model, each with its share of the batch.
        fsdp: devices that share the batch, and the parameters and the optimizer state too.
        tensor: devices that share each layer's matrices.
        expert: devices that share the experts of a mixture.
        context: devices that share each sequence.
    """

    pipe: Count = 1
    data: Count = 1
    fsdp: Count = 1
    tensor: Count = 1
    expert: Count = 1
    context: Count = 1


class MeshConfig(Section):
    """The devices and how the axes use them.

    Attributes:
        topology: the torus, as in `8`, `2x2x2` or, with its generation, `v5p:4x4x4`.
        axes: sizes of the mesh axes; a product below the torus's takes a sub-slice of it.
    """

    topology: Torus = "1"
    axes: MeshAxes = Field(default_factory=MeshAxes)


class SearchConfig(Section):
    """What `pipeline.schedule: search` looks for: the schedule that takes the least lock-step time at
    `pipeline.costs`.

    Attributes:
        memory_cap: the most microbatch activations that a rank may hold; null means as many as ranks, as for 1f1b.
        seconds: the effort, in seconds of a slow core; counted, so that the result does not depend on the machine.
    """

    memory_cap: float | None = Field(default=None, ge=1, le=_LARGEST)
    seconds: float = Field(default=30.0, gt=0, le=1e6)


class PipelineConfig(Section):
    """How a step is cut into stages and microbatches.

    Attributes:
        schedule: a family's name (`meshsys schedule list`), `csv:PATH`, or `search`.
        microbatches: parts of each data-parallel share of the batch, run one after another.
        chunks: stages on a rank; null means the family's own.
        group: microbatches in a group, for kfkb; null means the family's own.
        costs: times of actions and transfers, as `F=1,I=1.3,W=0.7` or a cost file of `meshsys schedule measure`, for
            schedules that are made for them and for predictions; null takes F, I and W to last equally long.
        remat: what a forward keeps for its backward: `none` (recompute nothing), `full` (recompute all), `dots`,
            `names:a,b` (keep only these), or `offload:a,b` (keep these in host memory); `auto` chooses for each stage,
            within `activation_memory`.
        activation_memory: for `remat: auto`, the most bytes of slots on a device, a number or as in `512MiB`.
        split_backward: run input and weight gradients as two actions, I and W; null means yes except under
            `remat: full`, where what I recomputes would wait for W.
        split_recompute: recompute in an action of its own, R, which runs where its rank would wait.
        head: whether the first stage runs the embedding and the `last_stage` the output layer, or every rank of the
            pipeline runs its part of both for each microbatch (`vocab_parallel`).
        fsdp_gather: gather `fsdp`-sharded weights once a `step` or once a `tick`.
        search: what `schedule: search` looks for.
    """

    schedule: Text = "1f1b"
    microbatches: Count = 1
    chunks: Count | None = None
    group: Count | None = None
    costs: Text | None = None
    remat: str = "none"
    activation_memory: Annotated[int | str | None, BeforeValidator(_is_a_size)] = None
    split_backward: bool | None = None
    split_recompute: bool = False
    head: Literal["last_stage", "vocab_parallel"] = "last_stage"
    fsdp_gather: Literal["step", "tick"] = "step"
    search: SearchConfig = Field(default_factory=SearchConfig)

    @field_validator("remat")
    @classmethod
    def _is_a_policy(cls, remat: str) -> str:
        if not re.fullmatch(r"none|full|dots|auto|(names|offload):[A-Za-z_][\w.]*(,[A-Za-z_][\w.]*)*", remat):
            raise ValueError("is not a policy; use none, full, dots, names:a,b, offload:a,b or auto")
        return remat

    @model_validator(mode="after")
    def _auto_has_a_cap(self) -> Self:
        cap = self.activation_memory
        if self.remat == "auto" and cap is None:
            raise ValueError(
                "pipeline.remat=auto chooses within pipeline.activation_memory, which is missing; set it to the bytes "
                "that a device has for activations, as in 512MiB"
            )
        if self.remat != "auto" and cap is not None:
            raise ValueError(
                f"pipeline.activation_memory={show_value(cap)} is for pipeline.remat=auto, and "
                f"pipeline.remat={self.remat} takes what it takes; leave it out, or set pipeline.remat=auto"
            )
        if self.remat == "auto" and self.split_recompute:
            raise ValueError(
                "pipeline.split_recompute=true is what pipeline.remat=auto decides for each stage; leave it out"
            )
        return self

    @property
    def activation_bytes(self) -> int | None:
        """`activation_memory` as a number."""
        return None if self.activation_memory is None else _bytes_of(self.activation_memory)


class TrainConfig(Section):
    """The optimizer's run.

    Attributes:
        steps: optimizer steps in the whole run, resumed parts included.
        learning_rate: the peak, after warm-up.
        warmup_steps: steps of linear warm-up from 0; a run of fewer steps ends within it.
        weight_decay: AdamW's, decoupled.
        gradient_clip: largest global norm of the gradient; 0 turns clipping off.
        final_learning_rate_fraction: where the cosine ends, as a fraction of the peak.
        skip_nonfinite: skip a step whose loss or gradient is not finite, instead of stopping there.
    """

    steps: Count = 100
    learning_rate: float = Field(default=3e-4, gt=0, le=_LARGEST)
    warmup_steps: int = Field(default=0, ge=0, le=INT32_MAX)
    weight_decay: float = Field(default=0.1, ge=0, le=_LARGEST)
    gradient_clip: float = Field(default=1.0, ge=0, le=_LARGEST)
    final_learning_rate_fraction: float = Field(default=0.1, ge=0, le=1)
    skip_nonfinite: bool = False


class CheckpointConfig(Section):
    """When the state is saved.

    Attributes:
        every: steps between checkpoints; 0 saves at the end only.
        keep: checkpoints that stay on disk.
    """

    every: int = Field(default=0, ge=0, le=INT32_MAX)
    keep: Count = 3


class Config(Section):
    """One run: every option, resolved and checked.

    `ModelConfig` is `models.config`'s; `rl` is for `meshsys rl`, and `meshsys.rl.config`'s.
    """

    run: RunConfig
    model: Annotated[ModelConfig, _FromMapping()] = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    rl: RlConfig | None = None

    @model_validator(mode="after")
    def _value_heads_are_not_asked_for(self) -> Self:
        if self.model.value_head:
            raise ValueError(
                "model.value_head=true is what `meshsys rl` sets where rl.algorithm.name=ppo needs it; leave it out"
            )
        return self

    @property
    def run_dir(self) -> Path:
        """The run's folder: `run.dir`, or `runs/NAME`; relative to the working directory."""
        return Path(os.path.expanduser(self.run.dir)) if self.run.dir is not None else Path("runs", self.run.name)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file and applies `section.key=value` overrides, whose values are YAML too.

    Raises:
        ConfigError: the first problem, in one line, with the nearest valid name or the valid choices.
    """
    return load(Config, path, overrides, example="train.steps=100")


def to_yaml(config: Config) -> str:
    """The resolved configuration; `load_config` reads it back to an equal one."""
    return yaml_core.dump(config.model_dump())

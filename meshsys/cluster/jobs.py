"""What `meshsys cluster run` reads: the torus of this machine, and jobs for it.

A job is a training configuration, or any command. All is checked before anything is written or started.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from meshsys.cluster import policies
from meshsys.cluster.export.options import ExportConfig
from meshsys.cluster.pod import Pod
from meshsys.cluster.policies import Policy
from meshsys.cluster.store import JobSpec
from meshsys.config import MeshAxes, load_config, to_yaml
from meshsys.config_file import FromList, Label, Section, Text, load, one_of
from meshsys.errors import ConfigError
from meshsys.torus import Topology, TopologyError
from meshsys.torus.shapes import TWISTED, read_shape, shape_text

__all__ = ["ExecutorConfig", "JobConfig", "JobsConfig", "Orders", "check_training", "load_jobs", "read_orders"]

_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}"
QUEUES = ("fcfs", "backfill", "easy")


class ExecutorConfig(Section):
    """The torus of devices of this machine.

    Attributes:
        topology: as in `2x2x2` or `v5e:2x4`.
        cube: side of the cubes that optical switches join; null for a static torus.
        wiring: which ports a switch can join: `same_position` of opposite faces, or `any`.
        policy: which free chips a job gets: a policy's name, or `module:Class`.
        queue: `fcfs`: the first that waits holds up all behind it; `backfill`: what fits starts; `easy`: what fits
            starts on chips that the first will not need.
        state: the folder of the queue, of logs, and of what survives the manager.
        devices: `cpu` for fake devices, `tpu`, or `auto` for what this machine has.
        grace_seconds: that a job has to save and end, before it is killed.
    """

    topology: Label = "2x2x2"
    cube: Annotated[int, Field(ge=1)] | None = None
    wiring: Literal["same_position", "any"] = "same_position"
    policy: Text = "best"
    queue: str = "easy"
    state: Text = "runs/cluster"
    devices: Literal["auto", "cpu", "tpu"] = "auto"
    grace_seconds: float = Field(default=120.0, ge=0, le=86400)

    @field_validator("queue")
    @classmethod
    def _is_a_queue(cls, queue: str) -> str:
        return one_of(QUEUES, queue, "queue")


class JobConfig(Section):
    """One job.

    Attributes:
        name: by default the configuration's `run.name`; its run goes to `runs/NAME` unless `run.dir` is set.
        config: the file of a training configuration.
        overrides: of the configuration, as in [train.steps=100].
        axes: sizes of the mesh axes, in place of the configuration's.
        command: a program and its arguments, in place of `config`; it finds its slice in the environment.
        shape: of the slice, in chips, as in `2x2`; by default that of the axes if these are given, else the
            configuration's mesh.topology.
        priority: the higher goes first.
        retries: how often it starts again after it crashed.
        dir: the folder in which a command writes `metrics.jsonl`, by default `runs/NAME`.
        steps: that a command takes, for its progress; 0 if that is not known.
    """

    name: Label | None = None
    config: Text | None = None
    overrides: Annotated[tuple[Text, ...], FromList] = ()
    axes: MeshAxes = Field(default_factory=MeshAxes)
    command: Annotated[tuple[Text, ...], FromList] | None = None
    shape: Label | None = None
    priority: int = Field(default=0, ge=-(2**31), le=2**31 - 1)
    retries: int = Field(default=3, ge=0, le=1_000_000)
    dir: Text | None = None
    steps: int = Field(default=0, ge=0, le=2**31 - 1)

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(_NAME, name):
            raise ValueError(
                "is not a job's name; use letters, digits, `.`, `_` and `-` (100 at most, the first no `.` or `-`)"
            )
        return name

    @field_validator("shape")
    @classmethod
    def _is_a_shape(cls, shape: str | None) -> str | None:
        if shape is not None and read_shape(shape) is None:
            raise ValueError("is not a shape; write up to 6 sizes of at least 1, as in 2x2")
        return shape

    @property
    def sides(self) -> tuple[int, ...] | None:
        """`shape` as numbers."""
        return None if self.shape is None else read_shape(self.shape)


class JobsConfig(Section):
    """Jobs and the torus that they share.

    Attributes:
        cluster: the torus.
        jobs: in the order of submission.
        export: for `meshsys cluster export` alone.
    """

    cluster: ExecutorConfig = Field(default_factory=ExecutorConfig)
    export: ExportConfig = Field(default_factory=ExportConfig)
    jobs: Annotated[tuple[JobConfig, ...], FromList, Field(min_length=1)]


class Orders:
    """A checked file of jobs.

    Attributes:
        cluster: the torus.
        pod: the same, empty.
        policy: which places jobs.
        specs: the jobs, in the order of the file.
        export: the cluster that they may be exported to.
    """

    def __init__(self, cluster: ExecutorConfig, specs: Sequence[JobSpec] = (), export: ExportConfig | None = None):
        self.cluster = cluster
        self.export = export or ExportConfig()
        self.specs = tuple(specs)
        try:
            topology = Topology.parse(cluster.topology, "cluster.topology")
        except TopologyError as error:
            raise ConfigError(str(error)) from None
        self.pod = Pod(topology, cluster.cube, cluster.wiring, options="cluster.")
        self.policy: Policy = policies.get(cluster.policy, "cluster.policy")

    @property
    def torus(self) -> str:
        """What may not change while jobs are there, in JSON."""
        kept = ("topology", "cube", "wiring")
        return json.dumps({name: getattr(self.cluster, name) for name in kept})


def load_jobs(path: str | Path, overrides: Sequence[str] = ()) -> JobsConfig:
    """Reads a YAML file and applies overrides, as in `cluster.policy=best` and `jobs.0.priority=1`.

    Raises:
        ConfigError: the first problem, in one line, with the nearest valid name or the valid choices.
    """
    return load(JobsConfig, path, overrides, example="cluster.topology=2x2x2")


def read_orders(path: str | Path, overrides: Sequence[str] = ()) -> Orders:
    """Reads a file of jobs, and the configurations that it names, and checks that each has a place on the torus.

    Raises:
        ConfigError: the first problem, in one line.
    """
    raw = load_jobs(path, overrides)
    empty = Orders(raw.cluster)
    specs: list[JobSpec] = []
    for place, job in enumerate(raw.jobs):
        said = f"jobs.{place}" + (f" ({job.name})" if job.name else "")
        spec = _spec(job, said, empty.pod)
        for other in specs:
            if other.name == spec.name:
                raise ConfigError(f"jobs.{place}.name={spec.name} is there twice; give each job a name of its own")
            if other.run_dir == spec.run_dir:
                raise ConfigError(f"{said}: its folder {spec.run_dir} is that of {other.name}; set another run.dir")
        if not empty.policy.possible(empty.pod, spec.shape):
            raise ConfigError(
                f"{said}: shape={shape_text(spec.shape)} has no place on cluster.topology={raw.cluster.topology} with "
                f"cluster.policy={raw.cluster.policy}, even if all is free; use another shape or policy"
            )
        specs.append(spec)
    return Orders(raw.cluster, specs, raw.export)


def check_training(spec: JobSpec) -> None:
    """Refuses a training job that would refuse to start; touches no device.

    Raises:
        ConfigError: what its run would say.
    """
    import jax

    from meshsys.assemble import assemble
    from meshsys.config import Config
    from meshsys.yaml_core import load as load_yaml

    # Its chips are for jobs: the manager must not take them, as tracing would.
    jax.config.update("jax_platforms", "cpu")
    config = Config.model_validate(load_yaml(spec.config))
    if config.pipeline.schedule == "search":
        return  # that takes the job's own time
    try:
        assemble(config)
    except ConfigError as error:
        raise ConfigError(f"job {spec.name}: {error}") from None


def _spec(job: JobConfig, said: str, pod: Pod) -> JobSpec:
    if (job.config is None) == (job.command is None):
        both = "has both config and command" if job.config is not None else "has neither config nor command"
        raise ConfigError(f"{said} {both}; give a training configuration, or the program of another kind of job")
    make = _command if job.command is not None else _training
    return make(job, said, pod)


def _command(job: JobConfig, said: str, pod: Pod) -> JobSpec:
    given = sorted(job.model_fields_set & {"overrides", "axes"})
    if given:
        raise ConfigError(f"{said}: {given[0]} is for training configurations; remove it, or set config")
    if job.name is None or job.sides is None or not job.command:
        missing = "name" if job.name is None else "shape" if job.sides is None else "command"
        raise ConfigError(f"{said}: {missing} is missing or empty; a job with a command needs it")
    return JobSpec(
        name=job.name,
        shape=_fits(job.sides, said, pod),
        command=job.command,
        config="",
        folder=os.getcwd(),
        run_dir=os.path.abspath(os.path.expanduser(job.dir or f"runs/{job.name}")),
        steps=job.steps,
        priority=job.priority,
        retries=job.retries,
    )


def _training(job: JobConfig, said: str, pod: Pod) -> JobSpec:
    for name in ("dir", "steps"):
        if name in job.model_fields_set:
            other = "run.dir" if name == "dir" else "train.steps"
            raise ConfigError(f"{said}: {name} is for commands; write overrides: [{other}={getattr(job, name)}]")
    assert job.config is not None
    own = [] if job.name is None else [f"run.name={job.name}"]
    try:
        config = load_config(job.config, [*job.overrides, *own])
    except ConfigError as error:
        raise ConfigError(f"{said}: {error}") from None
    mesh = config.mesh
    if "axes" in job.model_fields_set:
        mesh = mesh.model_copy(update={"axes": job.axes})
    sizes = mesh.axes.model_dump()
    if job.sides is not None:
        shape = job.sides
    elif "axes" in job.model_fields_set:
        shape = tuple(size for size in sizes.values() if size > 1) or (1,)
    else:
        shape = _configured(mesh.topology, said)
    shape = _fits(shape, said, pod)
    devices, used = math.prod(shape) * pod.topology.cores, math.prod(sizes.values())
    if used != devices:
        axes = ", ".join(f"mesh.axes.{name}={size}" for name, size in sizes.items() if size > 1) or "mesh.axes of 1"
        raise ConfigError(
            f"{said}: {axes} use {used} device{'s' * (used != 1)}, but shape={shape_text(shape)} has {devices}; set "
            f"axes whose product is {devices}, or a shape of {used}"
        )
    run_dir = config.run_dir.absolute()
    run = config.run.model_copy(update={"dir": str(run_dir)})
    mesh = mesh.model_copy(update={"topology": shape_text(shape)})
    return JobSpec(
        name=config.run.name,
        shape=shape,
        command=(),
        config=to_yaml(config.model_copy(update={"run": run, "mesh": mesh})),
        folder=os.getcwd(),
        run_dir=os.path.normpath(run_dir),
        steps=config.train.steps,
        priority=job.priority,
        retries=job.retries,
    )


def _configured(topology: str, said: str) -> tuple[int, ...]:
    try:
        found = Topology.parse(topology)
    except TopologyError as error:
        raise ConfigError(f"{said}: {error}") from None
    if found.twisted:
        raise ConfigError(f"{said}: mesh.topology={found} is twisted, and jobs get plain slices; leave out {TWISTED}")
    return found.shape


def _fits(shape: tuple[int, ...], said: str, pod: Pod) -> tuple[int, ...]:
    """Without needless dimensions of length 1."""
    if math.prod(shape) > pod.size:
        raise ConfigError(
            f"{said}: shape={shape_text(shape)} has {math.prod(shape)} chips, but cluster.topology={pod.topology} has "
            f"{pod.size}; use a smaller shape, or another topology"
        )
    return tuple(side for side in shape if side > 1) or (1,)

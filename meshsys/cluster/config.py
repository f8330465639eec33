"""What `meshsys cluster simulate` reads: a cluster, a workload, and the policies that are compared on them.

Times have their unit in their name. Whether a placement policy or a file exists is asked by whoever opens it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from meshsys.cluster.queues import QUEUES
from meshsys.config_file import INT32_MAX, Count, FromList, Label, Section, Text, Torus, load, one_of

__all__ = [
    "ClusterConfig",
    "ElasticConfig",
    "FailuresConfig",
    "MigrationConfig",
    "PolicyConfig",
    "SimulationConfig",
    "WorkloadConfig",
    "load_simulation",
]

_LONGEST = 1e9  # hours; far above any trace
_BACKFILL_WINDOW = 30

Hours = Annotated[float, Field(gt=0, le=_LONGEST)]
Seconds = Annotated[float, Field(ge=0, le=3600 * _LONGEST)]
Seed = Annotated[int, Field(ge=0, le=INT32_MAX)]


class FailuresConfig(Section):
    """Chips that fail.

    Attributes:
        mtbf_hours: mean time between failures of one chip, exponential; null means that none fails.
        repair_hours: until a failed chip is back.
        checkpoint_minutes: between checkpoints; what came after the last one is lost with a chip. 0 loses nothing.
        restart_minutes: that a job which lost a chip takes to start again.
        failed: coordinates of chips that are out of use from beginning to end, as in [[1, 0, 1]].
        seed: which chips fail, and when.
    """

    mtbf_hours: Hours | None = None
    repair_hours: Hours = 24.0
    checkpoint_minutes: float = Field(default=30.0, ge=0, le=_LONGEST)
    restart_minutes: float = Field(default=5.0, ge=0, le=_LONGEST)
    failed: Annotated[tuple[tuple[int, ...], ...], FromList] = ()
    seed: Seed = 0


class ClusterConfig(Section):
    """The pod.

    Attributes:
        topology: the torus, as in `16x16x16` or `v5p:8x8x8`.
        cube: side of the cubes that optical switches join; null for a static torus.
        wiring: which ports a switch can join: `same_position` of opposite faces, or `any`.
        shared_links: let traffic of several jobs use one link.
        reconfigure_seconds: until the switches have joined the cubes of a job that has more than one.
        communication: the part of a job's time that goes to collectives where each logical neighbour is a link away
            and every dimension is a ring. It grows with the dilation and where rings are open; 0 makes all
            placements equally fast.
        failures: chips that fail.
    """

    topology: Torus = "16x16x16"
    cube: Count | None = None
    wiring: Literal["same_position", "any"] = "same_position"
    shared_links: bool = False
    reconfigure_seconds: Seconds = 0.0
    communication: float = Field(default=0.0, ge=0, le=1)
    failures: FailuresConfig = Field(default_factory=FailuresConfig)


class ElasticConfig(Section):
    """Jobs that can run on fewer or more chips than they asked for.

    Attributes:
        share: of the jobs.
        least: the fewest chips, as a part of what the job asked for.
        most: the most chips, as a multiple of it.
        efficiency: n times the chips are n to the power of this as fast.
        restart_minutes: that a change of size takes.
    """

    share: float = Field(default=0.0, ge=0, le=1)
    least: float = Field(default=0.5, gt=0, le=1)
    most: float = Field(default=1.0, ge=1, le=64)
    efficiency: float = Field(default=0.9, gt=0, le=1)
    restart_minutes: float = Field(default=5.0, ge=0, le=_LONGEST)


class WorkloadConfig(Section):
    """The jobs.

    Attributes:
        generator: `rfold` for the synthetic mix of RFold's simulator, `tpu_v4` for the slices of the TPU v4 paper's
            Table 2, `trace` for a file.
        path: the trace file.
        format: of the trace: `philly` (the file of RFold's repository; sizes become compact shapes), `gavel`, or
            `rfold` (shapes as they are there); null takes what its first line looks like.
        mix: for `tpu_v4`: a CSV of shapes and probabilities instead of the built-in one.
        jobs: how many; null takes 1,000, or all that the trace has.
        load: chip-hours that arrive over chip-hours that pass; `saturated` keeps `backlog` jobs waiting all the time;
            null takes a trace's own arrivals, or 0.4.
        backlog: jobs that wait where the load is `saturated`.
        durations: `philly` for the quantiles of the Philly trace, or a trace of the `rfold` format to draw from.
        longest_hours: durations above it are cut to it.
        seed: of shapes, durations, arrivals, and which jobs are elastic.
        elastic: jobs that may change their size.
    """

    generator: Literal["rfold", "tpu_v4", "trace"] = "rfold"
    path: Text | None = None
    format: Literal["philly", "gavel", "rfold"] | None = None
    mix: Text | None = None
    jobs: int | None = Field(default=None, ge=1, le=10_000_000)
    load: Annotated[float, Field(gt=0, le=1000)] | Literal["saturated"] | None = None
    backlog: Count = 64
    durations: Text = "philly"
    longest_hours: Hours | None = None
    seed: Seed = 0
    elastic: ElasticConfig = Field(default_factory=ElasticConfig)

    @field_validator("load", mode="before")
    @classmethod
    def _is_a_load(cls, load: Any) -> Any:
        number = isinstance(load, (int, float)) and not isinstance(load, bool) and 0 < load <= 1000
        if load is not None and load != "saturated" and not number:
            raise ValueError("is no load; write a number above 0, as in 0.4, or saturated")
        return float(load) if number else load

    @model_validator(mode="after")
    def _has_its_file(self) -> WorkloadConfig:
        if self.generator == "trace" and self.path is None:
            raise ValueError("workload.path is missing; give the trace file, or set workload.generator=rfold")
        if self.generator != "trace" and self.path is not None:
            raise ValueError(
                f"workload.path={self.path} is for generator: trace; set workload.generator=trace, or remove it"
            )
        if self.generator != "tpu_v4" and self.mix is not None:
            raise ValueError(
                f"workload.mix={self.mix} is for generator: tpu_v4; set workload.generator=tpu_v4, or remove it"
            )
        return self


class MigrationConfig(Section):
    """Running jobs that move to make room.

    Attributes:
        jobs: the most that move for one waiting job; 0 moves none.
        minutes: that a moved job stands still.
        every_minutes: a job that moved stays for so long at least.
        wait_minutes: a job waits so long before others move for it.
    """

    jobs: int = Field(default=0, ge=0, le=INT32_MAX)
    minutes: float = Field(default=5.0, ge=0, le=_LONGEST)
    every_minutes: float = Field(default=60.0, ge=0, le=_LONGEST)
    wait_minutes: float = Field(default=0.0, ge=0, le=_LONGEST)


class PolicyConfig(Section):
    """One way to place jobs and to order them.

    Attributes:
        placement: a name of `meshsys cluster policies`, or `module:Class`.
        queue: which waiting job is next: `fcfs`, `backfill`, `easy`, `srtf`, `slaq`, `fair`.
        name: in tables; null means PLACEMENT + QUEUE.
        window: jobs behind the first that may overtake it, for backfill and easy, or be considered at once, for srtf,
            slaq and fair; null means 30 for backfill, under which the first job may starve, and all for the others.
        order: which of them goes first, for backfill and easy: by `arrival`, or the `shortest` or `largest` one.
        interrupt: for easy: the first waiting job may stop running ones for at most this part of the time that they
            have run; they come back to their chips when it ends. 0 stops none.
        preempt: stop running jobs for waiting ones, for srtf, slaq and fair.
        preempt_minutes: that a stopped job takes to start again.
        quantum_minutes: a job that started runs so long before it is stopped.
        migration: running jobs that move to make room.
    """

    placement: Text
    queue: str = "fcfs"
    name: Label | None = None
    window: Count | None = None
    order: Literal["arrival", "shortest", "largest"] = "arrival"
    interrupt: float = Field(default=0.05, ge=0, le=1)
    preempt: bool = True
    preempt_minutes: float = Field(default=5.0, ge=0, le=_LONGEST)
    quantum_minutes: float = Field(default=30.0, ge=0, le=_LONGEST)
    migration: MigrationConfig = Field(default_factory=MigrationConfig)

    @field_validator("queue")
    @classmethod
    def _is_a_queue(cls, queue: str) -> str:
        return one_of(QUEUES, queue, "queue")

    @property
    def reach(self) -> int | None:
        """Jobs in the window; None for all."""
        return _BACKFILL_WINDOW if self.window is None and self.queue == "backfill" else self.window

    @property
    def label(self) -> str:
        return f"{self.placement} + {self.queue}" if self.name is None else self.name


class SimulationConfig(Section):
    """A cluster, a workload, and the policies that are compared on them."""

    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    workload: WorkloadConfig = Field(default_factory=WorkloadConfig)
    policies: Annotated[tuple[PolicyConfig, ...], FromList, Field(min_length=1)]


def load_simulation(path: str | Path, overrides: Sequence[str] = ()) -> SimulationConfig:
    """Reads a YAML file and applies overrides, as in `workload.load=0.4` and `policies.0.queue=easy`.

    Raises:
        ConfigError: the first problem, in one line, with the nearest valid name or the valid choices.
    """
    return load(SimulationConfig, path, overrides, example="workload.load=0.4")

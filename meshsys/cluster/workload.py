"""The jobs of a simulation: drawn from a mix of shapes and durations, or read from a trace.

`rfold` is the synthetic mix of RFold's simulator (Chen et al., arXiv 2510.03891; `MixedWorkload` of shuoshuc/RFold):
sizes 1, 2 and every even one up to the pod's, drawn by a truncated exponential over their order; of each size all
1-D (up to 256 chips), 2-D and 3-D shapes with even sides that the pod's cubes could hold, the number of dimensions
drawn by size. `tpu_v4` is Table 2 of the TPU v4 paper (Jouppi et al., ISCA'23): the slices of its production jobs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster.config import ClusterConfig, WorkloadConfig
from meshsys.cluster.traces import Shape, compact_shape, read_durations, read_mix, read_trace
from meshsys.errors import ConfigError
from meshsys.torus import Topology

__all__ = ["Workload", "make_workload", "rfold_shapes", "tpu_v4_mix"]

_JOBS = 1000
_LOAD = 0.4


@dataclass(frozen=True, eq=False)
class Workload:
    """Jobs in the order of arrival; job i is row i of every array.

    Attributes:
        arrival: float64 seconds; all 0 where `backlog` says when jobs come.
        duration: float64 seconds on the chips that the job asks for.
        shape: int64 index into `shapes`.
        shapes: the shapes that occur, each once.
        elastic: whether the job may run on fewer or more chips.
        backlog: jobs that wait all the time, the next one coming when one of them starts; None for arrivals.
    """

    arrival: NDArray[np.float64]
    duration: NDArray[np.float64]
    shape: NDArray[np.int64]
    shapes: tuple[Shape, ...]
    elastic: NDArray[np.bool_]
    backlog: int | None = None

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def size(self) -> NDArray[np.int64]:
        """Chips of each job."""
        return np.array([math.prod(shape) for shape in self.shapes], np.int64)[self.shape]

    def load(self, chips: int) -> float:
        """Chip-seconds of work over those that pass until the last arrival."""
        span = float(self.arrival[-1]) * chips
        return float((self.size * self.duration).sum()) / span if span else math.inf


def make_workload(config: WorkloadConfig, cluster: ClusterConfig) -> Workload:
    """The jobs of a configuration; the same ones for the same configuration.

    Raises:
        ConfigError: a file that cannot be read or is broken, or a topology that the generator has no shapes for.
    """
    topology = Topology.parse(cluster.topology)
    chips, dims = math.prod(topology.shape), len(topology.shape)
    random = np.random.default_rng(config.seed)
    if config.generator == "trace":
        assert config.path is not None  # the configuration sees to it
        traced = read_trace(config.path, config.format, "workload.path")[: config.jobs]
        compact = {job.size: compact_shape(job.size, dims) for job in traced}
        drawn = [compact[job.size] if job.shape is None else job.shape for job in traced]
        duration = np.array([job.duration for job in traced])
        arrival = np.array([job.arrival for job in traced])
    else:
        count = config.jobs or _JOBS
        if config.generator == "rfold":
            drawn = _draw_rfold(random, count, topology.shape, cluster.cube or 4)
        else:
            mix = tpu_v4_mix() if config.mix is None else read_mix(config.mix, "workload.mix")
            drawn = _draw_mix(random, count, mix, dims)
        duration = _draw_durations(random, count, config.durations)
        arrival = np.zeros(0)
    if config.longest_hours is not None:
        duration = np.minimum(duration, 3600 * config.longest_hours)
    shapes = tuple(sorted(set(drawn)))
    index = {shape: place for place, shape in enumerate(shapes)}
    shape = np.array([index[each] for each in drawn], np.int64)
    work = sum(math.prod(each) * seconds for each, seconds in zip(drawn, duration.tolist(), strict=True))
    backlog = None
    if config.load == "saturated":
        arrival, backlog = np.zeros(len(drawn)), config.backlog
    elif not len(arrival):
        arrival = np.cumsum(random.exponential(size=len(drawn)))
        arrival *= work / (chips * (config.load or _LOAD)) / arrival[-1]
    elif config.load is not None and arrival[-1] > 0:
        arrival = arrival * (work / (chips * config.load) / arrival[-1])
    elastic = random.random(len(drawn)) < config.elastic.share
    return Workload(arrival, duration, shape, shapes, elastic, backlog)


# RFold's mix

_LONGEST_LINE = 256
_SKEW = 4.0
# Up to each size, how often a shape has 1, 2 and 3 dimensions.
_DIMENSIONS = ((256, (0.8, 0.2, 0.0)), (1024, (0.0, 0.8, 0.2)), (math.inf, (0.0, 0.2, 0.8)))


def rfold_shapes(chips: int, dims: int, cube: int) -> dict[int, list[list[Shape]]]:
    """For each size its shapes of 1, 2 and 3 dimensions; sizes ascend, those without a shape are left out."""
    cubes = chips // cube**dims
    longest = cubes * cube

    def fits(shape: Shape) -> bool:
        return max(shape) <= longest and math.prod(-(-side // cube) for side in shape) <= cubes

    found: dict[int, list[list[Shape]]] = {1: [[(1,)], [], []], 2: [[(2,)], [], []]}
    for size in range(4, chips + 1, 2):
        flat = [(size // b, b) for b in range(2, math.isqrt(size) + 1, 2) if size % (2 * b) == 0]
        solid = [(c, b, a) for c, a in flat for b in range(a, math.isqrt(c) + 1, 2) if c % (2 * b) == 0]
        kinds: list[list[Shape]] = [
            [(size,)] if size <= _LONGEST_LINE else [],
            [shape for shape in flat if dims >= 2 and fits(shape)],
            [(c // b, b, a) for c, b, a in solid if dims >= 3 and fits((c // b, b, a))],
        ]
        if any(kinds):
            found[size] = kinds
    return found


def _draw_rfold(random: np.random.Generator, count: int, torus: Shape, cube: int) -> list[Shape]:
    dims = len(torus)
    cube = next(side for side in range(cube, 0, -1) if all(length % side == 0 for length in torus))
    shapes = rfold_shapes(math.prod(torus), dims, cube)
    sizes = list(shapes)
    uniform = random.random(count)
    places = -np.log1p(-uniform * (1 - math.exp(-_SKEW))) * len(sizes) / _SKEW
    drawn: list[Shape] = []
    for place in np.minimum(places.astype(int), len(sizes) - 1).tolist():
        size = sizes[place]
        weights = np.array(next(weights for most, weights in _DIMENSIONS if size <= most))
        weights *= [bool(kind) for kind in shapes[size]]
        if not weights.any():
            weights = np.array([float(bool(kind)) for kind in shapes[size]])
        kind = shapes[size][random.choice(3, p=weights / weights.sum())]
        shape = kind[random.integers(len(kind))]
        drawn.append((*shape, *(1,) * (dims - len(shape))))
    return drawn


# TPU v4's mix

# Per cent of the slices of production jobs; twisted and plain ones of a shape together.
_TPU_V4 = (
    ("1x1x1 2.1 1x1x2 0.4 1x2x2 6.7 2x2x2 4.7 2x2x4 6.4 2x4x4 8.9 4x4x4 13.9 4x4x8 17.5 4x4x12 0.7 4x8x8 10.7")
    + (" 4x4x16 1.0 4x8x12 0.1 8x8x8 9.6 4x8x16 1.7 4x4x32 0.6 8x8x12 0.7 8x8x16 3.2 4x16x16 0.3 4x4x64 0.1")
    + (" 4x8x32 0.1 8x12x16 0.1 4x4x96 0.1 8x8x24 0.1 8x16x16 1.7 12x16x16 5.7 4x4x192 0.4")
).split()


def tpu_v4_mix() -> list[tuple[Shape, float]]:
    """Shapes and their weights."""
    return [
        (tuple(int(side) for side in shape.split("x")), float(weight))
        for shape, weight in zip(_TPU_V4[::2], _TPU_V4[1::2], strict=True)
    ]


def _draw_mix(random: np.random.Generator, count: int, mix: Sequence[tuple[Shape, float]], dims: int) -> list[Shape]:
    shapes = [shape if len(shape) <= dims else compact_shape(math.prod(shape), dims) for shape, _ in mix]
    weights = np.array([weight for _, weight in mix])
    return [shapes[place] for place in random.choice(len(shapes), count, p=weights / weights.sum())]


# Durations

# Per cent of the jobs of the Philly trace (Jeon et al., ATC'19; CC-BY-4.0) that last at most so many seconds.
_PHILLY = (
    *((0, 1.0), (5, 35.0), (10, 56.0), (15, 66.0), (20, 76.0), (25, 140.0), (30, 265.0), (35, 491.0), (40, 699.0)),
    *((45, 960.0), (50, 1322.0), (55, 1682.0), (60, 2130.0), (65, 2601.0), (70, 3540.0), (75, 5363.0), (80, 8438.0)),
    *((85, 14340.0), (90, 33480.0), (95, 123900.0), (97.5, 312300.0), (99, 755700.0), (99.5, 1428000.0)),
    *((99.8, 2137000.0), (99.9, 3051000.0), (100, 5196000.0)),
)


def _draw_durations(random: np.random.Generator, count: int, source: str) -> NDArray[np.float64]:
    if source == "philly":
        percent, seconds = np.array(_PHILLY).T
        return np.exp(np.interp(random.random(count) * 100, percent, np.log(seconds)))
    if not source.count(".") and "/" not in source:
        raise ConfigError(f"workload.durations={source} is neither philly nor a file; write philly or a path")
    return random.choice(np.array(read_durations(source, "workload.durations")), count)

"""Job traces: files of other systems, line by line.

A line that is broken is named with its file, its number and the field. Formats:

- `philly`: the Philly trace (Jeon et al., ATC'19) as RFold's repository has it: comma-separated job id, arrival in
  seconds, topology, shape, size, duration in seconds. Its jobs ran on no torus, so only sizes count.
- `rfold`: the same columns; a topology that begins with T2D or T3D has a shape such as 4x4x8, any other a size alone.
- `gavel`: Gavel's traces (Narayanan et al., OSDI'20): tab-separated job type, command, steps argument, needs data,
  total steps, arrival in seconds, scale factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from meshsys.errors import ConfigError
from meshsys.torus.shapes import Shape

__all__ = ["FORMATS", "Shape", "TraceJob", "compact_shape", "read_durations", "read_mix", "read_trace"]


_MOST_CHIPS = 1 << 20


@dataclass(frozen=True)
class TraceJob:
    """One job of a trace.

    Attributes:
        arrival: seconds.
        size: chips.
        shape: as in the trace; None where it has a size alone.
        duration: seconds on `size` chips.
    """

    arrival: float
    size: int
    shape: Shape | None
    duration: float


def read_trace(path: str, format: str | None, option: str) -> list[TraceJob]:
    """All jobs of a file in the order of arrival; jobs of duration 0 (the Philly trace has 10) are left out.

    Args:
        format: of `FORMATS`; None: tabs are Gavel's, commas RFold's.

    Raises:
        ConfigError: the file cannot be read, or the first line that is broken.
    """
    jobs = []
    for line in _lines(path, option):
        format = format or ("gavel" if "\t" in line.text else "rfold")
        jobs.append(FORMATS[format](line))
    jobs = [job for job in jobs if job.duration > 0]
    if not jobs:
        raise ConfigError(f"{option}={path} has no jobs; give a trace with one job a line")
    return sorted(jobs, key=lambda job: job.arrival)


def read_durations(path: str, option: str) -> list[float]:
    """The durations of a trace of the `rfold` format (its last column), in seconds, without those that are 0."""
    found = []
    for line in _lines(path, option):
        line.fields = line.text.split(",")
        found.append(line.number(len(line.fields) - 1, "duration"))
    found = [duration for duration in found if duration > 0]
    if not found:
        raise ConfigError(f"{option}={path} has no durations above 0; give a trace of the rfold format, or philly")
    return found


def read_mix(path: str, option: str) -> list[tuple[Shape, float]]:
    """Shapes and their probabilities, from slice id, topology, shape, size, duration, probability in per cent."""
    found = []
    for line in _lines(path, option):
        line.split(",", 6)
        found.append((line.shape(2, "shape"), line.number(5, "probability")))
    if not sum(probability for _, probability in found) > 0:
        raise ConfigError(f"{option}={path} has no probabilities above 0; give shapes with them")
    return found


def compact_shape(size: int, dims: int = 3) -> Shape:
    """The box of just this size whose surface is least: 8 is 2x2x2, 12 is 2x2x3, 7 is 1x1x7."""
    if dims == 1:
        return (size,)
    best = None
    for side in range(1, round(size ** (1 / dims)) + 2):
        if size % side == 0:
            shape = tuple(sorted((side, *compact_shape(size // side, dims - 1))))
            if best is None or (max(shape), sum(shape)) < (max(best), sum(best)):
                best = shape
    assert best is not None  # 1 divides every size
    return best


@dataclass
class _Line:
    """A line of a file, for messages."""

    path: str
    place: int
    text: str
    fields: list[str]

    def broken(self, field: str, held: str, wanted: str) -> ConfigError:
        held = held if len(held) <= 40 else f"{held[:37]}..."
        return ConfigError(f"{self.path}, line {self.place}: {field}={held!r} {wanted}; mend or remove that line")

    def split(self, separator: str, count: int) -> None:
        self.fields = self.text.split(separator)
        if len(self.fields) != count:
            raise self.broken("fields", str(len(self.fields)), f"in a line that must have {count}")

    def number(self, place: int, field: str) -> float:
        try:
            value = float(self.fields[place])
        except ValueError:
            value = math.nan
        if not 0 <= value <= 1e15:
            raise self.broken(field, self.fields[place], "is not a number of at least 0")
        return value

    def whole(self, place: int, field: str) -> int:
        value = self.number(place, field)
        if value != int(value) or not 1 <= value <= _MOST_CHIPS:
            raise self.broken(field, self.fields[place], f"is not a whole number from 1 to {_MOST_CHIPS}")
        return int(value)

    def shape(self, place: int, field: str) -> Shape:
        sides = self.fields[place].strip().split("x")
        if not all(side.isascii() and side.isdigit() and 0 < int(side) <= _MOST_CHIPS for side in sides):
            raise self.broken(field, self.fields[place], "is not a shape such as 4x4x8")
        return tuple(int(side) for side in sides)


def _lines(path: str, option: str) -> Iterator[_Line]:
    """Lines that hold something, without comments."""
    try:
        text = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{option}={path} cannot be read: {error.strerror}; give the path of a trace file") from None
    for place, raw in enumerate(text.splitlines(), 1):
        try:
            line = raw.decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{path}, line {place}: is not UTF-8; give a trace file that is text") from None
        if line.strip() and not line.startswith("#"):
            yield _Line(path, place, line, [])


def _rfold(line: _Line) -> TraceJob:
    line.split(",", 6)
    size = line.whole(4, "size")
    shape = None
    if line.fields[2].strip().startswith(("T2D", "T3D")):
        shape = line.shape(3, "shape")
        if math.prod(shape) != size:
            raise line.broken("size", line.fields[4], f"is not that of its shape {line.fields[3]}")
    return TraceJob(line.number(1, "arrival"), size, shape, line.number(5, "duration"))


def _philly(line: _Line) -> TraceJob:
    line.split(",", 6)
    return TraceJob(line.number(1, "arrival"), line.whole(4, "size"), None, line.number(5, "duration"))


def _gavel(line: _Line) -> TraceJob:
    line.split("\t", 7)
    kind = line.fields[0]
    if kind not in _STEPS_A_SECOND:
        raise line.broken("job type", kind, "is none of Gavel's")
    size = line.whole(6, "scale factor")
    steps = line.number(4, "total steps")
    return TraceJob(line.number(5, "arrival"), size, None, steps / (_STEPS_A_SECOND[kind] * size))


FORMATS: dict[str, Callable[[_Line], TraceJob]] = {"philly": _philly, "gavel": _gavel, "rfold": _rfold}
"""A line of a trace to its job, by the name of the format."""

# Steps a second of one V100, three digits, measured by Gavel's authors (stanford-futuredata/gavel,
# simulation_throughputs.json, MIT). On n chips a job is taken to run n times as fast.
_STEPS_A_SECOND = {
    "A3C": 7.18,
    "CycleGAN": 4.43,
    **{
        f"{model} (batch size {batch})": speed
        for model, speeds in {
            "LM": {5: 109.0, 10: 81.7, 20: 64.7, 40: 45.2, 80: 28.2},
            "Recommendation": {512: 23.3, 1024: 13.3, 2048: 7.47, 4096: 3.91, 8192: 2.84},
            "ResNet-18": {16: 32.4, 32: 29.9, 64: 24.1, 128: 18.0, 256: 10.3},
            "ResNet-50": {16: 11.4, 32: 7.79, 64: 4.39, 128: 2.50},
            "Transformer": {16: 11.1, 32: 10.6, 64: 8.62, 128: 5.45, 256: 1.60},
        }.items()
        for batch, speed in speeds.items()
    },
}

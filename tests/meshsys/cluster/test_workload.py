"""Jobs: traces line by line, RFold's generator against its definition, the TPU v4 mix, arrivals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from meshsys.cluster.config import ClusterConfig, ElasticConfig, WorkloadConfig
from meshsys.cluster.traces import compact_shape, read_durations, read_mix, read_trace
from meshsys.cluster.workload import make_workload, rfold_shapes, tpu_v4_mix
from meshsys.errors import ConfigError

POD = ClusterConfig(topology="16x16x16", cube=4)

RFOLD = """\
#job id,arrival time (sec),topology,shape,size,duration (sec)
0,5.0,T3D_NT,4x4x8,128,60.0
1,1.0,CLOS,8+8,16,30.0

2,7.0,CLOS,1,1,0.0
"""
GAVEL = (
    "ResNet-18 (batch size 64)\tpython3 main.py\t--num_steps\t1\t2410\t12.5\t2\nA3C\tpython3 a3c.py\t-n\t0\t718\t0\t1\n"
)


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes, name: str = "trace.csv") -> str:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def test_rfold_format(write):
    first, second = read_trace(write(RFOLD), "rfold", "workload.path")  # sorted, and without the job of duration 0
    assert (first.arrival, first.size, first.shape, first.duration) == (1, 16, None, 30)
    assert (second.arrival, second.size, second.shape, second.duration) == (5, 128, (4, 4, 8), 60)


def test_philly_format_has_sizes_alone(write):
    assert [job.shape for job in read_trace(write(RFOLD), "philly", "workload.path")] == [None, None]


def test_gavel_format(write):
    """Steps over steps a second of one V100, and over the number of them."""
    first, second = read_trace(write(GAVEL), None, "workload.path")
    assert (first.arrival, first.size, first.duration) == (0, 1, pytest.approx(718 / 7.18))
    assert (second.arrival, second.size, second.duration) == (12.5, 2, pytest.approx(2410 / 24.1 / 2))


@pytest.mark.parametrize(
    ("text", "format", "wanted"),
    [
        ("0,5,CLOS,1,1\n", "philly", "line 1: fields='5' in a line that must have 6"),
        ("# a\n0,five,CLOS,1,1,2\n", "philly", "line 2: arrival='five' is not a number of at least 0"),
        ("0,5,CLOS,1,1,-2\n", "philly", "line 1: duration='-2' is not a number of at least 0"),
        ("0,5,CLOS,1,1,nan\n", "philly", "line 1: duration='nan' is not a number"),
        ("0,5,CLOS,1,1.5,2\n", "philly", "line 1: size='1.5' is not a whole number from 1"),
        ("0,5,CLOS,1,0,2\n", "philly", "line 1: size='0' is not a whole number from 1"),
        ("0,5,T3D_NT,4x4,64,2\n", "rfold", "line 1: size='64' is not that of its shape 4x4"),
        ("0,5,T3D_NT,4xx4,16,2\n", "rfold", "line 1: shape='4xx4' is not a shape such as 4x4x8"),
        ("0,5,T3D_NT,4x-4,16,2\n", "rfold", "line 1: shape='4x-4' is not a shape"),
        ("GPT\tx\tx\t1\t100\t0\t1\n", "gavel", "line 1: job type='GPT' is none of Gavel's"),
        ("A3C\tx\tx\t1\t100\t0\n", "gavel", "line 1: fields='6' in a line that must have 7"),
        (b"\xff\xfe\n", "philly", "line 1: is not UTF-8; give a trace file that is text"),
        ("", "philly", "has no jobs; give a trace with one job a line"),
    ],
)
def test_broken_traces(write, text, format, wanted):
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(path, format, "workload.path")
    message = str(caught.value)
    assert wanted in message and path in message and ";" in message and "\n" not in message


def test_a_trace_that_is_not_there():
    with pytest.raises(ConfigError, match="workload.path=nowhere.csv cannot be read: No such file"):
        read_trace("nowhere.csv", "philly", "workload.path")


@pytest.mark.parametrize(
    ("size", "shape"), [(1, (1, 1, 1)), (7, (1, 1, 7)), (8, (2, 2, 2)), (12, (2, 2, 3)), (128, (4, 4, 8))]
)
def test_compact_shapes(size, shape):
    assert compact_shape(size) == shape


@pytest.mark.parametrize("size", range(1, 200))
def test_compact_shapes_are_of_the_size(size):
    assert math.prod(compact_shape(size)) == math.prod(compact_shape(size, 2)) == size


# RFold's generator


def test_rfold_shapes_are_all_even_factorisations():
    shapes = rfold_shapes(512, 3, 4)
    assert shapes[1][0] == [(1,)] and shapes[2][0] == [(2,)]
    for size in range(4, 513, 2):
        sides = range(2, size + 1, 2)
        flat = {(a, b) for a in sides for b in sides if a >= b and a * b == size and max(a, b) <= 32}
        flat = {(a, b) for a, b in flat if -(-a // 4) * -(-b // 4) <= 8}
        short = range(2, 65, 2)
        solid = {
            (size // (a * b), b, a)
            for a in short
            for b in short
            if a <= b and size % (a * b) == 0 and size // (a * b) >= b and size // (a * b) % 2 == 0
        }
        solid = {each for each in solid if max(each) <= 32 and math.prod(-(-side // 4) for side in each) <= 8}
        line = [(size,)] if size <= 256 else []
        if not (flat or solid or line):
            assert size not in shapes
            continue
        kinds = shapes[size]
        assert kinds[0] == line
        assert {tuple(sorted(each)) for each in kinds[1]} == {tuple(sorted(each)) for each in flat}
        assert {tuple(sorted(each)) for each in kinds[2]} == {tuple(sorted(each)) for each in solid}


def test_rfold_mix_is_what_it_was_measured_to_be():
    """torus.md: 60% lines, 29% sheets, 10% blocks; sizes 347 on average, 160 in the middle, 2800 at p99."""
    workload = make_workload(WorkloadConfig(jobs=20_000), POD)
    dims = np.array([sum(side > 1 for side in shape) for shape in workload.shapes])[workload.shape]
    assert (np.mean(dims <= 1), np.mean(dims == 2), np.mean(dims == 3)) == pytest.approx((0.6, 0.29, 0.10), abs=0.02)
    assert workload.size.mean() == pytest.approx(347, rel=0.05)
    assert np.median(workload.size) == pytest.approx(160, rel=0.1)
    assert np.percentile(workload.size, 99) == pytest.approx(2800, rel=0.1)


def test_philly_durations():
    workload = make_workload(WorkloadConfig(jobs=100_000, generator="tpu_v4"), POD)
    hours = workload.duration / 3600
    assert hours.mean() == pytest.approx(9.89, rel=0.05)
    assert np.percentile(hours, [50, 90, 99]) == pytest.approx([0.367, 9.3, 209.9], rel=0.05)


def test_tpu_v4_mix():
    mix = dict(tpu_v4_mix())
    assert mix[4, 4, 8] == 17.5 and mix[12, 16, 16] == 5.7 and sum(mix.values()) == pytest.approx(97.5)
    workload = make_workload(WorkloadConfig(jobs=20_000, generator="tpu_v4"), POD)
    share = np.mean(workload.shape == workload.shapes.index((4, 4, 8)))
    assert share == pytest.approx(0.175 / sum(mix.values()) * 100, abs=0.01)


def test_a_mix_from_a_file(write):
    path = write("#id,topology,shape,size,duration,%\n0,T3D_NT,2x2x1,4,0,75\n1,T3D_T,4x4x8,128,0,25\n", "mix.csv")
    assert read_mix(path, "workload.mix") == [((2, 2, 1), 75), ((4, 4, 8), 25)]
    workload = make_workload(WorkloadConfig(generator="tpu_v4", mix=path, jobs=1000), POD)
    assert workload.shapes == ((2, 2, 1), (4, 4, 8)) and np.mean(workload.shape) == pytest.approx(0.25, abs=0.05)


# Arrivals


@pytest.mark.parametrize("load", [0.1, 0.4, 1.5])
def test_offered_load(load):
    workload = make_workload(WorkloadConfig(jobs=500, load=load, seed=7), POD)
    assert workload.load(4096) == pytest.approx(load)
    gaps = np.diff(workload.arrival)
    assert (gaps > 0).all() and np.std(gaps) == pytest.approx(gaps.mean(), rel=0.2)  # exponential


def test_the_same_jobs_for_the_same_seed():
    one, again, other = (make_workload(WorkloadConfig(jobs=50, seed=seed), POD) for seed in (1, 1, 2))
    assert (one.arrival == again.arrival).all() and (one.shape == again.shape).all()
    assert not (one.duration == other.duration).all()


def test_a_trace_keeps_its_arrivals_or_is_stretched(write):
    path = write(RFOLD)
    as_it_is = make_workload(WorkloadConfig(generator="trace", path=path), POD)
    assert as_it_is.arrival.tolist() == [1, 5] and as_it_is.shapes == ((2, 2, 4), (4, 4, 8))
    stretched = make_workload(WorkloadConfig(generator="trace", path=path, load=0.5), POD)
    assert stretched.load(4096) == pytest.approx(0.5)
    assert make_workload(WorkloadConfig(generator="trace", path=path, jobs=1), POD).arrival.tolist() == [1]


def test_saturated_cut_and_elastic(write):
    config = WorkloadConfig(
        jobs=200, load="saturated", longest_hours=2, durations=write(RFOLD), elastic=ElasticConfig(share=0.5)
    )
    workload = make_workload(config, POD)
    assert workload.backlog == 64 and not workload.arrival.any()
    assert set(workload.duration) == {30, 60}
    assert 60 < workload.elastic.sum() < 140


def test_durations_that_cannot_be_read(write):
    with pytest.raises(ConfigError, match="workload.durations=phily is neither philly nor a file"):
        make_workload(WorkloadConfig(durations="phily"), POD)
    with pytest.raises(ConfigError, match="line 1: duration='soon' is not a number"):
        read_durations(write("1,soon\n"), "workload.durations")
    with pytest.raises(ConfigError, match="has no durations above 0"):
        read_durations(write("#\n1,0\n"), "workload.durations")


@pytest.mark.parametrize(("topology", "cube"), [("8x8", None), ("16", None), ("4x4x4x4", 2), ("v5p:4x4x8", 4)])
def test_other_pods(topology, cube):
    for generator in ("rfold", "tpu_v4"):
        pod = ClusterConfig(topology=topology, cube=cube)
        workload = make_workload(WorkloadConfig(jobs=50, generator=generator), pod)
        assert all(len(shape) <= topology.count("x") + 1 for shape in workload.shapes)


# The traces beside the repository


def test_philly_trace(shared):
    jobs = read_trace(str(shared / "traces" / "philly_trace.csv"), "philly", "workload.path")
    assert len(jobs) == 111_539 and max(job.size for job in jobs) == 128


def test_gavel_traces(shared):
    traces = sorted((shared / "traces" / "gavel").glob("*.trace"))
    assert traces
    for path in traces:
        jobs = read_trace(str(path), "gavel", "workload.path")
        assert {job.size for job in jobs} <= {1, 2, 4, 8, 12, 16, 24, 32}
        assert 0.5 < np.median([job.duration for job in jobs]) / 3600 < 100


def test_the_built_in_mix_is_the_papers(shared):
    found: dict[tuple[int, ...], float] = {}
    for shape, weight in read_mix(str(shared / "traces" / "tpu_job_size.csv"), "workload.mix"):
        found[shape] = found.get(shape, 0.0) + weight
    assert found == pytest.approx(dict(tpu_v4_mix()))

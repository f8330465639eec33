"""CrossPipe's greedy: zb_h1 without delay, its memory, and who wins at which delay (table 5 of the paper)."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from schedules.actions import ScheduleError
from schedules.costs import Costs, Link
from schedules.families import make
from schedules.families.cross_region import cross_region, cross_region_wave
from schedules.simulate import simulate
from schedules.validate import live, validate


def asynchronous(schedule, costs):
    return simulate(schedule, costs, "asynchronous")


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 32])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_without_delay_it_is_zb_h1_in_as_much_memory(ranks, microbatches, chunks):
    costs = Costs(F=1 / chunks, I=1 / chunks, W=1 / chunks)
    schedule = cross_region(ranks, microbatches, chunks, costs)
    validate(schedule, microbatches=microbatches)
    assert schedule.placement == tuple(rank for rank in range(ranks) for _ in range(chunks))
    found = asynchronous(schedule, costs)
    h1 = asynchronous(make("zb_h1", ranks=ranks, microbatches=microbatches), Costs())
    assert found.makespan == pytest.approx(h1.makespan)
    assert max(found.peak_activations) <= max(h1.peak_activations) + 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_any_costs_and_caps(seed):
    random = np.random.default_rng(seed)
    ranks, microbatches = int(random.integers(1, 6)), int(random.integers(1, 12))
    chunks = int(random.integers(1, 3))
    for build, stages in ((cross_region, ranks * chunks), (cross_region_wave, 2 * ranks * chunks)):
        times = random.choice([0.25, 0.5, 1, 1.25], (3, stages)).tolist()
        links = tuple(
            Link(a, b, *random.choice([0, 0.5, 2], 2).tolist())
            for a, b in permutations(range(ranks), 2)
            if random.random() < 0.5
        )
        costs = Costs(F=tuple(times[0]), I=tuple(times[1]), W=tuple(times[2]), send=0.25, transfer=0.25, links=links)
        makespans = []
        for cap in (1, 1.5, ranks, 2 * ranks):
            schedule = build(ranks, microbatches, stages // ranks, costs, memory_cap=cap)
            validate(schedule, microbatches=microbatches)
            assert max(live(schedule)) <= cap * stages / ranks
            makespans.append(asynchronous(schedule, costs).makespan)
        assert makespans[-1] <= makespans[-2]


def test_the_wave_goes_there_and_back():
    assert cross_region_wave(3, 2).placement == (0, 1, 2, 2, 1, 0)
    assert cross_region_wave(2, 2, 4).placement == (0, 0, 1, 1, 1, 1, 0, 0)


# Seconds a microbatch in two regions, P=8, by latency and transfer over the time of a forward: a batch of 16 in
# 1f1b's memory, and a batch of 32 in twice as much. Wave has half a rank's layers in a stage.
PAPER = {
    (0, 0, 16): {"1f1b": 0.151, "zb_h1": 0.133, "zbv": 0.118, "ud": 0.137, "wave": 0.119},
    (0.25, 2, 16): {"1f1b": 0.241, "zb_h1": 0.230, "zbv": 0.315, "ud": 0.177, "wave": 0.250},
    (2, 0.25, 16): {"1f1b": 0.242, "zb_h1": 0.229, "zbv": 0.314, "ud": 0.153, "wave": 0.148},
    (2, 2, 16): {"1f1b": 0.321, "zb_h1": 0.309, "zbv": 0.473, "ud": 0.196, "wave": 0.256},
    (0, 0, 32): {"ud": 0.118, "wave": 0.108},
    (2, 0.25, 32): {"ud": 0.124, "wave": 0.115},
    (2, 2, 32): {"ud": 0.147, "wave": 0.245},
}
# In the simulator zbv's order takes less time than 1f1b's here, and more than zb_h1's.
NOT_REPRODUCED = {((2, 0.25, 16), "1f1b", "zbv")}


@pytest.mark.parametrize(("latency", "transfer", "microbatches"), PAPER)
def test_table_5(latency, transfer, microbatches):
    paper = PAPER[latency, transfer, microbatches]
    ranks, cap = 8, microbatches // 2
    links = (Link(3, 4, latency, transfer), Link(4, 3, latency, transfer))
    whole, half = Costs(links=links), Costs(F=0.5, I=0.5, W=0.5, links=links)
    fused = Costs(I=2, W=0, links=links)
    found = {
        "1f1b": asynchronous(make("1f1b", ranks=ranks, microbatches=microbatches), whole),
        "zb_h1": asynchronous(make("zb_h1", ranks=ranks, microbatches=microbatches), whole),
        "zbv": asynchronous(make("zbv", ranks=ranks, microbatches=microbatches), half),
        "ud": asynchronous(cross_region(ranks, microbatches, 1, whole, memory_cap=cap), whole),
        "wave": asynchronous(cross_region_wave(ranks, microbatches, 2, half, memory_cap=cap), half),
    }
    # What the paper measured as at least 5% apart comes out in the same order, and so does the best.
    for one, other in permutations(paper, 2):
        case = (latency, transfer, microbatches), one, other
        if paper[one] < 0.95 * paper[other] and case not in NOT_REPRODUCED:
            assert found[one].makespan < found[other].makespan, (one, other)
    best = min(paper, key=paper.__getitem__)
    assert found[best].makespan == min(found[name].makespan for name in paper)
    # A split backward beats a full one.
    assert (
        found["ud"].makespan < asynchronous(cross_region(ranks, microbatches, 1, fused, memory_cap=cap), fused).makespan
    )
    assert all(max(found[name].peak_activations) <= cap for name in ("ud", "wave"))


def test_refused():
    with pytest.raises(ScheduleError, match="memory_cap=0.5 is below one microbatch's activations; use 1 or more"):
        cross_region(2, 2, memory_cap=0.5)
    with pytest.raises(ScheduleError, match="chunks=3 is odd.*use 4, or cross_region"):
        cross_region_wave(2, 2, 3)
    with pytest.raises(ScheduleError, match="F is given for 2 stages, and the schedule has 4"):
        cross_region(4, 4, costs=Costs(F=(1, 1)))

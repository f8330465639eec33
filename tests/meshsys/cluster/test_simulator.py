"""The simulator: timelines that can be checked by hand, a naive simulator, and what holds for all of them."""

from __future__ import annotations

import numpy as np
import pytest

from meshsys.cluster import policies
from meshsys.cluster.adapt import sizes_of
from meshsys.cluster.config import (
    ClusterConfig,
    ElasticConfig,
    FailuresConfig,
    MigrationConfig,
    PolicyConfig,
    WorkloadConfig,
)
from meshsys.cluster.queues import QUEUES
from meshsys.cluster.simulator import make_pod, simulate
from meshsys.cluster.workload import Workload, make_workload
from tests.oracles.naive_cluster import Naive, NaiveJob

RING = ClusterConfig(topology="8")
BLOCK = ClusterConfig(topology="4x4x4")


def jobs(*rows, elastic=False, backlog=None) -> Workload:
    """Rows of arrival, duration (seconds), shape."""
    arrival, duration, drawn = zip(*rows, strict=True)
    shapes = tuple(sorted(set(drawn)))
    return Workload(
        np.array(arrival, float),
        np.array(duration, float),
        np.array([shapes.index(shape) for shape in drawn]),
        shapes,
        np.full(len(rows), elastic),
        backlog,
    )


def run(workload, cluster=RING, elastic=None, **options):
    return simulate(cluster, workload, PolicyConfig(placement="first_fit", **options), elastic)


def times(outcome):
    return [(float(start), float(end)) for start, end in zip(outcome.start, outcome.end, strict=True)]


# By hand. A takes half of a ring of 8 until 10; B needs all of it; C, two chips, comes last.

SHORT = jobs((0, 10, (4,)), (1, 5, (8,)), (2, 3, (2,)))
LONG = jobs((0, 10, (4,)), (1, 5, (8,)), (2, 20, (2,)))


def test_fcfs_waits_for_the_first():
    assert times(run(SHORT, queue="fcfs")) == [(0, 10), (10, 15), (15, 18)]
    assert times(run(LONG, queue="fcfs")) == [(0, 10), (10, 15), (15, 35)]


def test_backfill_overtakes_and_delays_the_first():
    assert times(run(SHORT, queue="backfill")) == [(0, 10), (10, 15), (2, 5)]
    assert times(run(LONG, queue="backfill")) == [(0, 10), (22, 27), (2, 22)]


def test_backfill_looks_no_further_than_its_window():
    """C does not fit beside A either; D would."""
    four = jobs((0, 10, (4,)), (1, 5, (8,)), (2, 3, (5,)), (3, 3, (1,)))
    assert times(run(four, queue="backfill", window=1))[3] == (15, 18)
    assert times(run(four, queue="backfill", window=2))[3] == (3, 6)


def test_easy_overtakes_only_without_delay():
    assert times(run(SHORT, queue="easy")) == [(0, 10), (10, 15), (2, 5)]
    assert times(run(LONG, queue="easy")) == [(0, 10), (10, 15), (15, 35)]


def test_easy_keeps_chips_free_not_numbers_of_chips():
    """X keeps chip 0, A 1 to 3 until 10; B will have 1 to 5 then. C, which is long, gets 6 and 7."""
    four = jobs((0, 100, (1,)), (0, 10, (3,)), (1, 5, (5,)), (2, 20, (2,)))
    assert times(run(four, queue="easy"))[2:] == [(10, 15), (2, 22)]
    assert times(run(four, queue="backfill"))[2:] == [(22, 27), (2, 22)]


@pytest.mark.parametrize(("order", "first"), [("arrival", 2), ("shortest", 3), ("largest", 4)])
def test_order_of_those_that_overtake(order, first):
    """Four chips are free at 5, when D to F wait behind B."""
    rows = [(0, 100, (4,)), (1, 5, (8,)), (5, 30, (3,)), (5, 20, (3,)), (5, 40, (4,))]
    started = run(jobs(*rows), queue="backfill", order=order).start[2:]
    assert 2 + int(np.argmin(started)) == first and min(started) == 5


def test_easy_interrupts_for_what_is_short():
    """B lasts less than a twentieth of what A and X have run, and takes their chips; both come back to them."""
    hour = 3600.0
    rows = [(0, 100 * hour, (4,)), (0, 90 * hour, (2,)), (40 * hour, hour, (6,)), (40 * hour, 70 * hour, (3,))]
    patient = run(jobs(*rows), queue="easy", interrupt=0.0)
    assert times(patient)[2] == (100 * hour, 101 * hour)
    quick = run(jobs(*rows), queue="easy", interrupt=0.05, preempt_minutes=0)
    assert times(quick) == [(0, 101 * hour), (0, 91 * hour), (40 * hour, 41 * hour), (91 * hour, 161 * hour)]
    early = [(0, 100 * hour, (4,)), (0, 90 * hour, (2,)), (10 * hour, hour, (6,))]
    assert times(run(jobs(*early), queue="easy", preempt_minutes=0))[2] == (20 * hour, 21 * hour)


def test_srtf_stops_what_has_twice_as_much_left():
    two = jobs((0, 100, (8,)), (40, 10, (8,)))
    quick = dict(queue="srtf", quantum_minutes=0)
    assert times(run(two, **quick, preempt_minutes=0)) == [(0, 110), (40, 50)]
    assert times(run(two, **quick, preempt_minutes=1)) == [(0, 170), (40, 50)]  # A takes a minute to start again
    assert times(run(two, **quick, preempt=False)) == [(0, 100), (100, 110)]
    assert times(run(jobs((0, 100, (8,)), (40, 31, (8,))), **quick)) == [(0, 100), (100, 131)]


def test_srtf_stops_only_those_whose_chips_it_takes():
    """B, which is shorter, got the first chips, and those are what C gets."""
    three = jobs((0, 100, (4,)), (0, 90, (4,)), (10, 10, (4,)))
    outcome = run(three, queue="srtf", quantum_minutes=0, preempt_minutes=0)
    assert times(outcome) == [(0, 100), (0, 100), (10, 20)]


def test_fair_lets_in_who_has_had_least():
    two = jobs((0, 4 * 3600, (8,)), (1800, 3600, (8,)))
    fair = dict(queue="fair", quantum_minutes=0, preempt_minutes=0)
    assert times(run(two, **fair)) == [(0, 5 * 3600), (1800, 5400)]
    # After 40 seconds A has had little yet, and is let be.
    early = jobs((0, 4 * 3600, (8,)), (40, 3600, (8,)))
    assert times(run(early, **fair))[1][0] == 4 * 3600


def test_slaq_prefers_the_cheaper_quality():
    """B and C last as long, and C has half of the chips."""
    three = jobs((0, 100, (8,)), (1, 3600, (8,)), (2, 3600, (4,)))
    assert times(run(three, queue="slaq", preempt=False)) == [(0, 100), (3700, 7300), (100, 3700)]


def test_waiting_is_for_chips_for_a_shape_or_for_a_turn():
    """Until 4 two chips are free, then two pairs that are apart, until 10."""
    rows = [(0, 10, (2,)), (0, 4, (2,)), (0, 10, (2,)), (1, 5, (3,)), (2, 5, (1,)), (3, 5, (5,))]
    outcome = run(jobs(*rows), queue="fcfs")
    assert outcome.start[3:].tolist() == [10, 10, 15]
    assert outcome.blocked_resource[3:].tolist() == [3, 0, 12]
    assert outcome.blocked_shape[3:].tolist() == [6, 0, 0]
    assert outcome.blocked_order[3:].tolist() == [0, 8, 0]


def test_what_can_never_be_placed_is_refused():
    outcome = run(jobs((0, 5, (8,)), (1, 5, (9,)), (2, 5, (8,))))
    assert outcome.refused.tolist() == [False, True, False]
    assert np.isnan(outcome.end[1]) and outcome.end[2] == 10


def test_what_failed_chips_keep_out_is_given_up():
    broken = ClusterConfig(topology="8", failures=FailuresConfig(failed=((0,),)))
    outcome = run(jobs((0, 5, (8,)), (1, 5, (7,)), (2, 5, (8,))), broken)
    assert outcome.refused.tolist() == [True, False, True]
    assert times(outcome)[1] == (1, 6)


def test_reconfiguration_takes_time_for_jobs_of_several_cubes():
    cubes = ClusterConfig(topology="4x4x4", cube=2, wiring="any", reconfigure_seconds=7)
    outcome = run(jobs((0, 10, (2, 2, 2)), (0, 10, (2, 2, 4))), cubes)
    assert outcome.end.tolist() == [10, 17]


def test_open_rings_slow_a_job_down():
    """4 of 8 chips in a line have one way where a ring has two: half of the time doubles."""
    slow = ClusterConfig(topology="8", communication=0.5)
    assert run(jobs((0, 10, (4,)), (0, 10, (4,))), slow).end.tolist() == [15, 15]
    assert run(jobs((0, 10, (8,))), slow).end.tolist() == [10]


def test_migration_moves_what_is_in_the_way():
    """Chips 1 to 4 and 6 are free at 5: A or C moves, and E starts at once; A stands still for a minute."""
    rows = [(0, 100, (1,)), (0, 5, (4,)), (0, 100, (1,)), (0, 5, (2,)), (6, 10, (6,))]
    assert run(jobs(*rows), queue="fcfs").start[4] == 100
    moving = MigrationConfig(jobs=2, minutes=1, every_minutes=0)
    outcome = run(jobs(*rows), queue="fcfs", migration=moving)
    assert outcome.start[4] == 6
    assert outcome.moves.sum() == 1 and sorted(outcome.end.tolist()) == [5, 5, 16, 100, 160]


def test_elastic_jobs_start_smaller_and_grow():
    rows = [(0, 7200, (4,)), (0, 14400, (8,))]
    elastic = ElasticConfig(share=1, least=0.5, most=1, efficiency=1, restart_minutes=0)
    outcome = run(jobs(*rows, elastic=True), elastic=elastic)
    # B runs on 4 chips for two hours, an hour's work, and then on all 8 for the other three.
    assert times(outcome) == [(0, 7200), (0, 7200 + 3 * 3600)]


def test_elastic_jobs_shrink_for_others():
    rows = [(0, 4 * 3600, (8,)), (2 * 3600, 3600, (4,))]
    elastic = ElasticConfig(share=1, least=0.5, most=1, efficiency=1, restart_minutes=0)
    outcome = run(jobs(*rows, elastic=True), elastic=elastic)
    # A has two hours left when B comes; one hour on half of the chips, then the whole ring.
    assert times(outcome) == [(0, 4 * 3600 + 1800), (2 * 3600, 3 * 3600)]


def test_sizes_of_an_elastic_job():
    assert sizes_of((4, 4, 8), 0.25, 1) == [(4, 4, 8), (4, 4, 4), (4, 4, 2)]
    assert sizes_of((2, 2, 2), 1, 4) == [(4, 4, 2), (4, 2, 2), (2, 2, 2)]
    assert sizes_of((16, 1, 1), 1, 1) == [(16, 1, 1), (2, 2, 4)]  # refolded
    assert sizes_of((5, 3, 1), 0.1, 1.5) == [(5, 3, 1), (1, 3, 5)][:1]


def test_elastic_jobs_refold():
    """Half of 8x2x2 is A's, so no line of 8 is free; a block of 2x2x2 is. On 4x4x4 there never is such a line."""
    elastic = ElasticConfig(share=1, least=1, restart_minutes=0)
    rows = [(0, 100, (4, 2, 2)), (1, 10, (8, 1, 1))]
    block = ClusterConfig(topology="8x2x2")
    assert times(run(jobs(*rows, elastic=True), block, elastic)) == [(0, 100), (1, 11)]
    assert times(run(jobs(*rows), block, elastic)) == [(0, 100), (100, 110)]
    assert run(jobs(*rows, elastic=True), BLOCK, elastic).refused.tolist() == [False, False]
    assert run(jobs(*rows), BLOCK, elastic).refused.tolist() == [False, True]


def test_saturation_keeps_jobs_waiting():
    rows = [(0, 10, (8,))] * 6
    outcome = run(jobs(*rows, backlog=2))
    assert outcome.arrival.tolist() == [0, 0, 0, 10, 20, 30]
    assert outcome.end.tolist() == [10, 20, 30, 40, 50, 60]


# The naive simulator


def draw(seed: int, count: int = 24):
    random = np.random.default_rng(seed)
    shapes = [(1, 1, 1), (1, 1, 2), (2, 2, 2), (1, 1, 4), (2, 4, 4), (4, 4, 4), (1, 2, 3), (2, 2, 4)]
    weights = np.array([2, 2, 4, 3, 3, 1, 2, 3], float)
    picked = random.choice(len(shapes), count, p=weights / weights.sum())
    arrival = np.sort(random.integers(0, 60, count))
    return [
        (int(when), int(random.integers(1, 40)), shapes[place]) for when, place in zip(arrival, picked, strict=True)
    ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("queue", "window", "order"),
    [
        ("fcfs", 30, "arrival"),
        ("backfill", 30, "arrival"),
        ("backfill", 3, "shortest"),
        ("easy", 30, "arrival"),
        ("easy", 5, "largest"),
        ("easy", 30, "shortest"),
        ("srtf", 30, "arrival"),
    ],
)
def test_equals_the_naive_simulator(queue, window, order, seed):
    rows = draw(seed)
    outcome = run(jobs(*rows), BLOCK, queue=queue, window=window, order=order, preempt=False)
    wanted = [NaiveJob(*row) for row in rows]
    Naive(make_pod(BLOCK), policies.get("first_fit"), wanted, queue, window, order).run()
    assert times(outcome) == [(job.start, job.end) for job in wanted]


# What holds for all


def held(outcome) -> float:
    """Chip-seconds that jobs had chips."""
    return float((outcome.series.used[:-1] * np.diff(outcome.series.time)).sum())


MIX = make_workload(WorkloadConfig(generator="tpu_v4", jobs=150, load=1.2, seed=3), ClusterConfig(topology="8x8x8"))
CUBES = ClusterConfig(topology="8x8x8", cube=4)


@pytest.mark.parametrize("queue", QUEUES)
def test_every_job_ends_once_and_no_chip_runs_two(queue):
    outcome = run(MIX, CUBES, queue=queue)
    ended = np.isfinite(outcome.end)
    assert (ended ^ outcome.refused).all()
    fits = [max(sorted(MIX.shapes[shape])) <= 8 for shape in MIX.shape]
    assert outcome.refused.tolist() == [not each for each in fits]
    assert (outcome.start[ended] >= outcome.arrival[ended]).all()
    assert outcome.series.used.max() <= 512 and outcome.series.used[-1] == 0
    work = float((MIX.size * MIX.duration)[ended].sum())
    if (outcome.starts <= 1).all():
        np.testing.assert_allclose(outcome.end - outcome.start, np.where(ended, MIX.duration, np.nan), rtol=1e-9)
        np.testing.assert_allclose(held(outcome), work, rtol=1e-9)
    else:
        assert held(outcome) > work
    waited = outcome.blocked_resource + outcome.blocked_shape + outcome.blocked_order
    first = outcome.start - outcome.arrival
    once = outcome.starts == 1
    np.testing.assert_allclose(waited[once], first[once], atol=1e-3)


@pytest.mark.parametrize("queue", QUEUES)
def test_the_same_again(queue):
    stormy = ClusterConfig(topology="8x8x8", cube=4, failures=FailuresConfig(mtbf_hours=3000, repair_hours=5))
    elastic = ElasticConfig(share=0.5, most=2)
    moving = MigrationConfig(jobs=8)
    one, other = (run(MIX, stormy, elastic, queue=queue, migration=moving) for _ in range(2))
    for name in ("arrival", "start", "end", "starts", "moves", "blocked_shape"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert [when for when, _ in one.snapshots] == [when for when, _ in other.snapshots]
    assert all((a == b).all() for (_, a), (_, b) in zip(one.snapshots, other.snapshots, strict=True))


def test_failures_kill_and_jobs_start_again():
    calm = run(MIX, CUBES, queue="easy")
    stormy = ClusterConfig(topology="8x8x8", cube=4, failures=FailuresConfig(mtbf_hours=2000, repair_hours=5))
    outcome = run(MIX, stormy, queue="easy")
    assert outcome.starts.max() > 1
    assert outcome.series.failed.max() > 0
    assert (outcome.series.used + outcome.series.failed <= 512).all()
    assert (np.isfinite(outcome.end) ^ outcome.refused).all()
    again = outcome.starts > 1
    work = (outcome.end - outcome.start)[again]
    assert (work > MIX.duration[again]).all()  # the way to the last checkpoint, and the restart
    assert held(outcome) > held(calm)


def test_migration_and_elastic_jobs_lose_no_work():
    """At full speed whatever the size, chip-seconds are work and pauses."""
    elastic = ElasticConfig(share=1, least=0.25, most=4, efficiency=1, restart_minutes=0)
    moving = MigrationConfig(jobs=16, minutes=0, every_minutes=0)
    outcome = run(
        Workload(MIX.arrival, MIX.duration, MIX.shape, MIX.shapes, np.ones(len(MIX), bool)),
        CUBES,
        elastic,
        queue="easy",
        interrupt=0.0,
        migration=moving,
    )
    ended = np.isfinite(outcome.end)
    assert outcome.moves.sum() > 0
    np.testing.assert_allclose(held(outcome), (MIX.size * MIX.duration)[ended].sum(), rtol=1e-6)

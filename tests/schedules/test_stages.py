"""Stages are a partition of the layers, and the training layout a permutation of the canonical one."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from schedules.actions import from_csv
from schedules.families import make
from schedules.stages import StageLayout, split_layers
from tests.oracles import other_software

GRID = [(layers, stages) for layers in (1, 2, 3, 4, 5, 7, 8, 12, 13, 32) for stages in (1, 2, 3, 4, 6, 8, 16)]


@pytest.mark.parametrize(("layers", "stages"), GRID)
def test_a_balanced_partition(layers, stages):
    parts = split_layers(layers, stages)
    assert len(parts) == stages
    assert [number for part in parts for number in part] == list(range(layers))
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1
    # The first stage has the embedding too and the last the head, so neither gets what is left over.
    if stages > 2 and layers % stages <= stages - 2:
        assert counts[0] == counts[-1] == layers // stages


def test_partition_by_hand():
    assert split_layers(5, 4) == (range(0, 1), range(1, 3), range(3, 4), range(4, 5))
    assert split_layers(6, 4) == (range(0, 1), range(1, 3), range(3, 5), range(5, 6))
    assert split_layers(2, 4) == (range(0, 0), range(0, 1), range(1, 2), range(2, 2))


def layouts():
    for layers, ranks in ((1, 2), (8, 4), (13, 2)):
        yield StageLayout.of(make("1f1b", ranks=ranks, microbatches=2), layers)
        yield StageLayout.of(make("interleaved_1f1b", ranks=ranks, microbatches=2, chunks=3), layers)
        yield StageLayout.of(from_csv(other_software.zbv(ranks, 2)), layers)
    # A rank with three stages beside ranks with one and two.
    yield StageLayout(split_layers(9, 6), (0, 1, 0, 2, 0, 2), 3)


@pytest.mark.parametrize("layout", list(layouts()), ids=lambda layout: f"{layout.layers[-1].stop}-{layout.placement}")
def test_there_and_back(layout):
    layers = layout.layers[-1].stop
    tree = {
        "kernel": np.arange(1, 1 + layers * 6, dtype=np.float32).reshape(layers, 2, 3),
        "scale": np.arange(1, 1 + layers, dtype=np.float32),
    }
    staged = jax.jit(layout.to_stages)(tree)
    shape = layout.table.shape
    assert jax.tree.map(np.shape, staged) == {"kernel": (*shape, 2, 3), "scale": shape}
    kernel = np.asarray(staged["kernel"])
    for rank, chunk, j in np.ndindex(*shape):
        number = layout.table[rank, chunk, j]
        want = tree["kernel"][number] if number >= 0 else np.zeros((2, 3))
        np.testing.assert_array_equal(kernel[rank, chunk, j], want)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(layout.to_layers)(staged), tree)


@pytest.mark.parametrize(
    ("placement", "pipelines", "loans"),
    [
        ((0, 1, 2), 1, ()),
        ((0, 1, 2, 2, 1, 0), 2, ((0, 1, ((0, 2), (1, 1), (2, 0))),)),
        # Rank 0 lends its one chunk to both others, one after the other.
        ((0, 1, 2), 3, ((0, 0, ((0, 1),)), (0, 0, ((0, 2),)))),
    ],
)
def test_borrowed_chunks(placement, pipelines, loans):
    layout = StageLayout(split_layers(5, len(placement) // pipelines) * pipelines, placement, 3, pipelines)
    assert tuple((loan.owner, loan.chunk, loan.pairs) for loan in layout.borrowed) == loans
    assert sorted(layout.table[layout.table >= 0]) == list(range(5))
    assert sorted(layout.numbers[layout.numbers >= 0]) == sorted([*range(5)] * pipelines)
    for loan in layout.borrowed:
        for lender, borrower in loan.pairs:
            assert (layout.numbers[borrower, loan.chunk] == layout.table[lender, loan.owner]).all()


@pytest.mark.parametrize("layout", list(layouts()), ids=lambda layout: f"{layout.layers[-1].stop}-{layout.placement}")
def test_every_layer_once_on_the_rank_of_its_stage(layout):
    table = layout.table
    assert table.dtype == np.int32
    assert sorted(table[table >= 0]) == list(range(layout.layers[-1].stop))
    for stage, numbers in enumerate(layout.layers):
        row = table[layout.placement[stage], layout.chunk_of[stage]]
        assert list(row[row >= 0]) == list(numbers)


def test_kinds_and_chunks():
    layout = StageLayout.of(from_csv(other_software.zbv(2, 1)), 3)
    assert layout.placement == (0, 1, 1, 0)
    assert layout.chunk_of == (0, 0, 1, 1)
    assert list(layout.kinds()) == [(True, 1, False), (False, 1, False), (False, 1, False), (False, 0, True)]
    assert list(StageLayout.of(make("gpipe", ranks=1, microbatches=1), 2).kinds()) == [(True, 2, True)]

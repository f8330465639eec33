"""Places in the ring against a simulation that writes down what is in each column."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from models import ModelConfig
from models.kv_cache import LayerCache, empty_cache

CONFIG = ModelConfig(layers=2, d_model=16, heads=4, kv_heads=2, d_ff=32, vocab_size=40)


@pytest.mark.parametrize("places", [5, 8])
def test_places_of_rows_that_begin_at_different_times(places):
    """Each step all rows write; a row begins anew at a step of its own, and may be as long as there are places."""
    begins = (0, 3, 7, places + 2)
    cache = empty_cache(CONFIG, len(begins), places)
    column, length = 0, np.zeros(len(begins), np.int32)
    held = np.full((len(begins), places), -1)
    for step in range(places + 2 + places):
        for row, begin in enumerate(begins):
            if step == begin:
                length[row], held[row] = 0, -1
            if step >= begin and length[row] < places:
                held[row, column] = length[row]
                length[row] += 1
            else:
                length[row], held[row] = 0, -1  # has ended: its slot is free
        column = (column + 1) % places
        now = cache._replace(column=jnp.asarray(column, jnp.int32), length_B=jnp.asarray(length))
        found = np.asarray(now.place_BT())
        assert np.array_equal(np.maximum(found, -1), held), step


def test_an_empty_cache_has_no_places():
    assert (np.asarray(empty_cache(CONFIG, 3, 8).place_BT()) < 0).all()


def test_writing_changes_the_columns_from_the_current_one():
    random = np.random.default_rng(0)
    keys, values = (jnp.asarray(random.random((2, 2, 8, size)), jnp.float32) for size in (4, 3))
    new_keys, new_values = (jnp.asarray(random.random((2, 3, 2, size)), jnp.float32) for size in (4, 3))
    cache = LayerCache(keys, values, jnp.asarray(2, jnp.int32)).written(new_keys, new_values)
    for before, new, after in zip((keys, values), (new_keys, new_values), cache.seen(), strict=True):
        wanted = np.swapaxes(np.array(before), 1, 2)
        wanted[:, 2:5] = new
        assert np.array_equal(after, wanted)

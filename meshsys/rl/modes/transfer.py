"""Parameters on their way from devices that train to others that sample."""

from __future__ import annotations

import time
from typing import Any

import jax
from jax.sharding import Mesh

from meshsys.rl.sampler import sampling_form
from meshsys.rl.update import PolicyUpdate

__all__ = ["Transfer"]

PyTree = Any


class Transfer:
    """The carrier between layouts that share no device.

    Each parameter is brought into canonical form where it is, and then copied; the next one follows when it has
    arrived, so that the training devices never hold a second copy of more than one.

    Attributes:
        moved_bytes, seconds, changed: see `meshsys.rl.sampler.Carrier`.
    """

    def __init__(self, update: PolicyUpdate, mesh: Mesh):
        self._shardings, dtypes = sampling_form(update.assembly, mesh)
        self._programs = update.canonical_programs(dtypes)
        self.moved_bytes, self.seconds, self.changed = 0, 0.0, 1.0

    def __call__(self, params: PyTree) -> PyTree:
        """The parameters, given in training form, on the other devices."""
        begun = time.perf_counter()

        def leaf(program: Any, sharding: Any, param: jax.Array) -> jax.Array:
            return jax.block_until_ready(jax.device_put(program(param), sharding))

        carried = jax.tree.map(leaf, self._programs, self._shardings, params)
        self.seconds = time.perf_counter() - begun
        shards = (shard for param in jax.tree.leaves(carried) for shard in param.addressable_shards)
        self.moved_bytes = sum(shard.data.nbytes for shard in shards)
        return carried

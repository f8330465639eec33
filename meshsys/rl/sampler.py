"""Responses of the newest policy, sampled in a layout of their own over the devices that train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from meshsys.assemble import Assembly
from meshsys.reshard import Mode, Resharder, plan_reshard
from meshsys.sharding import canonical_specs, named, placed
from models.generation import Generator, Piece, Request
from schedules.program import compiler_options

__all__ = ["Sampler"]

PyTree = Any


class Sampler:
    """Generates with parameters that are resharded from the training layout.

    Args:
        params: shapes and shardings of the parameters in training form.
        mesh: of the sampling layout, over the same devices.
        slots: sequences that are sampled at once, at most.

    Attributes:
        version: of the parameters that it has; -1 before the first `update`.
        plan: how they come here.
        last: what the last update took.
    """

    def __init__(self, assembly: Assembly, params: PyTree, mesh: Mesh, *, slots: int, mode: Mode = "copy"):
        decoder, sizes = assembly.decoder, dict(mesh.shape)
        shapes = jax.eval_shape(decoder.init, jax.eval_shape(jax.random.key, 0))
        shardings = named(mesh, canonical_specs(decoder.logical_axes(), shapes, sizes))
        dtypes = jax.tree.map(lambda leaf: leaf.dtype, jax.eval_shape(decoder.cast, shapes))
        self.plan = plan_reshard(params, shardings, dtype=dtypes, source_stages=assembly.program.layout)
        self._reshard = Resharder(self.plan, mode)
        self._decoder, self._mesh, self._slots = decoder, mesh, slots
        self._generator: Generator | None = None
        self.version = -1

    @property
    def reshard_seconds(self) -> float:
        """That the last update took."""
        return self._reshard.last.seconds if self._reshard.last else 0.0

    @property
    def reshard_changed(self) -> float:
        """The share of the parameters that the last update sent."""
        return self._reshard.last.changed if self._reshard.last else 1.0

    @property
    def compilations(self) -> int:
        """Programs that were compiled so far."""
        return self._generator.compilations if self._generator else 0

    def update(self, params: PyTree, version: int) -> None:
        """Takes the parameters, in training form, of the policy after so many updates."""
        resharded = self._reshard(params)
        if self._generator is None:
            options = compiler_options(self._mesh)
            self._generator = Generator(
                self._decoder, resharded, slots=self._slots, place=placed(self._mesh), compiler_options=options
            )
        else:
            self._generator.update(resharded)
        self.version = version

    def sample(self, requests: Sequence[Request]) -> Iterator[Piece]:
        """The responses' tokens as they come, of the policy of `version`."""
        assert self._generator is not None, "update comes first"
        return iter(self._generator.start(requests))

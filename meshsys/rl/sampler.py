"""Responses of the newest policy, sampled in a layout of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from meshsys.assemble import Assembly
from meshsys.reshard import Mode, Resharder, plan_reshard
from meshsys.sharding import canonical_specs, named, placed
from models.generation import Generation, Generator, Piece, Request
from schedules.program import compiler_options

__all__ = ["Carrier", "OnSameDevices", "Sampler", "sampling_form"]

PyTree = Any


class Carrier(Protocol):
    """Brings parameters from the training layout to the sampling layout.

    Attributes:
        moved_bytes: that arrive at devices, or leave them if that is more.
        seconds: that the last time took.
        changed: the share of the parameters that were sent then.
    """

    moved_bytes: int
    seconds: float
    changed: float

    def __call__(self, params: PyTree) -> PyTree: ...


class OnSameDevices:
    """The carrier for a sampling layout over the devices that train: `meshsys.reshard`.

    Args:
        params: shapes and shardings in training form.
        mesh: of the sampling layout.
    """

    def __init__(self, assembly: Assembly, params: PyTree, mesh: Mesh, mode: Mode = "copy"):
        shardings, dtypes = sampling_form(assembly, mesh)
        plan = plan_reshard(params, shardings, dtype=dtypes, source_stages=assembly.program.layout)
        self._reshard, self.moved_bytes = Resharder(plan, mode), plan.moved_bytes
        self.seconds, self.changed = 0.0, 1.0

    def __call__(self, params: PyTree) -> PyTree:
        resharded, last = self._reshard(params), self._reshard.last
        assert last is not None
        self.seconds, self.changed = last.seconds, last.changed
        return resharded


def sampling_form(assembly: Assembly, mesh: Mesh) -> tuple[PyTree, PyTree]:
    """Shardings and dtypes of the parameters on a sampling mesh, in canonical form."""
    decoder = assembly.decoder
    shapes = jax.eval_shape(decoder.init, jax.eval_shape(jax.random.key, 0))
    shardings = named(mesh, canonical_specs(decoder.logical_axes(), shapes, dict(mesh.shape)))
    return shardings, jax.tree.map(lambda leaf: leaf.dtype, jax.eval_shape(decoder.cast, shapes))


class Sampler:
    """Generates with parameters that come from the training layout.

    Args:
        mesh: of the sampling layout.
        carrier: what brings parameters to it.
        slots: sequences that are sampled at once, at most.
        compacts: see `models.generation.Generator`.

    Attributes:
        version: of the parameters that it has; -1 before the first `update`.
        carrier: as given.
    """

    def __init__(self, assembly: Assembly, mesh: Mesh, carrier: Carrier, *, slots: int, compacts: bool = False):
        self._decoder, self._mesh, self.carrier = assembly.decoder, mesh, carrier
        self._options: dict[str, Any] = {
            "slots": slots,
            "compacts": compacts,
            "compiler_options": compiler_options(mesh),
        }
        self._generator: Generator | None = None
        self.version = -1

    @property
    def compilations(self) -> int:
        """Programs that were compiled so far."""
        return self._generator.compilations if self._generator else 0

    def update(self, params: PyTree, version: int) -> None:
        """Takes the parameters, in training form, of the policy after so many updates."""
        self.take(self.carrier(params), version)

    def take(self, carried: PyTree, version: int) -> None:
        """The second half of `update`: takes what the carrier brought.

        What is being sampled goes on with these parameters; keys and values that it has stay those of older ones.
        """
        if self._generator is None:
            self._generator = Generator(self._decoder, carried, place=placed(self._mesh), **self._options)
        else:
            self._generator.update(carried)
        self.version = version

    def start(self, requests: Sequence[Request], every: int, room: tuple[int, int]) -> Generation:
        """Begins to sample what others are added to; see `Generator.start`."""
        assert self._generator is not None, "update comes first"
        return self._generator.start(requests, every=every, room=room)

    def sample(self, requests: Sequence[Request]) -> Iterator[Piece]:
        """The responses' tokens as they come, of the policy of `version`."""
        assert self._generator is not None, "update comes first"
        return iter(self._generator.start(requests))

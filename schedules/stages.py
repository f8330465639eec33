"""Which layers a stage holds, and the layout of their parameters on the `pipe` axis.

Shapes: L global layers, P ranks, V chunks a rank, J layer places a chunk (the most that any stage holds).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from schedules.actions import Schedule

__all__ = ["Borrowed", "LayerRun", "StageKind", "StageLayout", "split_layers"]

StageKind = tuple[bool, int, bool]
"""What a stage runs: whether it has the embedding, its number of layers, whether it has the head."""


@dataclass(frozen=True, order=True)
class LayerRun:
    """Successive layers of a stage that run the same code.

    Attributes:
        block: the name of that code.
        count: number of layers.
        at: the first one's place among the stage's layers.
        block_at: its place among those that run this code.
        parts_at: the parts of the parameters that they have, and the first one's place among those that have it.
    """

    block: str
    count: int
    at: int
    block_at: int
    parts_at: tuple[tuple[str, int], ...]


def split_layers(layers: int, stages: int) -> tuple[range, ...]:
    """Divides layers 0..layers-1 among the stages, in order, as evenly as it goes.

    What is left over goes to the stages in the middle, since the first has the embedding and the last the head
    to run as well. With fewer layers than stages some stages hold none.
    """
    base, extra = divmod(layers, stages)
    middle_first = sorted(range(stages), key=lambda stage: (abs(stage - (stages - 1) / 2), stage))
    counts = [base] * stages
    for stage in middle_first[:extra]:
        counts[stage] += 1
    ends = np.cumsum(counts)
    return tuple(range(int(end) - count, int(end)) for end, count in zip(ends, counts, strict=True))


@dataclass(frozen=True)
class Borrowed:
    """Chunk `owner` of each pair's first rank is chunk `chunk` of its second."""

    owner: int
    chunk: int
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class StageLayout:
    """Where each layer's parameters are.

    The canonical form of a stacked parameter is [L, ...]; the training form is [P, V, J, ...], sharded over `pipe`
    on its first axis. Places that no layer takes hold zeros.

    With several pipelines the first one's stages own the parameters; the stages of the others borrow them for a step
    (`borrowed`), so that every layer is stored once.

    Layers may differ in the parts that their parameters have; a part's stack has the layers that hold it (`part`).

    Attributes:
        layers: `layers[stage]` are the stage's global layer numbers.
        placement: `placement[stage]` is its rank.
        pipelines: see `schedules.actions.Schedule`.
        holders: the layers that hold a part, by its name; a part that is not named is in every layer.
    """

    layers: tuple[range, ...]
    placement: tuple[int, ...]
    ranks: int
    pipelines: int = 1
    holders: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, schedule: Schedule, layers: int, holders: Mapping[str, tuple[int, ...]] | None = None) -> StageLayout:
        parts = split_layers(layers, schedule.depth) * schedule.pipelines
        held = tuple((holders or {}).items())
        return cls(parts, schedule.placement, schedule.ranks, schedule.pipelines, held)

    def part(self, name: str) -> StageLayout:
        """The layout of a part's stack, whose entries are numbered by themselves."""
        layers = self._holders.get(name)
        if layers is None:
            return self

        def entries(held: range) -> range:
            inside = [entry for entry, layer in enumerate(layers) if layer in held]
            return range(inside[0], inside[-1] + 1) if inside else range(0)

        return replace(self, layers=tuple(map(entries, self.layers)), holders=())

    @cached_property
    def _holders(self) -> dict[str, tuple[int, ...]]:
        everywhere = {layer for layers in self.layers for layer in layers}
        return {name: layers for name, layers in self.holders if set(layers) != everywhere}

    @cached_property
    def part_places(self) -> Mapping[str, int]:
        """J of each part that is not in every layer."""
        return {name: self.part(name).table.shape[2] for name in self._holders}

    def runs(self, stage: int, blocks: Mapping[frozenset[str], str]) -> tuple[LayerRun, ...]:
        """A stage's layers; `blocks` names the code of layers by those parts of theirs that are not in every layer."""
        found: list[LayerRun] = []
        for place, layer in enumerate(self.layers[stage]):
            block = blocks[self.signature(layer)]
            if found and found[-1].block == block:
                found[-1] = replace(found[-1], count=found[-1].count + 1)
                continue
            before = self.layers[stage][:place]
            parts = tuple(
                (name, sum(one in self._holders[name] for one in before)) for name in sorted(self.signature(layer))
            )
            ran = sum(run.count for run in found if run.block == block)
            found.append(LayerRun(block, 1, place, ran, parts))
        return tuple(found)

    def held(self, parts: Mapping[str, Any], signature: frozenset[str]) -> dict[str, Any]:
        """Of everything that is by part, what belongs to layers of a signature."""
        return {name: part for name, part in parts.items() if name in signature or name not in self._holders}

    def signature(self, layer: int) -> frozenset[str]:
        """The parts of a layer that are not in every layer."""
        return frozenset(name for name, layers in self._holders.items() if layer in layers)

    @property
    def depth(self) -> int:
        return len(self.layers) // self.pipelines

    @cached_property
    def chunk_of(self) -> tuple[int, ...]:
        """`chunk_of[stage]`: its position among the stages of its rank."""
        return tuple(
            sum(owner == rank for owner in self.placement[:stage]) for stage, rank in enumerate(self.placement)
        )

    @cached_property
    def table(self) -> np.ndarray:
        """Global layer numbers of the places that own parameters, int32 [P, V, J], -1 in unused places."""
        return self._places(self.depth)

    @cached_property
    def numbers(self) -> np.ndarray:
        """Global layer numbers of all places, borrowed ones too, int32 [P, U, J], -1 in unused ones."""
        return self._places(len(self.layers))

    def _places(self, stages: int) -> np.ndarray:
        places = max(1, max(len(layers) for layers in self.layers))
        table = np.full((self.ranks, 1 + max(self.chunk_of[:stages]), places), -1, np.int32)
        for layers, rank, chunk in zip(self.layers[:stages], self.placement, self.chunk_of, strict=False):
            table[rank, chunk, : len(layers)] = layers
        return table

    @cached_property
    def borrowed(self) -> tuple[Borrowed, ...]:
        """How the stages that own no parameters come by them."""
        pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for stage in range(self.depth, len(self.layers)):
            owner = stage % self.depth
            chunks = self.chunk_of[owner], self.chunk_of[stage]
            pairs.setdefault(chunks, []).append((self.placement[owner], self.placement[stage]))
        # A permutation has each rank once as sender: one that lends a chunk twice does so in turn.
        found = []
        for (owner, chunk), wanted in sorted(pairs.items()):
            while wanted:
                now: list[tuple[int, int]] = []
                for lender, borrower in wanted:
                    if all(lender != one and borrower != other for one, other in now):
                        now.append((lender, borrower))
                wanted = [pair for pair in wanted if pair not in now]
                found.append(Borrowed(owner, chunk, tuple(now)))
        return tuple(found)

    def to_stages(self, stacked: Any) -> Any:
        """[L, ...] -> [P, V, J, ...] on every leaf of a stack; `part` has each part's layout."""
        used = jnp.asarray(self.table >= 0)

        def leaf(array: jax.Array) -> jax.Array:
            taken = array[np.maximum(self.table, 0)]
            return jnp.where(used.reshape(used.shape + (1,) * (array.ndim - 1)), taken, jnp.zeros_like(taken))

        return jax.tree.map(leaf, stacked)

    def to_layers(self, staged: Any) -> Any:
        """[P, V, J, ...] -> [L, ...] on every leaf."""
        flat = self.table.reshape(-1)
        position = np.argsort(np.where(flat < 0, flat.size, flat), kind="stable")[: int((flat >= 0).sum())]
        return jax.tree.map(lambda array: array.reshape(flat.size, *array.shape[3:])[position], staged)

    def kinds(self) -> Sequence[StageKind]:
        """What each stage runs."""
        return [
            (stage % self.depth == 0, len(layers), stage % self.depth == self.depth - 1)
            for stage, layers in enumerate(self.layers)
        ]

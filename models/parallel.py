"""Which manual mesh axes the blocks of a network are run over, and how a sequence is divided over one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["WHOLE", "ManualAxes", "zigzag_order"]


@dataclass(frozen=True)
class ManualAxes:
    """Names of `shard_map` axes that are bound around the blocks; None where the blocks have all of it.

    Attributes:
        expert: divides the experts of a mixture, and the batch.
        context: divides every sequence, as `zigzag_order` has it.
    """

    expert: str | None = None
    context: str | None = None


WHOLE = ManualAxes()
"""Nothing is divided by manual axes."""


def zigzag_order(length: int, parts: int) -> np.ndarray:
    """The places of a sequence in the order in which `parts` devices hold them, int32 [length].

    Device i has chunks i and 2 parts - 1 - i of 2 parts equal ones, so that under a causal mask all have equal work.

    Args:
        length: a multiple of `2 * parts`, unless there is one part.
    """
    places = np.arange(length, dtype=np.int32)
    if parts == 1:
        return places
    if length % (2 * parts):
        raise ValueError(f"a sequence of {length} is not a multiple of twice {parts}, the devices that share it")
    chunks = places.reshape(2 * parts, -1)
    return np.concatenate([chunks[[part, 2 * parts - 1 - part]].reshape(-1) for part in range(parts)])

"""Which manual mesh axes the blocks of a network are run over."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WHOLE", "ManualAxes"]


@dataclass(frozen=True)
class ManualAxes:
    """Names of `shard_map` axes that are bound around the blocks; None where the blocks have all of it.

    Attributes:
        expert: divides the experts of a mixture, and the batch.
        context: divides every sequence, as `models.attention.zigzag_order` has it.
    """

    expert: str | None = None
    context: str | None = None


WHOLE = ManualAxes()
"""Nothing is divided by manual axes."""

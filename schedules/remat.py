"""Remat policies by name: what F keeps for the backward, and what I computes again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax

__all__ = ["Remat"]

_PRODUCTS = ("grouped_product",)  # names of results of matmuls that are no `dot_general`


@dataclass(frozen=True)
class Remat:
    """A parsed `pipeline.remat`.

    Attributes:
        kind: `none` keeps what the backward needs; `full` keeps a layer's input alone; `dots` keeps the results of
            matmuls; `names` keeps the named values; `offload` keeps them in host memory.
        names: for `names` and `offload`, the model's names (`jax.ad_checkpoint.checkpoint_name`).
    """

    kind: Literal["none", "full", "dots", "names", "offload"]
    names: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, saveable: Sequence[str]) -> Remat:
        """Reads `none`, `full`, `dots`, `names:a,b` or `offload:a,b`.

        Raises:
            ValueError: another word, no names, or a name that is not among `saveable`.
        """
        kind, colon, rest = text.partition(":")
        if kind in ("none", "full", "dots") and not colon:
            return cls(kind)  # type: ignore[arg-type]
        if kind in ("names", "offload"):
            names = tuple(name.strip() for name in rest.split(",") if name.strip())
            unknown = [name for name in names if name not in saveable]
            if names and not unknown:
                return cls(kind, tuple(dict.fromkeys(names)))  # type: ignore[arg-type]
            what = f"names nothing that the model marks as {unknown[0]!r}" if names else "names nothing"
            raise ValueError(f"{what}; use one or more of {', '.join(saveable)}")
        raise ValueError(f"is not a policy; use none, full, dots, {kind_hint('names')} or {kind_hint('offload')}")

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(self.names)}" if self.names else self.kind

    @property
    def policy(self) -> Callable | None | str:
        """What `schedules.backward.split` takes."""
        policies = jax.checkpoint_policies
        if self.kind == "none":
            return "none"
        if self.kind == "full":
            return None
        if self.kind == "dots":
            return policies.save_from_both_policies(policies.dots_saveable, policies.save_only_these_names(*_PRODUCTS))
        if self.kind == "names":
            return policies.save_only_these_names(*self.names)
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(self.names),
            offload_src="device",
            offload_dst="pinned_host",
        )


def kind_hint(kind: str) -> str:
    return f"{kind}:a,b"

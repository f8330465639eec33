"""Targets of an export, by name."""

from __future__ import annotations

import difflib

from meshsys.cluster.export import kueue, ray, slice_resource, slurm, xpk
from meshsys.cluster.export.base import Target
from meshsys.cluster.jobs import Orders
from meshsys.errors import ConfigError

__all__ = ["TARGETS", "export"]

TARGETS: dict[str, Target] = {
    "kueue": kueue.export,
    "slice": slice_resource.export,
    "xpk": xpk.export,
    "slurm": slurm.export,
    "ray": ray.export,
}
"""By the names that `--to` takes."""


def export(orders: Orders, target: str) -> dict[str, str]:
    """What the target takes, by the names of files.

    Raises:
        ConfigError: an unknown target, or a job that it cannot run.
    """
    if target not in TARGETS:
        near = difflib.get_close_matches(target, TARGETS, 1)
        hint = f"did you mean {near[0]}?" if near else f"use {', '.join(TARGETS)}"
        raise ConfigError(f"--to={target} is not a target; {hint}")
    return TARGETS[target](orders)

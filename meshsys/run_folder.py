"""Runs by their folders, or by their names under `runs/`."""

from __future__ import annotations

import difflib
from pathlib import Path

from meshsys.errors import ConfigError

__all__ = ["run_folder"]

_RUNS = Path("runs")


def run_folder(name: str) -> Path:
    """The folder of a run.

    Raises:
        ConfigError: there is none; with the nearest name.
    """
    for folder in (Path(name), _RUNS / name):
        if folder.is_dir():
            return folder
    near = difflib.get_close_matches(name, [folder.name for folder in _RUNS.glob("*/")], 1)
    hint = f"did you mean {_RUNS / near[0]}?" if near else "give a folder that `meshsys train` wrote"
    raise ConfigError(f"the run {name} does not exist; {hint}")

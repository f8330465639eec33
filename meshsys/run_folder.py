"""The folders of runs: found by name, held by one process, of one model."""

from __future__ import annotations

import dataclasses
import difflib
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshsys.errors import ConfigError

if TYPE_CHECKING:
    from meshsys.config import Config

__all__ = ["check_same_run", "locked", "run_folder"]

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


def check_same_run(config: Config, meta: dict[str, Any], command: Literal["train", "rl"] = "train") -> None:
    """Sees to it that a run can go on from a checkpoint.

    Raises:
        ConfigError: its meta is of another command's run, or of another model than the run's.
    """
    other = "rl" if command == "train" else "train"
    if ("rl" in meta) != (command == "rl"):
        raise ConfigError(
            f"run.dir={config.run_dir} holds a run of `meshsys {other}`; begin a new one under another run.name, with "
            "model.pretrained set to what `meshsys export` makes of it"
        )
    for name, now in json.loads(json.dumps(dataclasses.asdict(config.model))).items():
        then = meta["model"].get(name, now)
        if then != now and name != "pretrained":
            raise ConfigError(
                f"model.{name}={now}, but the checkpoints in {config.run_dir} are of a model with {then}; set it back, "
                "or begin a new run under another run.name"
            )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the run's folder and keeps other processes out of it."""
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise ConfigError(f"run.dir={folder} cannot be written: {error.strerror}; set another run.dir") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run.dir={folder} is in use by another process; wait for it, or set another run.name"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield

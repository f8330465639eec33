"""The parent of one job's process: it stays when the manager goes, and records how the job ended.

    python -m meshsys.cluster.guard STATE TOKEN

It registers before it starts anything, in a transaction that fails when the manager has given the attempt up; so two
guards never run one job. It holds little memory: nothing but the standard library.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

from meshsys.cluster.processes import identity
from meshsys.cluster.store import Store

__all__ = ["main"]

_UNWANTED = 75  # the exit code of a guard that came too late
_CANNOT_START = 127


def main(folder: str, token: str) -> int:
    """Runs an attempt at a job; returns its exit code."""
    # A signal to the group or to all processes of the job reaches the job too, which then decides what to do.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _ignore)
    store = Store(Path(folder))
    launch = store.register(token, os.getpid(), identity(os.getpid()))
    if launch is None:
        return _UNWANTED
    try:
        process = subprocess.Popen(launch["argv"], cwd=launch["cwd"], env=os.environ | launch["env"])
    except OSError as error:
        print(f"meshsys: {launch['argv'][0]} cannot be started: {error}", file=sys.stderr, flush=True)
        code = _CANNOT_START
    else:
        code = process.wait()
    store.finish(token, code)
    return code if code >= 0 else 128 - code


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler, unlike SIG_IGN, is not handed on to the job."""


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main(*sys.argv[1:]))

"""A job for tests: takes steps, records them, goes on where it was, and stops when asked.

    python fake_job.py STEPS SECONDS [--crash AT TIMES] [--code N] [--deaf]

It leaves a file `twice` in its folder if another one was at work there.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    steps, pause = int(sys.argv[1]), float(sys.argv[2])
    rest = sys.argv[3:]
    folder = Path(os.environ["MESHSYS_RUN_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (folder / "twice").touch()
        return 99
    starts = folder / "starts"
    with starts.open("a") as file:
        file.write(f"{os.environ['MESHSYS_TOPOLOGY']} {os.environ['JAX_NUM_CPU_DEVICES']} {os.getpid()}\n")
    asked = []
    if "--deaf" in rest:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    metrics = folder / "metrics.jsonl"
    taken = metrics.read_text().count("\n") if metrics.exists() else 0
    while taken < steps and not asked:
        if "--crash" in rest and taken == int(rest[rest.index("--crash") + 1]):
            if len(starts.read_text().splitlines()) <= int(rest[rest.index("--crash") + 2]):
                print("about to crash", flush=True)
                os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(pause)
        taken += 1
        with metrics.open("a") as file:
            file.write(json.dumps({"step": taken, "loss": 1 / taken, "step_seconds": pause}) + "\n")
    if asked:
        return 143
    if "--code" in rest:
        print(f"meshsys: error: what it says with {rest[-1]}", flush=True)
        return int(rest[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The torus and the queue, for people and in JSON."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from meshsys.cluster.advance import Advance, advance
from meshsys.cluster.executor import log_file, manager_pid
from meshsys.cluster.store import ENDED, Job, Store
from meshsys.torus import Topology
from meshsys.torus.shapes import shape_text

__all__ = ["LiveView", "PlainView", "make_view", "status_json", "status_text", "topology_of"]

_MARKS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_COLOURS = {"done": "green", "failed": "red", "cancelled": "yellow", "running": "cyan", "starting": "cyan"}
_SHOWN_ENDED = 20  # jobs that have ended, in the live table
_PLAIN_SECONDS = 10.0


def status_json(store: Store) -> dict[str, Any]:
    """All that is known: the torus, its chips, the jobs, the manager."""
    topology = topology_of(store)
    failed, jobs = store.failed(), store.jobs()
    coords = list(topology.coords()) if topology else []
    free, manager = _free(topology, jobs, failed), manager_pid(store)
    found = []
    for job in jobs:
        now = advance(job.spec)
        nodes = job.grant["nodes"] if job.grant else []
        found.append(
            {
                "name": job.name,
                "state": job.state,
                "reason": _note(job, free if manager else None),
                "asked": list(job.spec.shape),
                "slice": job.grant["shape"] if job.grant else None,
                "chips": [list(coords[node]) for node in nodes],
                "priority": job.spec.priority,
                "step": now.step,
                "steps": job.spec.steps or None,
                "loss": now.loss,
                "starts": job.starts,
                "crashes": job.crashes,
                "pid": job.pid,
                "submitted": job.submitted,
                "began": job.began,
                "ended": job.ended,
                "run_dir": job.spec.run_dir,
                "log": str(log_file(store.folder, job.name)),
            }
        )
    return {
        "cluster": json.loads(store.get("cluster") or "null"),
        "manager": manager,
        "chips": {
            "all": len(coords),
            "taken": sum(len(job.grant["nodes"]) for job in jobs if job.grant),
            "failed": [list(coords[node]) for node in sorted(failed)],
            "free": free,
        },
        "jobs": found,
    }


def status_text(store: Store, width: int | None = None) -> str:
    """The torus and the queue in plain text."""
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(_picture(store, store.jobs(), all_ended=True))
        pid = manager_pid(store)
        console.print(f"manager: pid {pid}" if pid else "no manager: `meshsys cluster run JOBS.yaml` goes on")
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def topology_of(store: Store) -> Topology | None:
    """Of chips; None before the first jobs came."""
    cluster = json.loads(store.get("cluster") or "null")
    return Topology(Topology.parse(cluster["topology"]).shape) if cluster else None


def _free(topology: Topology | None, jobs: Sequence[Job], failed: set[int]) -> int:
    taken = {node for job in jobs if job.grant for node in job.grant["nodes"]}
    return topology.size - len(taken | failed) if topology else 0


def _picture(store: Store, jobs: Sequence[Job], *, all_ended: bool) -> Group:
    marks = {job.id: _MARKS[place % len(_MARKS)] for place, job in enumerate(j for j in jobs if j.active)}
    table = Table(box=None, pad_edge=False)
    for name in ("", "job", "state", "slice"):
        table.add_column(name, no_wrap=name != "state")
    for name in ("step", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note", overflow="ellipsis", no_wrap=not all_ended)
    ended = [job.id for job in jobs if job.state in ENDED]
    hidden = set() if all_ended else set(ended[: max(0, len(ended) - _SHOWN_ENDED)])
    topology, failed = topology_of(store), store.failed()
    free = _free(topology, jobs, failed) if manager_pid(store) else None
    for job in jobs:
        if job.id not in hidden:
            state = Text(job.state, _COLOURS.get(job.state, ""))
            cells = (*_cells(job, advance(job.spec)), _note(job, free))
            table.add_row(marks.get(job.id, ""), job.name, state, *cells)
    parts: list[Any] = [table]
    if hidden:
        parts.append(f"and {len(hidden)} that ended before")
    if topology is not None:
        parts += ["", Text(_torus(topology, jobs, marks, failed))]
    return Group(*parts)


def _cells(job: Job, now: Advance) -> tuple[str, str, str]:
    """Slice, step and loss."""
    shape = job.grant["shape"] if job.grant else job.spec.shape
    step = f"{now.step}/{job.spec.steps}" if job.spec.steps else str(now.step or "")
    return shape_text(shape), step, "" if now.loss is None else f"{now.loss:.4f}"


def _note(job: Job, free: int | None) -> str:
    """What else there is to say, above all why a job waits; `free` chips, None if nobody gives them away."""
    if job.wish:
        return {"cancel": "is asked to end", "stop": "is asked to stop", "lost": "lost a chip"}[job.wish]
    if job.state != "queued":
        return job.reason or (f"start {job.starts}" if job.starts > 1 else "")
    if job.not_before > time.time():
        return job.reason
    if free is None:
        return job.reason
    size = math.prod(job.spec.shape)
    short = f"{free} of the {size} chips it needs are free" if free < size else "no free place of its shape"
    return "; ".join(filter(None, (job.reason, short)))


def _torus(topology: Topology, jobs: Sequence[Job], marks: dict[int, str], failed: set[int]) -> str:
    """One picture a layer of the third dimension, side by side: rows are x, columns y."""
    chips = np.full(topology.size, ".")
    for job in jobs:
        if job.grant:
            chips[job.grant["nodes"]] = marks[job.id]
    chips[list(failed)] = "#"
    dims = topology.shape
    rows, columns = (1, dims[0]) if len(dims) == 1 else dims[:2]
    layers = chips.reshape(rows, columns, -1)
    heads = [f"z={z}" if len(dims) == 3 else "" for z in range(layers.shape[2])]
    wide = max(2 * columns - 1, *(map(len, heads)))
    lines = ["   ".join(f"{head:{wide}}" for head in heads)] if len(dims) == 3 else []
    for row in range(rows):
        lines.append("   ".join(f"{' '.join(layers[row, :, z]):{wide}}" for z in range(layers.shape[2])))
    legend = "  ".join([*(f"{marks[job.id]} {job.name}" for job in jobs if job.id in marks), ". free"])
    return "\n".join([*lines, f"{legend}  # failed" if failed else legend])


# While jobs run


class LiveView:
    """A table on a terminal, drawn anew as things change."""

    def __init__(self) -> None:
        self._live = Live(console=Console(highlight=False), refresh_per_second=4, auto_refresh=False)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()

    def update(self, store: Store, jobs: list[Job]) -> None:
        self._live.update(_picture(store, jobs, all_ended=False), refresh=True)


class PlainView:
    """A line for whatever happens, and now and then one for each job that has got on."""

    def __init__(self, store: Store) -> None:
        self._seen = max((event[0] for event in store.events()), default=0)
        self._steps: dict[str, int] = {}
        self._told = time.monotonic()

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def update(self, store: Store, jobs: list[Job]) -> None:
        for number, at, job, what in store.events(self._seen):
            self._seen = number
            print(f"{time.strftime('%T', time.localtime(at))}  {job or ''}: {what}", flush=True)
        if time.monotonic() - self._told < _PLAIN_SECONDS:
            return
        self._told = time.monotonic()
        for entry in jobs:
            now = advance(entry.spec)
            if entry.active and now.step != self._steps.get(entry.name, 0):
                self._steps[entry.name] = now.step
                _, step, loss = _cells(entry, now)
                print(f"{time.strftime('%T')}  {entry.name}: step {step}  loss {loss or '-'}", flush=True)


def make_view(store: Store) -> LiveView | PlainView:
    """What suits standard output."""
    return LiveView() if Console().is_terminal else PlainView(store)

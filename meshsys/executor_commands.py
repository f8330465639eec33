"""`meshsys cluster run` and the commands that look at it, or steer it."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshsys.arguments import command
from meshsys.errors import ConfigError

if TYPE_CHECKING:
    from meshsys.cluster.jobs import Orders
    from meshsys.cluster.store import Store

__all__ = ["add_executor_commands"]

_STATE = "runs/cluster"
_HAND_OVER = 1.0  # seconds in which a manager that is about to go is gone


def add_executor_commands(commands: Any) -> None:
    """Adds `run`, `submit`, `status`, `cancel`, `retry`, `fail`, `repair` and `export` to the cluster commands."""
    run = command(commands, "run", _run, "run jobs side by side on sub-slices of this machine's devices")
    submit = command(commands, "submit", _submit, "add jobs to the queue, for the manager that `run` is")
    export = command(commands, "export", _export, "write jobs as real clusters take them")
    export.add_argument("--to", metavar="TARGET", required=True, help="kueue, slice, xpk, slurm or ray")
    export.add_argument("--out", metavar="DIR", help="a folder for the files, which are printed without")
    for taker in (run, submit, export):
        taker.add_argument("jobs", metavar="JOBS", help="a YAML file, such as configs/jobs_example.yaml")
        example = "overrides, as cluster.policy=best"
        taker.add_argument("overrides", metavar="key=value", nargs="*", default=(), help=example)

    status = command(commands, "status", _status, "the torus, and the jobs on it and in the queue")
    status.add_argument("--json", action="store_true", help="as JSON")
    cancel = command(commands, "cancel", _cancel, "end a job; one that runs saves first")
    retry = command(commands, "retry", _retry, "put a job that failed or was cancelled into the queue again")
    for taker in (cancel, retry):
        taker.add_argument("job", metavar="JOB", nargs="+", help="its name")
    fail = command(commands, "fail", _fail, "take chips out of use; jobs on them restart elsewhere")
    repair = command(commands, "repair", _repair, "put chips back into use")
    for taker in (fail, repair):
        taker.add_argument("chips", metavar="CHIP", nargs="+", help="coordinates, as 1,0,1")
    for taker in (status, cancel, retry, fail, repair):
        taker.add_argument("--state", metavar="DIR", default=_STATE, help=f"cluster.state, by default {_STATE}")


def _run(args: argparse.Namespace) -> int:
    orders = _orders(args)

    from meshsys.cluster.executor import Manager, only_manager
    from meshsys.cluster.status import make_view

    store = _submitted(orders)
    for late in (False, True):
        with only_manager(store) as alone:
            if alone:
                manager = Manager(store, orders)
                with make_view(store) as view:
                    return manager.run(view)
        if not late:
            time.sleep(_HAND_OVER)
    return _handed_over(store)


def _handed_over(store: Store) -> int:
    from meshsys.cluster.executor import manager_pid

    print(f"the manager of {store.folder} (pid {manager_pid(store)}) runs the jobs; see `meshsys cluster status`")
    return 0


def _submit(args: argparse.Namespace) -> None:
    orders = _orders(args)

    from meshsys.cluster.executor import manager_pid

    store = _submitted(orders)
    if manager_pid(store) is None:
        print(f"no manager works in {store.folder}: `meshsys cluster run {args.jobs}` starts one")


def _export(args: argparse.Namespace) -> None:
    orders = _orders(args)

    from meshsys.cluster.export.registry import export
    from meshsys.files import writable, write_whole

    files = export(orders, args.to)
    if args.out is None:
        for name, text in files.items():
            print(f"# --- {name}\n{text}" if len(files) > 1 else text, end="")
        return
    folder = Path(args.out).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out={args.out} cannot be a folder: {error.strerror}; give another") from None
    paths = [writable(str(folder / name), "--out") for name in files]  # all, before the first is written
    for path, text in zip(paths, files.values(), strict=True):
        write_whole(path, text, "--out")
        print(path)


def _orders(args: argparse.Namespace) -> Orders:
    from meshsys.cluster.jobs import read_orders

    return read_orders(args.jobs, args.overrides)


def _submitted(orders: Orders) -> Store:
    """The store with the jobs in it; those that are new have been checked to the last."""
    from meshsys.cluster.jobs import check_training
    from meshsys.cluster.store import Store

    folder = Path(orders.cluster.state).expanduser()
    known: set[str] = set()
    if (folder / "cluster.db").exists():
        before = Store(folder)
        known = {job.name for job in before.jobs()}
        before.close()
    for spec in orders.specs:
        if spec.config and spec.name not in known:
            check_training(spec)
    store = Store(folder, create=True)
    added = store.submit(orders.torus, orders.specs)
    if added:
        print(f"{len(added)} job{'s' * (len(added) > 1)} queued: {', '.join(added)}", flush=True)
    return store


def _store(args: argparse.Namespace) -> Store:
    from meshsys.cluster.store import Store

    return Store(Path(args.state).expanduser())


def _status(args: argparse.Namespace) -> None:
    from meshsys.cluster.status import status_json, status_text

    store = _store(args)
    print(json.dumps(status_json(store), indent=2) if args.json else status_text(store))


def _cancel(args: argparse.Namespace) -> None:
    store = _store(args)
    _check_names(store, args.job)
    for name in args.job:
        was = store.cancel(name)
        assert was is not None
        if was.active:
            _needs_manager(store, f"{name} is asked to end")
        else:
            print(f"{name} is {'cancelled' if was.state == 'queued' else was.state}")


def _retry(args: argparse.Namespace) -> None:
    store = _store(args)
    _check_names(store, args.job)
    for name in args.job:
        was = store.retry(name)
        assert was is not None
        if was.state not in ("failed", "cancelled"):
            print(f"{name} is {was.state}")
            continue
        _needs_manager(store, f"{name} is in the queue again")


def _fail(args: argparse.Namespace) -> None:
    store = _store(args)
    nodes = _nodes(store, args.chips)
    hit = store.fail(nodes)
    what = f"; {', '.join(hit)} restart{'s' * (len(hit) == 1)} elsewhere" if hit else ""
    _needs_manager(store, f"out of use: {' '.join(args.chips)}{what}")


def _repair(args: argparse.Namespace) -> None:
    store = _store(args)
    store.repair(_nodes(store, args.chips))
    print(f"back in use: {' '.join(args.chips)}")


def _needs_manager(store: Store, done: str) -> None:
    from meshsys.cluster.executor import manager_pid

    if manager_pid(store) is None:
        done += f"; no manager works in {store.folder}, and one has to: `meshsys cluster run JOBS.yaml`"
    print(done)


def _check_names(store: Store, names: list[str]) -> None:
    """All, before anything is done to the first."""
    known = [job.name for job in store.jobs()]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known) or 'none'}"
            raise ConfigError(f"JOB={name} is no job of state={store.folder}; {hint}")


def _nodes(store: Store, chips: list[str]) -> list[int]:
    from meshsys.cluster.status import topology_of
    from meshsys.torus import TopologyError

    topology = topology_of(store)
    if topology is None:
        raise ConfigError(f"state={store.folder} has no torus yet; submit jobs first")
    found = []
    for chip in chips:
        if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", chip):
            raise ConfigError(f"CHIP={chip} is not a chip; write its coordinates, as in 1,0,1")
        try:
            found.append(topology.index([int(place) for place in chip.split(",")]))
        except TopologyError:
            last = ",".join(str(side - 1) for side in topology.shape)
            first = ",".join("0" * topology.ndim)
            raise ConfigError(
                f"CHIP={chip} is not on the torus {topology}; its chips are {first} to {last}"
            ) from None
    return found

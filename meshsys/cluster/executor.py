"""The manager: gives the jobs of a state folder their chips, and follows them to their end.

Each job runs below a guard of its own (`meshsys.cluster.guard`), which stays when the manager goes. A manager that
comes back takes over the jobs whose guards live, and starts again those whose guards have died.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from meshsys.cluster import processes
from meshsys.cluster.advance import advance
from meshsys.cluster.grant import Grant
from meshsys.cluster.jobs import Orders
from meshsys.cluster.launch import ROOT, grant_from, grant_to, launch, platform
from meshsys.cluster.store import ENDED, Job, Store
from meshsys.cluster.waiting import choose
from meshsys.errors import ConfigError

__all__ = ["Manager", "View", "log_file", "manager_pid", "only_manager"]

_USER_ERROR = 2  # the exit code of a mistake of the user's, which another start would not mend
_LONGEST_DELAY = 60.0
_TURN = 0.25  # seconds


class View(Protocol):
    """Shows what goes on."""

    def update(self, store: Store, jobs: list[Job]) -> None: ...


class Manager:
    """Runs the jobs of a store on one torus.

    Args:
        store: of the jobs; this must be its only manager (`only_manager`).
        orders: the torus and how jobs are placed on it.
    """

    def __init__(self, store: Store, orders: Orders):
        self._store, self._pod, self._policy = store, orders.pod, orders.policy
        self._cluster = orders.cluster
        self._kind = platform(orders.cluster.devices)
        self._failed: set[int] = set()
        self._guards: dict[str, subprocess.Popen] = {}
        self._told: dict[str, tuple[float, set[int]]] = {}  # when an attempt was asked to end, and its processes
        self._recover()

    def _recover(self) -> None:
        """Takes over what another manager left; its guards that have not registered yet can do so no more."""
        for job in self._store.jobs():
            if job.state == "starting":
                what = "to start again, as the manager went"
                if self._store.settle(job, "queued", "", what, unregistered=True):
                    continue
            now = self._store.job(job.name)
            if now is not None and now.active and now.grant is not None:
                self._pod.take(now.id, grant_from(now.grant))
        self._sync_chips()

    # One turn

    def turn(self, *, start: bool = True) -> list[Job]:
        """Looks at everything once, does what there is to do, and returns the jobs.

        Args:
            start: jobs that wait, where there is room.
        """
        self._sync_chips()
        jobs = self._store.jobs()
        for job in jobs:
            if job.active:
                self._follow(job)
        current = {job.token for job in jobs}
        for token, guard in list(self._guards.items()):
            if token not in current and guard.poll() is not None:
                del self._guards[token]
        if start:
            self._start_all()
        return self._store.jobs()

    def _sync_chips(self) -> None:
        failed = self._store.failed()
        hit = self._pod.fail(failed - self._failed)
        if hit:  # most know already; one whose chips were chosen just before does not
            self._store.lose(hit)
        self._pod.repair(self._failed - failed)
        self._failed = failed

    def _follow(self, job: Job) -> None:
        """Ends an attempt that is to end, and settles one that has ended."""
        assert job.token is not None
        guard = self._guards.get(job.token)
        code = None if guard is None else guard.poll()  # also takes note of its end, as a parent must
        if job.state == "starting":
            ended = guard is None or code is not None
        else:
            ended = job.exit_code is not None or not processes.alive(job.pid, job.identity)
        if not ended:
            if job.state == "running" and job.wish:
                self._end(job, job.token)
            return
        # What an attempt leaves behind would still hold its devices, and write to its folder.
        processes.send(job.token, job.pid, job.identity, signal.SIGKILL)
        if processes.members(job.token):
            return  # they are about to die
        last = self._store.job(job.name)  # the guard may have had its last word meanwhile
        if last is not None and last.token == job.token and (job.state != "starting" or last.state == "starting"):
            self._settle(last)

    def _end(self, job: Job, token: str) -> None:
        since, told = self._told.setdefault(token, (time.monotonic(), set()))
        # What runs on a chip that fails has no time to save.
        if job.wish == "lost" or time.monotonic() - since > self._cluster.grace_seconds:
            processes.send(token, job.pid, job.identity, signal.SIGKILL)
        else:  # once to each process: a second one would end a training run at once
            processes.send(token, job.pid, job.identity, signal.SIGTERM, told)

    def _settle(self, job: Job) -> None:
        """Says what becomes of a job whose attempt has ended, and takes its chips."""
        code, crashes, retries = job.exit_code, job.crashes + 1, job.spec.retries
        how = "its process died" if code is None else f"it ended with {_exit(code)}"
        settle = self._store.settle
        if code == 0:
            done = settle(job, "done", "", "done")
        elif job.wish == "cancel":
            done = settle(job, "cancelled", "cancelled while it ran", "cancelled")
        elif job.wish == "lost":
            done = settle(job, "queued", "a chip failed", "waits for other chips")
        elif job.wish == "stop":
            done = settle(job, "queued", "stopped with the manager", "stopped, and waits")
        elif code == _USER_ERROR or crashes > retries:
            reason = f"{how}: {_last_words(log_file(self._store.folder, job.name)) or 'without a word'}"
            done = settle(job, "failed", reason, f"failed: {reason}", crashed=True)
        else:
            delay = min(2.0 ** (crashes - 1), _LONGEST_DELAY)
            what = f"{how}; retry {crashes} of {retries} in {delay:.0f} s"
            done = settle(job, "queued", what, what, crashed=True, delay=delay)
        if done:
            self._pod.release(job.id)
            self._told.pop(job.token or "", None)

    # Starting

    def _start_all(self) -> None:
        while True:
            jobs, now = self._store.jobs(), time.time()
            waiting = [job for job in jobs if job.state == "queued" and job.not_before <= now]
            if not waiting or not self._pod.free:
                return
            waiting.sort(key=lambda job: (-job.spec.priority, job.id))
            running = [job for job in jobs if job.id in self._pod.jobs]
            running.sort(key=lambda job: (advance(job.spec).seconds_left(job.spec.steps), job.id))
            ending = [job.id for job in running]
            chosen = choose(self._cluster.queue, self._pod, self._policy, self._failed, waiting, ending)
            if chosen is None:
                return
            self._start(*chosen)

    def _start(self, job: Job, grant: Grant) -> None:
        folder, token = self._store.folder, uuid.uuid4().hex
        run = launch(job.spec, self._pod, grant, self._kind, folder)
        try:
            self._pod.take(job.id, grant)
        except ValueError as error:
            raise ConfigError(f"cluster.policy={self._cluster.policy}: {error}; mend the policy") from error
        if not self._store.begin(job, token, grant_to(grant), run):
            self._pod.release(job.id)  # it was cancelled just now
            return
        log = log_file(folder, job.name)
        log.parent.mkdir(exist_ok=True)
        with log.open("a") as out:
            out.write(f"--- start {job.starts + 1}, {time.strftime('%F %T')}, {run['env']['MESHSYS_TOPOLOGY']}\n")
            out.flush()
            with suppress(OSError):  # such as too many processes: the attempt counts as a crash
                self._guards[token] = subprocess.Popen(
                    [sys.executable, "-m", "meshsys.cluster.guard", str(folder.absolute()), token],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    cwd=ROOT,
                    env=os.environ | {processes.ATTEMPT: token, "PYTHONPATH": run["env"]["PYTHONPATH"]},
                    start_new_session=True,  # Ctrl-C is for the manager
                )

    # To the end

    def run(self, view: View) -> int:
        """Until every job has ended; returns the exit code.

        0 when all are done, 1 when some are not, 128 + N after signal N: then the jobs that ran have saved and wait,
        and the same command goes on. A second signal leaves them running, to be taken over.
        """
        with _signals() as caught:
            stopping = False
            while True:
                if len(caught) > 1:
                    return 128 + caught[0]
                if caught and not stopping:
                    stopping = True
                    self._store.stop_all()
                jobs = self.turn(start=not stopping)
                view.update(self._store, jobs)
                if stopping and not any(job.active for job in jobs):
                    return 128 + caught[0]
                if all(job.state in ENDED for job in jobs):
                    return 0 if all(job.state == "done" for job in jobs) else 1
                time.sleep(_TURN)


def log_file(folder: Path, name: str) -> Path:
    """What a job printed, in all its attempts."""
    return folder / "logs" / f"{name}.log"


@contextmanager
def only_manager(store: Store) -> Iterator[bool]:
    """Whether this process is the manager of the state, for as long as it stays within; the system lets go of it."""
    try:
        lock = (store.folder / "manager.lock").open("w")
    except OSError as error:
        raise ConfigError(f"cluster.state={store.folder} cannot be written: {error.strerror}; set another") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        store.put("manager", f"{os.getpid()} {processes.identity(os.getpid())}")
        yield True


def manager_pid(store: Store) -> int | None:
    """The manager of the state, if there is one now."""
    pid, _, known = (store.get("manager") or "0 ").partition(" ")
    return int(pid) if processes.alive(int(pid), known) else None


@contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """SIGINT and SIGTERM, as they come."""
    caught: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    both = (signal.SIGINT, signal.SIGTERM)
    before = {each: signal.signal(each, lambda number, _: caught.append(signal.Signals(number))) for each in both}
    try:
        yield caught
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def _last_words(log: Path) -> str:
    """The last line that says something, for people."""
    with suppress(OSError):
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 8192))
            lines = file.read().decode(errors="replace").splitlines()
        for line in reversed(lines):
            if line.startswith("--- start "):
                break
            if line.strip():
                return " ".join(line.removeprefix("meshsys: error:").split())[:300]
    return ""

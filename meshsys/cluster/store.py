"""The state of an executor on disk: jobs, failed chips, events, in one SQLite file.

All that asks or changes anything is one transaction, so whoever is killed in the middle has done all of it or nothing.
The commands, the manager and the guards of jobs talk to one another through it alone.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshsys.errors import ConfigError

__all__ = ["ACTIVE", "ENDED", "Job", "JobSpec", "Store"]

ACTIVE = ("starting", "running")
"""States in which a job has chips."""
ENDED = ("done", "failed", "cancelled")
"""States that a job leaves only by `retry`."""

_VERSION = "1"
_WAIT = 60.0  # seconds for another's transaction
_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, spec TEXT NOT NULL, submitted REAL NOT NULL,
    state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', wish TEXT,
    starts INTEGER NOT NULL DEFAULT 0, crashes INTEGER NOT NULL DEFAULT 0, not_before REAL NOT NULL DEFAULT 0,
    token TEXT UNIQUE, grants TEXT, launch TEXT, pid INTEGER, identity TEXT, exit_code INTEGER,
    began REAL, ended REAL
);
CREATE TABLE failed_chips (node INTEGER PRIMARY KEY);
CREATE TABLE events (id INTEGER PRIMARY KEY, at REAL NOT NULL, job TEXT, what TEXT NOT NULL);
"""


@dataclass(frozen=True)
class JobSpec:
    """What a user asked for; the same for as long as the job is there.

    Attributes:
        name: of the job.
        shape: of its slice, in chips.
        command: the program and its arguments; () for a training job.
        config: the resolved configuration of a training job, in YAML; "" for a command.
        folder: in which it works; relative paths are relative to it.
        run_dir: where it writes metrics.jsonl and checkpoints; absolute.
        steps: in the whole run; 0 if that is not known.
        priority: the higher goes first.
        retries: how often it starts again after crashes.
    """

    name: str
    shape: tuple[int, ...]
    command: tuple[str, ...]
    config: str
    folder: str
    run_dir: str
    steps: int
    priority: int
    retries: int

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> JobSpec:
        raw: dict[str, Any] = json.loads(text)
        raw |= {name: tuple(raw[name]) for name in ("shape", "command")}
        return JobSpec(**raw)


@dataclass(frozen=True)
class Job:
    """A job as it is now.

    Attributes:
        id: its number, in the order of submission, from 1.
        spec: what the user asked for.
        submitted, began, ended: seconds since 1970: when it came, last got chips, and ended for good.
        state: `queued`, one of `ACTIVE`, or one of `ENDED`.
        reason: why it is in this state, for people.
        wish: what is to become of a job that has chips: `cancel` it, `stop` it for later, or it `lost` a chip.
        starts, crashes: how often it was started, and ended by itself with an error.
        not_before: seconds since 1970, before which it does not start again.
        token: of the attempt that has the chips; None without.
        grant: its chips (`meshsys.cluster.launch.grant_from`).
        launch: what the guard runs: `argv`, `env`, `cwd`.
        pid, identity: of its guard, once that runs.
        exit_code: of this attempt, once it has ended; below 0 for a signal.
    """

    id: int
    spec: JobSpec
    submitted: float
    state: str
    reason: str
    wish: str | None
    starts: int
    crashes: int
    not_before: float
    token: str | None
    grant: dict[str, Any] | None
    launch: dict[str, Any] | None
    pid: int | None
    identity: str | None
    exit_code: int | None
    began: float | None
    ended: float | None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def active(self) -> bool:
        return self.state in ACTIVE


class Store:
    """The file `cluster.db` of a state folder.

    Args:
        folder: of the state.
        create: make it where it is not there.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """

    def __init__(self, folder: Path, *, create: bool = False):
        self.folder = folder
        self.path = folder / "cluster.db"
        if not create and not self.path.exists():
            raise ConfigError(
                f"state={folder} holds no cluster; give the folder that `meshsys cluster run` works in with --state"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.path, timeout=_WAIT, isolation_level=None)
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            with self._change():
                if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
                    for statement in _SCHEMA.split(";"):
                        self._db.execute(statement)
                    self._put("version", _VERSION)
            version = self.get("version")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"state={folder} cannot be used: {error}; give another folder") from None
        if version != _VERSION:
            raise ConfigError(f"state={folder} is of another version of meshsys ({version}); give another folder")

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _change(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # Facts

    def get(self, name: str) -> str | None:
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row["value"])

    def put(self, name: str, value: str) -> None:
        with self._change():
            self._put(name, value)

    def _put(self, name: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def jobs(self) -> list[Job]:
        """All jobs, in the order of submission."""
        return [_job(row) for row in self._db.execute("SELECT * FROM jobs ORDER BY id")]

    def job(self, name: str) -> Job | None:
        row = self._db.execute("SELECT * FROM jobs WHERE name = ?", (name,)).fetchone()
        return None if row is None else _job(row)

    def failed(self) -> set[int]:
        """Chips that are out of use."""
        return {row["node"] for row in self._db.execute("SELECT node FROM failed_chips")}

    def events(self, after: int = 0) -> list[tuple[int, float, str | None, str]]:
        """What happened: (number, seconds since 1970, job, what)."""
        rows = self._db.execute("SELECT * FROM events WHERE id > ? ORDER BY id", (after,))
        return [(row["id"], row["at"], row["job"], row["what"]) for row in rows]

    # What commands do

    def submit(self, cluster: str, specs: Sequence[JobSpec]) -> list[str]:
        """Adds the jobs that are not there yet, all or none; returns their names.

        Args:
            cluster: what the torus is, in JSON; the same for all jobs of a state.

        Raises:
            ConfigError: another torus, or a job that is there already and was asked for differently.
        """
        with self._change():
            known = self.get("cluster")
            if known is None:
                self._put("cluster", cluster)
            elif known != cluster:
                then, now = json.loads(known), json.loads(cluster)
                name = next(name for name in now if now[name] != then.get(name))
                raise ConfigError(
                    f"cluster.{name}={now[name]}, but the jobs in cluster.state={self.folder} were given to a cluster "
                    f"with {then.get(name)}; set it back, or give another cluster.state"
                )
            have = {row["name"]: JobSpec.from_json(row["spec"]) for row in self._db.execute("SELECT * FROM jobs")}
            folders = {spec.run_dir: spec.name for spec in have.values()}
            for spec in specs:
                self._check_same(spec, have.get(spec.name))
                other = folders.setdefault(spec.run_dir, spec.name)
                if other != spec.name:
                    raise ConfigError(
                        f"job {spec.name}: its folder {spec.run_dir} is that of job {other}; set another run.dir"
                    )
            fresh = [spec for spec in specs if spec.name not in have]
            for spec in fresh:
                self._db.execute(
                    "INSERT INTO jobs (name, spec, submitted, state) VALUES (?, ?, ?, 'queued')",
                    (spec.name, spec.to_json(), time.time()),
                )
                self._say(spec.name, "queued")
        return [spec.name for spec in fresh]

    def _check_same(self, spec: JobSpec, then: JobSpec | None) -> None:
        if then is None or then == spec:
            return
        what = next(name for name, value in vars(spec).items() if getattr(then, name) != value)
        raise ConfigError(
            f"job {spec.name} is in cluster.state={self.folder} already, with another {what}; give it another name"
        )

    def cancel(self, name: str) -> Job | None:
        """Ends a job for good: at once if it waits, else as its process ends; returns it as it was."""
        with self._change():
            job = self.job(name)
            if job is None or job.state in ENDED:
                return job
            if job.active:
                self._set(job.id, wish="cancel")
                self._say(name, "to be cancelled")
            else:
                self._set(job.id, state="cancelled", reason="cancelled while it waited", ended=time.time())
                self._say(name, "cancelled")
        return job

    def retry(self, name: str) -> Job | None:
        """Puts a job that failed or was cancelled into the queue again; returns it as it was."""
        with self._change():
            job = self.job(name)
            if job is not None and job.state in ("failed", "cancelled"):
                self._set(job.id, state="queued", reason="", wish=None, crashes=0, not_before=0.0, ended=None)
                self._say(name, "queued again")
        return job

    def fail(self, nodes: Iterable[int]) -> list[str]:
        """Takes chips out of use; returns the jobs that are on them and have to leave."""
        lost = set(nodes)
        with self._change():
            self._db.executemany("INSERT OR IGNORE INTO failed_chips VALUES (?)", [(node,) for node in lost])
            hit = [job for job in self.jobs() if job.active and job.grant and lost & set(job.grant["nodes"])]
            for job in hit:
                if job.wish != "cancel":
                    self._set(job.id, wish="lost")
                self._say(job.name, "lost a chip")
            return [job.name for job in hit]

    def repair(self, nodes: Iterable[int]) -> None:
        """Puts chips back into use."""
        with self._change():
            self._db.executemany("DELETE FROM failed_chips WHERE node = ?", [(node,) for node in nodes])

    # What the manager does

    def begin(self, job: Job, token: str, grant: dict[str, Any], launch: dict[str, Any]) -> bool:
        """Gives chips to a job that waits; False if it does so no more."""
        with self._change():
            now = self.job(job.name)
            if now is None or now.state != "queued":
                return False
            self._set(
                job.id,
                state="starting",
                reason="",
                wish=None,
                starts=job.starts + 1,
                token=token,
                grants=json.dumps(grant),
                launch=json.dumps(launch),
                pid=None,
                identity=None,
                exit_code=None,
                began=time.time(),
            )
            self._say(job.name, f"started on {'x'.join(map(str, grant['shape']))}: chips {_list(grant['nodes'])}")
        return True

    def settle(
        self,
        job: Job,
        state: str,
        reason: str,
        what: str,
        *,
        crashed: bool = False,
        delay: float = 0.0,
        unregistered: bool = False,
    ) -> bool:
        """Takes a job's chips: its attempt has ended, and it is `state` now.

        Args:
            what: the event.
            crashed: count it.
            delay: seconds before it may start again.
            unregistered: only if its guard has not registered yet; then it cannot do so any more.

        Returns:
            whether that was done.
        """
        now = time.time()
        with self._change():
            row = self._db.execute("SELECT * FROM jobs WHERE id = ?", (job.id,)).fetchone()
            if row["token"] != job.token or (unregistered and row["state"] != "starting"):
                return False
            self._set(
                job.id,
                state=state,
                reason=reason,
                wish=None,
                token=None,
                grants=None,
                launch=None,
                pid=None,
                identity=None,
                crashes=job.crashes + crashed,
                not_before=now + delay,
                ended=now if state in ENDED else None,
            )
            self._say(job.name, what)
        return True

    def stop_all(self) -> None:
        """All jobs with chips are to stop and wait."""
        with self._change():
            self._db.execute("UPDATE jobs SET wish = 'stop' WHERE state IN ('starting', 'running') AND wish IS NULL")

    def lose(self, jobs: Iterable[int]) -> None:
        """These jobs have to leave their chips."""
        with self._change():
            for job in jobs:
                self._db.execute(
                    "UPDATE jobs SET wish = 'lost' WHERE id = ? AND state IN ('starting', 'running') "
                    "AND wish IS NOT 'cancel'",
                    (job,),
                )

    # What guards do

    def register(self, token: str, pid: int, identity: str | None) -> dict[str, Any] | None:
        """Makes a process the one of an attempt; what it is to run, or None if the attempt is not wanted any more."""
        with self._change():
            row = self._db.execute("SELECT * FROM jobs WHERE token = ? AND state = 'starting'", (token,)).fetchone()
            if row is None:
                return None
            self._set(row["id"], state="running", pid=pid, identity=identity)
        launch: dict[str, Any] = json.loads(row["launch"])
        return launch

    def finish(self, token: str, code: int) -> None:
        """Records how an attempt ended."""
        with self._change():
            self._db.execute("UPDATE jobs SET exit_code = ? WHERE token = ?", (code, token))

    # Parts; inside a transaction

    def _set(self, job: int, **values: Any) -> None:
        columns = ", ".join(f"{name} = ?" for name in values)
        self._db.execute(f"UPDATE jobs SET {columns} WHERE id = ?", (*values.values(), job))

    def _say(self, job: str | None, what: str) -> None:
        self._db.execute("INSERT INTO events (at, job, what) VALUES (?, ?, ?)", (time.time(), job, what))


def _job(row: sqlite3.Row) -> Job:
    values = {name: row[name] for name in row.keys()}
    del values["name"]
    grant, launch = values.pop("grants"), values.pop("launch")
    values["spec"] = JobSpec.from_json(values["spec"])
    return Job(**values, grant=grant and json.loads(grant), launch=launch and json.loads(launch))


def _list(nodes: Sequence[int]) -> str:
    shown = " ".join(map(str, nodes[:16]))
    return shown if len(nodes) <= 16 else f"{shown} ... ({len(nodes)})"

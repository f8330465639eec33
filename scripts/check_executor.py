"""Runs real training jobs side by side on one torus while jobs, a chip and the manager itself are killed under them.

    python scripts/check_executor.py [--jobs N] [--kills N] [--chips N] [--managers N] [--seed S]

The jobs take 1 to 4 fake devices of a 2x2x2 torus and are submitted at random moments. Each has to finish with every
step recorded once, and with the losses that it has when it runs alone: bit for bit where its slice had the same shape
throughout, to 1e-5 elsewhere. No chip may be given twice, and no job run twice at once. Exits with 1 otherwise.

Most of its time is compilation, once a start; JAX_COMPILATION_CACHE_DIR in the environment saves that, and
XLA_FLAGS=--xla_backend_optimization_level=0 shortens it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from meshsys.cluster import processes  # noqa: E402
from meshsys.cluster.advance import advance  # noqa: E402
from meshsys.cluster.store import Job, Store  # noqa: E402

EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens")
CLOSE = 1e-5
DIMS = (2, 2, 2)
CONFIG = """
run: {{name: check, seed: 7}}
model: {{layers: 4, d_model: 16, heads: 2, d_ff: 32}}
data: {{source: {source}, sequence_length: 16, batch_size: 8}}
mesh: {{topology: 1}}
pipeline: {{microbatches: 2}}
train: {{steps: 100, learning_rate: 3.0e-3, warmup_steps: 5}}
checkpoint: {{every: 40, keep: 2}}
"""
MESHES: tuple[dict[str, int], ...] = (
    {"pipe": 1},
    {"pipe": 2},
    {"data": 2},
    {"pipe": 4},
    {"pipe": 2, "data": 2},
)
CLUSTER = {"topology": "x".join(map(str, DIMS)), "devices": "cpu", "state": "state"}


class Check:
    """One folder with a configuration, and what runs in it."""

    def __init__(self, home: Path, jobs: list[dict]):
        self.home, self.jobs = home, jobs
        self.environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        self.problems: list[str] = []
        self.starts: dict[str, list[tuple[int, ...]]] = {job["name"]: [] for job in jobs}
        self.hit: set[str | None] = set()  # attempts that have had their blow
        self._tokens: set[str] = set()
        (home / "config.yaml").write_text(CONFIG.format(source=ROOT / "meshsys"))

    def meshsys(self, *arguments: str, into: str = "commands.log") -> subprocess.Popen:
        with (self.home / into).open("a") as out:
            command = [sys.executable, "-m", "meshsys", *arguments]
            return subprocess.Popen(command, cwd=self.home, env=self.environment, stdout=out, stderr=out)

    def jobs_file(self, name: str, jobs: list[dict]) -> str:
        (self.home / name).write_text(json.dumps({"cluster": CLUSTER, "jobs": jobs}))
        return name

    def look(self) -> list[Job]:
        """All jobs now; notes their slices, and chips that two of them have."""
        if not (self.home / "state/cluster.db").exists():
            return []
        store = Store(self.home / "state")
        jobs = store.jobs()
        store.close()
        nodes = [node for job in jobs if job.grant for node in job.grant["nodes"]]
        if len(nodes) != len(set(nodes)):
            self.problems.append(f"a chip was given twice: {sorted(nodes)}")
        for job in jobs:
            if job.token and job.grant and job.token not in self._tokens:
                self._tokens.add(job.token)
                self.starts[job.name].append(tuple(job.grant["shape"]))
        return jobs

    def rows(self, folder: str) -> list[tuple]:
        path = self.home / "runs" / folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(json.loads(line)[name] for name in EXACT) for line in lines]


def solo(check: Check) -> None:
    """Each job alone, for the losses that it has to have."""
    for job in check.jobs:
        size = "x".join(str(size) for size in job["axes"].values())
        mesh = json.dumps({"topology": size, "axes": job["axes"]})
        own = [*job["overrides"], f"mesh={mesh}", f"run.name=solo_{job['name']}"]
        if check.meshsys("train", "config.yaml", *own, into="solo.log").wait():
            sys.exit(f"{job['name']} does not run alone:\n{(check.home / 'solo.log').read_text()[-3000:]}")


def busy(check: Check, jobs: list[Job], part: float) -> list[Job]:
    """Jobs whose present process has begun to take steps, and is within the first part of them."""
    found = []
    for job in jobs:
        log = check.home / "state/logs" / f"{job.name}.log"
        if job.state != "running" or job.wish or job.token in check.hit or not log.exists():
            continue
        said = log.read_text().rpartition("--- start ")[2]
        if "\nstep " in said and 0 < advance(job.spec).step < part * job.spec.steps:
            found.append(job)
    return found


def kill_job(check: Check, jobs: list[Job], chance: random.Random) -> str | None:
    targets = busy(check, jobs, 0.8)
    if not targets:
        return None
    job = chance.choice(targets)
    assert job.token is not None
    check.hit.add(job.token)
    for pid in processes.members(job.token):
        if pid != job.pid:
            os.kill(pid, signal.SIGKILL)
    return f"killed {job.name} at step {advance(job.spec).step}"


def fail_chip(check: Check, jobs: list[Job], chance: random.Random) -> str | None:
    targets = [job for job in busy(check, jobs, 0.3) if job.grant]
    if not targets:
        return None
    job = chance.choice(targets)
    assert job.grant is not None
    node = chance.choice(job.grant["nodes"])
    chip = ",".join(map(str, (node // (DIMS[1] * DIMS[2]), node // DIMS[2] % DIMS[1], node % DIMS[2])))
    at = advance(job.spec).step
    if check.meshsys("cluster", "fail", chip, "--state", "state", into="fail.log").wait():
        check.problems.append(f"meshsys cluster fail {chip} failed")
    if "elsewhere" not in (check.home / "fail.log").read_text():
        check.meshsys("cluster", "repair", chip, "--state", "state").wait()
        return None  # its job had ended while the command started
    check.hit.add(job.token)
    return f"chip {chip} failed under {job.name} at step {at}"


def together(check: Check, args: argparse.Namespace, chance: random.Random) -> float:
    """All jobs on one torus, with what befalls them; returns the seconds."""
    began = time.monotonic()
    first, rest = check.jobs[:3], check.jobs[3:]
    run = ("cluster", "run", check.jobs_file("first.yaml", first))
    manager = check.meshsys(*run, into="manager.log")
    submits = [(check.jobs_file(f"{job['name']}.yaml", [job]), chance.uniform(0, 60)) for job in rest]
    submits.sort(key=lambda submit: submit[1])
    blows: list[Callable[[Check, list[Job], random.Random], str | None] | str]
    blows = [kill_job] * args.kills + [fail_chip] * args.chips + ["manager"] * args.managers
    chance.shuffle(blows)
    pending: list[subprocess.Popen] = []
    next_blow = began + 10
    while time.monotonic() - began < args.most_seconds:
        now = time.monotonic()
        jobs = check.look()
        if submits and now - began > submits[0][1]:
            pending.append(check.meshsys("cluster", "submit", submits.pop(0)[0]))
        if blows and now > next_blow:
            blow = blows[0]
            if blow == "manager":
                manager.kill()
                manager.wait()
                time.sleep(chance.uniform(0, 2))
                manager = check.meshsys(*run, into="manager.log")
                said: str | None = "killed the manager"
            else:
                assert not isinstance(blow, str)
                said = blow(check, jobs, chance)
            if said:
                blows.pop(0)
                next_blow = now + chance.uniform(1, 6)
                print(f"{now - began:5.0f} s  {said}", flush=True)
        if manager.poll() is not None:
            pending = [each for each in pending if each.poll() is None]
            if not submits and not pending and all(job.state == "done" for job in check.look()):
                break
            manager = check.meshsys(*run, into="manager.log")  # it had nothing left to do, or failed
        time.sleep(0.05)
    else:
        check.problems.append(f"not done after {args.most_seconds} s")
        manager.kill()
    if blows:
        check.problems.append(f"{len(blows)} blows found nothing to hit; give the jobs more steps")
    return time.monotonic() - began


def compare(check: Check) -> tuple[int, int]:
    """How many jobs equal their solo runs bit for bit, and how many to rounding, as their slice changed its shape."""
    exact = close = 0
    for job in check.jobs:
        name = job["name"]
        found, wanted = check.rows(name), check.rows(f"solo_{name}")
        shapes = set(check.starts[name])
        if found == wanted:
            exact += 1
        elif [row[0] for row in found] != [row[0] for row in wanted]:
            check.problems.append(f"{name}: {len(found)} steps recorded, {len(wanted)} wanted, each once")
        elif max(abs(a[1] - b[1]) / abs(b[1]) for a, b in zip(found, wanted, strict=True)) > CLOSE:
            check.problems.append(f"{name}: other losses than alone")
        elif len(shapes) == 1:
            check.problems.append(f"{name}: losses equal to rounding only, on one shape: {shapes}")
        else:
            close += 1
    return exact, close


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--kills", type=int, default=3, help="of jobs")
    parser.add_argument("--chips", type=int, default=1, help="that fail")
    parser.add_argument("--managers", type=int, default=2, help="times that the manager is killed")
    parser.add_argument("--steps", type=int, default=160, help="of each job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-seconds", type=float, default=1500)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    jobs = []
    for number in range(args.jobs):
        axes = MESHES[number % len(MESHES)]
        overrides = [f"run.seed={number}", f"train.steps={args.steps}"]
        job = {"name": f"job_{number}", "config": "config.yaml", "axes": axes, "overrides": overrides, "retries": 10}
        jobs.append(job)
    chance.shuffle(jobs)

    with tempfile.TemporaryDirectory() as temporary:
        check = Check(Path(temporary), jobs)
        began = time.monotonic()
        solo(check)
        print(f"{len(jobs)} jobs alone, one after another: {time.monotonic() - began:.0f} s", flush=True)
        seconds = together(check, args, chance)
        exact, close = compare(check)
        found = check.look()
        states, starts = [job.state for job in found], sum(job.starts for job in found)
        crashes = sum(job.crashes for job in found)
        if crashes < args.kills:
            check.problems.append(f"only {crashes} crashes after {args.kills} kills")
        if len(states) != len(jobs):
            check.problems.append(f"{len(states)} of {len(jobs)} jobs are known")
        for problem in dict.fromkeys(check.problems):
            print(problem)
        if check.problems:
            print((check.home / "manager.log").read_text()[-6000:])
    print(
        f"{states.count('done')} of {len(jobs)} jobs done after {args.kills} killed, {args.chips} failed chips and "
        f"{args.managers} killed managers ({starts} starts, {crashes} crashes, {seconds:.0f} s): {exact} with the "
        f"losses of a solo run bit for bit, {close} to rounding"
    )
    return 1 if check.problems or exact + close != len(jobs) else 0


if __name__ == "__main__":
    sys.exit(main())

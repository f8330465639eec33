"""Real processes on a fake torus: queueing, reuse, cancelling, crashes, failed chips, and managers that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshsys.cli import main
from meshsys.cluster import processes
from meshsys.cluster.executor import Manager, log_file, only_manager
from meshsys.cluster.jobs import read_orders
from meshsys.cluster.store import ENDED, Job, Store

ROOT = Path(__file__).resolve().parents[3]
FAKE = Path(__file__).with_name("fake_job.py")
LONG = ("10000", "0.05")


class Cluster:
    """A jobs file in the working directory, and its manager within this process."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.cluster: dict[str, Any] = {"topology": "2x2x2", "grace_seconds": 20, "devices": "cpu"}
        self._managers: list[Any] = []

    def add(self, name: str, shape: str, *arguments: str, **options: Any) -> None:
        command = [sys.executable, str(FAKE), *arguments]
        self.jobs.append({"name": name, "shape": shape, "command": command, **options})
        Path("jobs.yaml").write_text(json.dumps({"cluster": self.cluster, "jobs": self.jobs}))

    def manager(self) -> Manager:
        orders = read_orders("jobs.yaml")
        store = Store(Path("runs/cluster"), create=True)
        store.submit(orders.torus, orders.specs)
        return Manager(store, orders)

    @property
    def store(self) -> Store:
        return Store(Path("runs/cluster"))

    def job(self, name: str) -> Job:
        job = self.store.job(name)
        assert job is not None
        return job

    def steps(self, name: str) -> list[int]:
        path = Path("runs", name, "metrics.jsonl")
        return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []

    def starts(self, name: str) -> list[str]:
        path = Path("runs", name, "starts")
        return [line.rsplit(" ", 1)[0] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def cluster(monkeypatch, tmp_path) -> Iterator[Cluster]:
    monkeypatch.chdir(tmp_path)
    yield Cluster()
    assert not list(tmp_path.glob("runs/*/twice")), "a job ran twice at once"
    if Path("runs/cluster/cluster.db").exists():
        for job in Store(Path("runs/cluster")).jobs():
            if job.token:
                processes.send(job.token, job.pid, job.identity, signal.SIGKILL)


def until(manager: Manager, condition: Callable[[dict[str, Job]], bool], seconds: float = 120) -> dict[str, Job]:
    """Turns the manager until its jobs are so."""
    end = time.monotonic() + seconds
    while True:
        jobs = {job.name: job for job in manager.turn()}
        check_chips(list(jobs.values()))
        if condition(jobs):
            return jobs
        assert time.monotonic() < end, {name: (job.state, job.reason) for name, job in jobs.items()}
        time.sleep(0.02)


def ended(jobs: dict[str, Job]) -> bool:
    return all(job.state in ENDED for job in jobs.values())


def running(*names: str) -> Callable[[dict[str, Job]], bool]:
    return lambda jobs: all(jobs[name].state == "running" for name in names)


def check_chips(jobs: list[Job]) -> None:
    """No chip is given twice."""
    nodes = [node for job in jobs if job.grant for node in job.grant["nodes"]]
    assert len(nodes) == len(set(nodes))


def test_jobs_run_side_by_side_and_chips_are_reused(cluster):
    for name, shape in (("a", "2x2"), ("b", "2x2"), ("c", "2x2x2"), ("d", "1")):
        cluster.add(name, shape, "5", "0.05")
    manager = cluster.manager()
    jobs = until(manager, running("a", "b"))
    assert jobs["c"].state == "queued"
    jobs = until(manager, ended)
    assert {job.state for job in jobs.values()} == {"done"}
    assert all(cluster.steps(name) == [1, 2, 3, 4, 5] for name in "abcd")
    assert cluster.starts("a") == ["2x2 4"] and cluster.starts("c") == ["2x2x2 8"] and cluster.starts("d") == ["1 1"]


def test_the_higher_priority_goes_first(cluster):
    cluster.add("low", "2x2x2", "1", "0")
    cluster.add("high", "2x2x2", "1", "0", priority=1)
    jobs = until(cluster.manager(), ended)
    assert jobs["high"].ended < jobs["low"].began


@pytest.mark.parametrize("queue, overtakes", [("fcfs", False), ("backfill", True), ("easy", True)])
def test_what_may_overtake(cluster, queue, overtakes):
    """`large` will have 4 of the 6 chips, which leaves one for `small` beside `left`."""
    cluster.cluster |= {"queue": queue, "topology": "3x2"}
    cluster.add("left", "2", *LONG)
    cluster.add("large", "2x2", "1", "0")
    cluster.add("small", "1", "1", "0")
    manager = cluster.manager()
    until(manager, running("left"))
    for _ in range(3):
        jobs = {job.name: job for job in manager.turn()}
    if queue == "fcfs":
        assert jobs["small"].state == "queued"
    else:
        until(manager, lambda jobs: jobs["small"].state == "done")
    cluster.store.cancel("left")
    assert {name: job.state for name, job in until(manager, ended).items()} == {
        "left": "cancelled",
        "large": "done",
        "small": "done",
    }


def test_easy_keeps_the_first_job_s_chips_free(cluster):
    cluster.cluster |= {"queue": "easy", "topology": "4"}
    cluster.add("half", "2", "20", "0.05")
    cluster.add("whole", "4", "1", "0")
    cluster.add("long", "2", *LONG)
    manager = cluster.manager()
    jobs = until(manager, lambda jobs: jobs["whole"].state == "done")
    assert jobs["long"].starts == 0 or jobs["long"].began > jobs["whole"].began


def test_a_cancelled_job_ends_and_leaves_others_alone(cluster):
    cluster.add("a", "2x2", *LONG)
    cluster.add("b", "2x2", "30", "0.05")
    cluster.add("c", "2x2", *LONG)
    manager = cluster.manager()
    until(manager, lambda jobs: running("a", "b")(jobs) and bool(cluster.steps("a")))
    assert main(["cluster", "cancel", "a", "c"]) == 0
    jobs = until(manager, ended)
    assert [jobs[name].state for name in "abc"] == ["cancelled", "done", "cancelled"]
    assert len(cluster.starts("b")) == 1 and not cluster.starts("c")


def test_a_job_that_does_not_listen_is_killed(cluster):
    cluster.cluster["grace_seconds"] = 0.3
    cluster.add("deaf", "2", *LONG, "--deaf")
    manager = cluster.manager()
    until(manager, lambda jobs: bool(cluster.steps("deaf")))
    cluster.store.cancel("deaf")
    assert until(manager, ended)["deaf"].state == "cancelled"


def test_a_crash_is_retried_where_it_was(cluster):
    cluster.add("a", "2", "6", "0.02", "--crash", "3", "1")
    cluster.add("b", "2", "6", "0.02")
    jobs = until(cluster.manager(), ended)
    assert [jobs[name].state for name in "ab"] == ["done", "done"]
    assert cluster.steps("a") == [1, 2, 3, 4, 5, 6] and len(cluster.starts("a")) == 2
    assert jobs["a"].crashes == 1 and len(cluster.starts("b")) == 1
    assert any(what.startswith("it ended with SIGSEGV; retry 1 of 3") for *_, what in cluster.store.events())


def test_too_many_crashes_fail_a_job_and_retry_brings_it_back(cluster, capsys):
    cluster.add("a", "2", "6", "0.01", "--crash", "3", "2", retries=1)
    manager = cluster.manager()
    jobs = until(manager, ended)
    assert jobs["a"].state == "failed" and jobs["a"].reason == "it ended with SIGSEGV: about to crash"
    assert main(["cluster", "retry", "a"]) == 0
    assert until(manager, ended)["a"].state == "done"
    assert cluster.steps("a") == [1, 2, 3, 4, 5, 6]


def test_a_mistake_of_the_user_s_is_not_retried(cluster):
    cluster.add("a", "2", "1", "0", "--code", "2")
    jobs = until(cluster.manager(), ended)
    assert jobs["a"].reason == "it ended with exit code 2: what it says with 2" and jobs["a"].starts == 1


def test_a_program_that_is_not_there(cluster):
    cluster.add("a", "2", retries=0)
    cluster.jobs[0]["command"] = ["no-such-program"]
    Path("jobs.yaml").write_text(json.dumps({"cluster": cluster.cluster, "jobs": cluster.jobs}))
    jobs = until(cluster.manager(), ended)
    assert jobs["a"].state == "failed" and "no-such-program cannot be started" in jobs["a"].reason


def test_a_failed_chip_moves_its_job_and_no_other(cluster, capsys):
    cluster.add("a", "2x2", "60", "0.05")
    cluster.add("b", "2", "60", "0.05")
    manager = cluster.manager()
    jobs = until(manager, lambda jobs: running("a", "b")(jobs) and len(cluster.steps("a")) > 3)
    chip = jobs["b"].grant["nodes"][0]
    where = ",".join(map(str, (chip // 4, chip // 2 % 2, chip % 2)))
    assert main(["cluster", "fail", where]) == 0
    assert "b restarts elsewhere" in capsys.readouterr().out
    jobs = until(manager, lambda jobs: jobs["b"].starts == 2 and jobs["b"].state == "running")
    assert chip not in jobs["b"].grant["nodes"]
    assert jobs["a"].starts == 1 and jobs["b"].crashes == 0
    assert main(["cluster", "repair", where]) == 0
    assert {job.state for job in until(manager, ended).values()} == {"done"}
    assert cluster.steps("b") == list(range(1, 61))


def test_a_job_waits_for_a_repair_where_no_shape_of_its_size_is_left(cluster):
    """Without its diagonal, a torus of 3x3 has no square of 2x2 and no line of 4."""
    cluster.cluster |= {"topology": "3x3", "policy": "first_fit"}
    cluster.add("a", "2x2", "60", "0.05")
    manager = cluster.manager()
    until(manager, lambda jobs: len(cluster.steps("a")) > 3)
    assert main(["cluster", "fail", "0,0", "1,1", "2,2"]) == 0
    until(manager, lambda jobs: jobs["a"].state == "queued")
    for _ in range(5):
        manager.turn()
    assert cluster.job("a").state == "queued"
    assert main(["cluster", "repair", "0,0", "1,1", "2,2"]) == 0
    jobs = until(manager, ended)
    assert jobs["a"].state == "done" and cluster.steps("a") == list(range(1, 61))


def test_a_square_becomes_a_line(cluster):
    cluster.cluster |= {"topology": "4x2", "policy": "first_fit"}
    cluster.add("a", "2x2", "60", "0.05")
    manager = cluster.manager()
    until(manager, lambda jobs: len(cluster.steps("a")) > 3)
    assert main(["cluster", "fail", "0,0", "2,0"]) == 0
    jobs = until(manager, ended)
    assert jobs["a"].state == "done" and cluster.starts("a") == ["2x2 4", "4 4"]
    assert cluster.steps("a") == list(range(1, 61))


def test_a_manager_that_comes_back_takes_over_what_runs(cluster):
    cluster.add("a", "2x2", "40", "0.05")
    cluster.add("b", "2x2", "40", "0.05")
    cluster.add("c", "2x2", "3", "0.02")
    manager = cluster.manager()
    jobs = until(manager, lambda jobs: running("a", "b")(jobs) and bool(cluster.steps("b")))
    processes.send(jobs["b"].token, jobs["b"].pid, jobs["b"].identity, signal.SIGKILL)
    del manager
    jobs = until(cluster.manager(), ended)
    assert {job.state for job in jobs.values()} == {"done"}
    assert [jobs[name].starts for name in "abc"] == [1, 2, 1]
    assert cluster.steps("b") == list(range(1, 41))


def test_a_dead_guard_s_job_is_ended_before_it_starts_again(cluster):
    cluster.add("a", "2", "40", "0.05")
    manager = cluster.manager()
    jobs = until(manager, lambda jobs: bool(cluster.steps("a")))
    os.kill(jobs["a"].pid, signal.SIGKILL)
    jobs = until(manager, ended)
    assert jobs["a"].state == "done" and jobs["a"].starts == 2 and cluster.steps("a") == list(range(1, 41))


def test_a_guard_that_comes_too_late_runs_nothing(cluster):
    """A manager dies between the choice of chips and the guard's first words."""
    cluster.add("a", "2", "3", "0")
    manager = cluster.manager()
    store, (job,) = cluster.store, manager._store.jobs()
    assert store.begin(job, "lost-token", {"shape": [2], "nodes": [0, 1]}, {"argv": [], "env": {}, "cwd": "."})
    cluster.manager()
    assert cluster.job("a").state == "queued"
    assert store.register("lost-token", os.getpid(), "whoever") is None


def test_a_chip_that_fails_while_it_is_given_away(cluster):
    cluster.add("a", "2", "3", "0.05")
    manager = cluster.manager()
    begin = manager._store.begin

    def late(job: Job, token: str, grant: dict[str, Any], launch: dict[str, Any]) -> bool:
        manager._store.begin = begin
        cluster.store.fail([grant["nodes"][0]])
        return begin(job, token, grant, launch)

    manager._store.begin = late
    jobs = until(manager, ended)
    assert jobs["a"].state == "done" and jobs["a"].starts == 2 and jobs["a"].crashes == 0


def test_a_recycled_pid_is_not_taken_for_a_job():
    me = processes.identity(os.getpid())
    assert processes.alive(os.getpid(), me)
    assert not processes.alive(os.getpid(), f"{me}0")
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    time.sleep(0.2)
    child.wait()
    assert processes.identity(child.pid) is None


def test_managers_killed_at_any_moment_lose_nothing(cluster):
    """`meshsys cluster run` is killed with SIGKILL five times; every job takes every step once, and none runs twice."""
    for name, shape in (("a", "2x2"), ("b", "2"), ("c", "2x2x2"), ("d", "1"), ("e", "2x2")):
        cluster.add(name, shape, "25", "0.04", steps=25)
    command = [sys.executable, "-m", "meshsys", "cluster", "run", "jobs.yaml"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    for delay in (0.0, 0.1, 0.3, 0.6, 1.0):
        with open("out.log", "a") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        before = Store(Path("runs/cluster"), create=True).get("manager")
        while cluster.store.get("manager") == before and process.poll() is None:
            time.sleep(0.01)
        time.sleep(delay)
        process.kill()
        process.wait()
    code = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert code.returncode == 0, code.stdout + code.stderr
    for job in cluster.store.jobs():
        assert job.state == "done" and cluster.steps(job.name) == list(range(1, 26))


def test_ctrl_c_stops_the_jobs_and_the_same_command_goes_on(cluster):
    cluster.add("a", "2x2", "40", "0.05", steps=40)
    command = [sys.executable, "-m", "meshsys", "cluster", "run", "jobs.yaml"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    while not cluster.steps("a"):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    job = cluster.job("a")
    assert job.state == "queued" and job.crashes == 0
    assert subprocess.run(command, env=environment, timeout=300).returncode == 0
    assert cluster.steps("a") == list(range(1, 41))


def test_a_second_run_hands_its_jobs_to_the_manager(cluster, capsys):
    cluster.add("a", "2", "1", "0")
    manager = cluster.manager()
    cluster.add("b", "2", "1", "0")
    with only_manager(cluster.store) as alone:
        assert alone and main(["cluster", "run", "jobs.yaml"]) == 0
    assert f"(pid {os.getpid()}) runs the jobs" in capsys.readouterr().out
    assert set(until(manager, ended)) == {"a", "b"}


def test_status_shows_torus_and_queue(cluster, capsys):
    cluster.add("first", "2x2", *LONG, steps=10000)
    cluster.add("second", "2x2x2", "1", "0")
    manager = cluster.manager()
    until(manager, lambda jobs: bool(cluster.steps("first")))
    cluster.store.fail([7])
    with only_manager(cluster.store):
        assert main(["cluster", "status"]) == 0
        shown = capsys.readouterr().out
        assert "first" in shown and "running" in shown and "# failed" in shown and "a first" in shown
        assert main(["cluster", "status", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
    first, second = told["jobs"]
    assert first["state"] == "running" and len(first["chips"]) == 4 and first["steps"] == 10000
    assert second["state"] == "queued" and second["chips"] == []
    assert second["reason"] == "3 of the 8 chips it needs are free"
    assert told["chips"] == {"all": 8, "taken": 4, "failed": [[1, 1, 1]], "free": 3}


BAD = {
    "unknown key": ({"shap": "2"}, "jobs.0.shap='2' is not an option; did you mean jobs.0.shape?"),
    "too large": ({"shape": "4x4"}, "jobs.0 (a): shape=4x4 has 16 chips, but cluster.topology=2x2x2 has 8; use"),
    "no shape": ({"shape": None}, "jobs.0 (a): shape is missing or empty; a job with a command needs it"),
    "bad shape": ({"shape": "2*2"}, "jobs.0.shape=2*2 is not a shape; write up to 6 sizes"),
    "bad name": ({"name": "../a"}, "jobs.0.name=../a is not a job's name; use letters"),
    "both": ({"config": "x.yaml"}, "jobs.0 (a) has both config and command; give"),
    "neither": ({"command": None}, "jobs.0 (a) has neither config nor command; give"),
    "no config": ({"command": None, "config": "x.yaml"}, "jobs.0 (a): the configuration file x.yaml does not exist"),
    "axes": ({"axes": {"pipe": 2}}, "jobs.0 (a): axes is for training configurations; remove it, or set config"),
    "retries": ({"retries": -1}, "jobs.0.retries=-1 must be at least 0; raise it"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_jobs_are_one_line_and_leave_nothing(cluster, capsys, case):
    change, message = BAD[case]
    job = {"name": "a", "shape": "2", "command": ["true"], **change}
    Path("jobs.yaml").write_text(json.dumps({"jobs": [{k: v for k, v in job.items() if v is not None}]}))
    refused(capsys, ["cluster", "run", "jobs.yaml"], message)
    assert not Path("runs").exists()


def test_a_shape_without_a_place(cluster, capsys):
    cluster.add("a", "3", "1", "0")
    message = "jobs.0 (a): shape=3 has no place on cluster.topology=2x2x2 with cluster.policy=first_fit"
    refused(capsys, ["cluster", "run", "jobs.yaml", "cluster.policy=first_fit"], message)
    assert not Path("runs").exists()


BAD_CLUSTER = {
    "topology": ("2x", "cluster.topology='2x' is not a torus; write sizes such as 8"),
    "policy": ("bets", "cluster.policy=bets does not exist; did you mean best?"),
    "queue": ("fcsf", "cluster.queue=fcsf is not a queue; did you mean fcfs?"),
    "cube": (3, "cluster.cube=3: 2x2x2 is not made of cubes of 3 a side; use a cube of 2, or none"),
}


@pytest.mark.parametrize("option", BAD_CLUSTER)
def test_a_bad_cluster_is_one_line(cluster, capsys, option):
    value, message = BAD_CLUSTER[option]
    cluster.add("a", "2", "1", "0")
    refused(capsys, ["cluster", "run", "jobs.yaml", f"cluster.{option}={value}"], message)
    assert not Path("runs").exists()


def test_commands_name_what_they_do_not_know(cluster, capsys):
    refused(capsys, ["cluster", "status"], "state=runs/cluster holds no cluster; give the folder")
    cluster.add("first", "2", "1", "0")
    cluster.manager()
    refused(capsys, ["cluster", "cancel", "frist"], "JOB=frist is no job of state=runs/cluster; did you mean first?")
    refused(capsys, ["cluster", "fail", "2,0,0"], "CHIP=2,0,0 is not on the torus 2x2x2; its chips are 0,0,0 to 1,1,1")
    refused(capsys, ["cluster", "fail", "1-0"], "CHIP=1-0 is not a chip; write its coordinates, as in 1,0,1")
    cluster.jobs[0]["shape"] = "1"
    cluster.add("second", "2", "1", "0")
    refused(capsys, ["cluster", "run", "jobs.yaml"], "job first is in cluster.state=runs/cluster already, with another")
    assert [job.name for job in cluster.store.jobs()] == ["first"]


def test_a_state_that_is_no_database(cluster, capsys):
    cluster.add("a", "2", "1", "0")
    Path("runs/cluster").mkdir(parents=True)
    Path("runs/cluster/cluster.db").write_text("this is no database, and is long enough not to be taken for one" * 40)
    refused(capsys, ["cluster", "run", "jobs.yaml"], "state=runs/cluster cannot be used: file is not a database; give")
    Path("runs/cluster/cluster.db").unlink()


def refused(capsys, argv: list[str], message: str) -> None:
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"meshsys: error: {message}"), line


def test_the_log_has_all_attempts(cluster):
    cluster.add("a", "2", "2", "0", "--crash", "1", "1")
    until(cluster.manager(), ended)
    log = log_file(Path("runs/cluster"), "a").read_text()
    assert "--- start 1," in log and "about to crash" in log and "--- start 2," in log


TINY = """\
run: {name: tiny}
model: {layers: 2, d_model: 16, heads: 2, d_ff: 32}
data: {source: text.txt, sequence_length: 16, batch_size: 8}
pipeline: {microbatches: 2}
train: {steps: 600, learning_rate: 3.0e-3}
checkpoint: {every: 20}
"""


def train_jobs(cluster: Cluster, *jobs: dict[str, Any]) -> None:
    Path("tiny.yaml").write_text(TINY)
    Path("text.txt").write_text("All is well that ends well.\n" * 40)
    cluster.jobs = [{"config": "tiny.yaml", **job} for job in jobs]
    Path("jobs.yaml").write_text(json.dumps({"cluster": cluster.cluster, "jobs": cluster.jobs}))


def losses(name: str) -> list[float]:
    return [json.loads(line)["loss"] for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_training_jobs_move_to_other_chips_with_the_same_losses(cluster, capsys):
    """One of two jobs loses a chip, the other is killed; both end with the losses of a run of their own."""
    train_jobs(cluster, {"name": "two", "axes": {"pipe": 2}}, {"name": "four", "axes": {"pipe": 2, "data": 2}})
    assert main(["cluster", "submit", "jobs.yaml"]) == 0
    store = cluster.store
    manager = Manager(store, read_orders("jobs.yaml"))
    jobs = until(manager, lambda jobs: all(len(cluster.steps(name)) > 12 for name in jobs), 240)
    assert [job.state for job in jobs.values()] == ["running", "running"]
    store.fail([jobs["two"].grant["nodes"][0]])
    for pid in processes.members(jobs["four"].token):
        if pid != jobs["four"].pid:
            os.kill(pid, signal.SIGKILL)
    jobs = until(manager, ended, 240)
    assert [(job.state, job.starts, job.crashes) for job in jobs.values()] == [("done", 2, 0), ("done", 2, 1)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "4"}
    for name, topology, axes in (("two", "2", "{pipe: 2}"), ("four", "2x2", "{pipe: 2, data: 2}")):
        mesh = f"mesh={{topology: '{topology}', axes: {axes}}}"
        command = [sys.executable, "-m", "meshsys", "train", "tiny.yaml", f"run.name=solo_{name}", mesh]
        assert subprocess.run(command, env=environment).returncode == 0
        assert losses(name) == losses(f"solo_{name}")


@pytest.mark.parametrize(
    "job, message",
    [
        ({"axes": {"pipe": 2}, "overrides": ["data.batch_size=7"]}, "job a: data.batch_size=7 is not a multiple of"),
        ({"axes": {"pipe": 2}, "shape": "2x2"}, "jobs.0 (a): mesh.axes.pipe=2 use 2 devices, but shape=2x2 has 4; set"),
        ({"overrides": ["train.stepz=3"]}, "jobs.0 (a): train.stepz=3 is not an option; did you mean train.steps?"),
        ({"dir": "x"}, "jobs.0 (a): dir is for commands; write overrides: [run.dir=x]"),
    ],
)
def test_a_bad_training_job_is_refused_before_anything_is_queued(cluster, capsys, job, message):
    train_jobs(cluster, {"name": "good"}, {"name": "a", **job})
    refused(capsys, ["cluster", "run", "jobs.yaml"], message.replace("jobs.0", "jobs.1"))
    assert not Path("runs").exists()


def test_two_jobs_in_one_folder_are_refused(cluster, capsys):
    train_jobs(cluster, {"name": "a"}, {"name": "b", "overrides": ["run.dir=runs/a"]})
    refused(capsys, ["cluster", "run", "jobs.yaml"], "jobs.1 (b): its folder ")
    train_jobs(cluster, {"name": "a"}, {"name": "a"})
    refused(capsys, ["cluster", "run", "jobs.yaml"], "jobs.1.name=a is there twice; give each job a name of its own")

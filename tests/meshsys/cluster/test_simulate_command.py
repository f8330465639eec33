"""`meshsys cluster simulate`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshsys.cli import main
from meshsys.cluster.config import ClusterConfig, PolicyConfig, load_simulation
from meshsys.cluster.metrics import measure
from meshsys.cluster.simulator import simulate
from meshsys.cluster.workload import Workload
from tests.meshsys.user_files import content, write

CONFIG = """\
cluster: {topology: 8x8x8, cube: 4}
workload: {generator: tpu_v4, jobs: 40, load: 0.8, seed: 1}
policies:
  - {placement: first_fit, queue: fcfs}
  - {placement: first_fit, queue: easy, name: ours}
"""


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "folder").mkdir()
    return tmp_path


def run(*argv: str) -> int:
    return main(["cluster", "simulate", *argv])


def test_table(folder, capsys):
    assert run("c.yaml") == 0
    about, head, one, other = capsys.readouterr().out.splitlines()
    assert about == "8x8x8 of cubes of 4, wiring same_position; 40 jobs (tpu_v4), offered load 0.8"
    assert head.split()[:2] == ["policy", "completed"]
    assert one.startswith("first_fit + fcfs ") and other.startswith("ours ")


def test_json(folder, capsys):
    assert run("c.yaml", "workload.jobs=20", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workload"]["jobs"] == 20 and found["workload"]["offered_load"] == pytest.approx(0.8)
    assert [each["queue"] for each in found["policies"]] == ["fcfs", "easy"]
    for each in found["policies"]:
        assert 0 < each["completion_rate"] <= 1
        assert each["finished"] + each["refused"] == each["jobs"] == 20
        assert each["jct_p50_hours"] <= each["jct_p90_hours"] <= each["jct_p99_hours"]
        waiting = each["waiting"]
        parts = sum(waiting[f"{part}_hours"] for part in ("resource_blocked", "shape_blocked", "turn"))
        assert parts == pytest.approx(waiting["mean_hours"])
        assert 0 < each["utilisation"]["mean"] <= 1 and 0 <= each["fragmentation"] <= 1
        over = each["utilisation"]["over_time"]
        assert len(over["hours"]) == len(over["utilisation"]) == len(over["waiting"]) == len(over["fragmentation"])
        assert each["wireability_violations"] == 0 and each["decision_ms_p50"] <= each["decision_ms_p99"]


def test_csv_and_report(folder, capsys):
    assert run("c.yaml", "--csv", "t.csv", "--report", "r.html") == 0
    with open("t.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["first_fit + fcfs", "ours"]
    assert float(rows[1]["jct_p50_hours"]) > 0 and float(rows[1]["utilisation"]) > 0
    page = (folder / "r.html").read_text()
    assert page.startswith("<!doctype html>") and page.count("<svg") == 4
    assert "http" not in page.replace("http://www.w3.org", "")
    pods = json.loads(page.split('id="pods">')[1].split("</script>")[0])
    assert pods["dims"] == [8, 8, 8] and [each["name"] for each in pods["policies"]] == ["first_fit + fcfs", "ours"]
    assert all(each["moments"] for each in pods["policies"])


def test_report_of_a_run_in_which_nothing_happens(folder):
    assert (
        run("c.yaml", "cluster.topology=2", "cluster.cube=null", "workload.generator=rfold", "--report", "r.html") == 0
    )


def test_numbers_by_hand():
    """A has 4 of 8 chips until 10 h, B all of them until 15; C comes at 2 and waits for its turn, then for B's end."""
    hours = 3600.0
    shapes = ((2,), (4,), (8,))
    workload = Workload(
        np.array([0.0, 1.0, 2.0]) * hours,
        np.array([10.0, 5.0, 3.0]) * hours,
        np.array([1, 2, 0]),
        shapes,
        np.zeros(3, bool),
    )
    options = PolicyConfig(placement="first_fit")
    found = measure(simulate(ClusterConfig(topology="8"), workload, options), options)
    assert (found.jobs, found.finished, found.completion_rate, found.makespan_hours) == (3, 3, 1.0, 18.0)
    assert found.jct_mean_hours == pytest.approx((10 + 14 + 16) / 3) and found.jct_p50_hours == 14
    assert found.waiting.mean_hours == pytest.approx((0 + 9 + 13) / 3)
    assert found.waiting.resource_blocked_hours == pytest.approx((9 + 5) / 3)
    assert found.waiting.turn_hours == pytest.approx(8 / 3)
    assert found.waiting.longest_hours == 13
    assert found.utilisation.mean == pytest.approx(0.5)  # up to the last arrival
    over = np.array(found.utilisation.over_time.utilisation)
    assert over.mean() == pytest.approx((4 * 10 + 8 * 5 + 2 * 3) / (8 * 18), rel=1e-3)
    assert found.fragmentation == pytest.approx(0.0)


def test_numbers_of_nothing():
    workload = Workload(np.zeros(1), np.ones(1), np.zeros(1, int), ((9,),), np.zeros(1, bool))
    options = PolicyConfig(placement="first_fit")
    found = measure(simulate(ClusterConfig(topology="8"), workload, options), options)
    assert found.completion_rate == 0 and math.isnan(found.jct_p50_hours)
    assert found.to_dict()["jct_p50_hours"] is None


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["workload.lod=1"], "workload.lod=1 is not an option; did you mean workload.load?"),
        (["clustr.cube=4"], "clustr.cube=4 is not an option; did you mean cluster.cube?"),
        (["policies.0.placement=bets"], "policies.0.placement=bets does not exist; did you mean best?"),
        (["policies.0.queue=eazy"], "policies.0.queue=eazy is not a queue; did you mean easy?"),
        (["policies.0.qeue=easy"], "policies.0.qeue=easy is not an option; did you mean policies.0.queue?"),
        (["policies.9.queue=easy"], "policies.9.queue: policies has 2 items; count from 0"),
        (["policies.queue=easy"], "policies is a list, name an item by its place, as in policies.0.placement"),
        (["policies=[]"], "policies=[] is empty; write at least one item"),
        (["policies=5"], "policies=5 is not a list of mappings; write items with the keys placement, queue"),
        (["policies=[{queue: fcfs}]"], "policies.0.placement is missing; write it"),
        (["workload.load=0"], "workload.load=0 is no load; write a number above 0, as in 0.4, or saturated"),
        (["workload.load=full"], "workload.load=full is no load; write a number above 0"),
        (["workload.generator=trace"], "workload.path is missing; give the trace file"),
        (["workload.path=a.csv"], "workload.path=a.csv is for generator: trace; set workload.generator=trace"),
        (["workload.mix=a.csv", "workload.generator=rfold"], "workload.mix=a.csv is for generator: tpu_v4;"),
        (["workload.jobs=0"], "workload.jobs=0 must be at least 1; raise it"),
        (["cluster.cube=3"], "cluster.cube=3: 8x8x8 is not made of cubes of 3 a side; use a cube of 2 or 4"),
        (["cluster.wiring=all"], "cluster.wiring=all is not a choice; use same_position or any"),
        (["cluster.topology=8by8"], "cluster.topology=8by8 is not a torus; write sizes joined by `x`"),
        (["cluster.topology=v5p:3x3x3"], "cluster.topology=v5p:3x3x3 is not a shape of v5p slices; the nearest"),
        (["cluster.failures.failed=[[8, 0, 0]]"], "cluster.failures.failed.0=[8, 0, 0] is no chip of 8x8x8; give 3"),
        (["cluster.failures.mtbf_hours=0"], "cluster.failures.mtbf_hours=0 must be above 0; raise it"),
        (["--csv", "folder"], "--csv=folder is a folder; give another path"),
        (["--report", "no/r.html"], "--report=no/r.html cannot be written: No such file or directory; give"),
    ],
)
def test_refused(folder, capsys, argv, wanted):
    before = content(folder)
    assert run("c.yaml", *argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("meshsys: error: ") and err.count("\n") == 1
    assert wanted in err and ";" in err
    assert content(folder) == before


def test_refused_files(folder, capsys):
    write("bad.yaml", "policies: [{placement: first_fit}]\nworkload: {generator: trace, path: t.csv}\n")
    write("t.csv", "0,0,CLOS,1,1,5\n1,x,CLOS,1,1,5\n")
    assert run("bad.yaml") == 2
    assert "t.csv, line 2: arrival='x' is not a number of at least 0; mend or remove" in capsys.readouterr().err
    write("none.yaml", "cluster: {topology: 8}\n")
    assert run("none.yaml") == 2
    assert "policies is missing; write it" in capsys.readouterr().err


def test_a_users_policy(folder, monkeypatch, capsys):
    """By `module:Class`; one that gives chips away twice is named, and nothing is written."""
    monkeypatch.syspath_prepend(str(folder))
    write(
        "mine.py",
        "from meshsys.cluster.policies.first_fit import FirstFit\n"
        "class Mine(FirstFit):\n"
        "    name = 'mine'\n"
        "class Twice(FirstFit):\n"
        "    name = 'twice'\n"
        "    def place(self, pod, shape, wrap=None):\n"
        "        return super().place(pod.empty(), shape, wrap)\n",
    )
    assert run("c.yaml", "policies=[{placement: 'mine:Mine'}]") == 0
    capsys.readouterr()
    assert run("c.yaml", "policies=[{placement: 'mine:Twice'}]", "--csv", "t.csv") == 2
    err = capsys.readouterr().err
    assert "placement=mine:Twice placed what cannot be placed: job" in err and "; mend the policy" in err
    assert not (folder / "t.csv").exists()


def test_no_jax():
    code = (
        "import sys; from meshsys.cluster import simulator, report, metrics; import meshsys.simulate_command; "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


CONFIGS = sorted((Path(__file__).resolve().parents[3] / "configs").glob("cluster_*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_of_the_repository(path):
    config = load_simulation(path)
    assert len(config.policies) >= 3 and path.read_text(encoding="utf-8").startswith("# ")
    small = ["workload.jobs=8", "policies=[{placement: first_fit, queue: easy}]"]
    assert main(["cluster", "simulate", str(path), *small]) == 0

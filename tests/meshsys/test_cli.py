"""The command line: exit codes, one-line errors, and the commands that need no training."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from meshsys.cli import main
from schedules.actions import from_csv
from schedules.costs import Costs, Link
from schedules.families import make, names
from schedules.simulate import simulate
from schedules.ticks import timeline

SIZES = ["--stages", "4", "--microbatches", "4"]
SIMULATE = ["schedule", "simulate", "1f1b", *SIZES]
SHOW = ["schedule", "show", "1f1b", *SIZES]


def fails(capsys, *argv: str) -> str:
    """The message of a command that must fail."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("meshsys: error: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ([], "COMMAND"),
        (["trian"], "did you mean train?"),
        (["zzz"], "use train, rl, plan, schedule, cluster, evaluate, generate"),
        (["train"], "required: CONFIG;"),
        (["train", "a.yaml", "--fast"], "unrecognized: --fast"),
        (["train", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["plan", "nowhere.yaml", "--json", "train.steps=5"], "nowhere.yaml does not exist"),
        (["schedule"], "list|show|simulate|search"),
        (["schedule", "shw"], "did you mean show?"),
        (["schedule", "show", "1f1p", "--stages", "4", "--microbatches", "4"], "'1f1b'"),
        (["schedule", "show", "1f1b", "--stages", "4"], "--microbatches is missing"),
        (["schedule", "show", "1f1b", "--stages", "4.5", "--microbatches", "4"], "--stages: 4.5 must be an integer"),
        (["schedule", "show", "1f1b", "--stages", "0", "--microbatches", "4"], "--stages: 0 must be an integer"),
        (["schedule", "show", "1f1b", "--stages", "2", "--microbatches", "2", "--chunks", "2"], "chunks=2"),
        (["schedule", "show", "1f1b", "--stages", "2", "--microbatches", "2", "--format", "pdf"], "text, csv, svg"),
        (["schedule", "show", "csv:nowhere.csv"], "csv:nowhere.csv cannot be read"),
        (["schedule", "list", "more"], "unrecognized: more"),
        (["schedule", "simulate", "1f1b", "--stages", "4"], "--microbatches is missing"),
        (SIMULATE + ["--costs", "F=fast"], "--costs: costs 'F=fast': 'F=fast' has no number"),
        (SIMULATE + ["--costs", "times"], "--costs=times cannot be read: No such file"),
        (SIMULATE + ["--costs", "F"], "or times as in F=1,I=1,W=1"),
        (SIMULATE + ["--costs", "."], "--costs=. cannot be read: Is a directory"),
        (SIMULATE + ["--timing", "lockstop"], "did you mean lockstep?"),
        (["generate", "nowhere", "--prompt", "x"], "the model nowhere does not exist"),
        (["generate", "nowhere"], "--prompt"),
        (["generate", "nowhere", "--prompt", "x", "--temperature", "-1"], "--temperature: -1 must be a number"),
        (["generate", "nowhere", "--prompt", "x", "--temperature", "nan"], "--temperature: nan must be a number"),
        (["generate", "nowhere", "--prompt", "x", "--max-tokens", "0"], "--max-tokens: 0 must be an integer"),
        (["report", "nowhere"], "the run nowhere does not exist"),
        (["trace", "nowhere"], "the run nowhere does not exist"),
        (["trace", "nowhere", "--steps", "-1"], "--steps: -1 must be an integer"),
        (["schedule", "measure"], "required: CONFIG"),
        (["schedule", "measure", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["schedule", "measure", "nowhere.yaml", "--rounds", "0"], "--rounds: 0 must be an integer of at least 1"),
        (SHOW + ["--format", "perfetto", "--costs", "F=-1"], "--costs=F=-1: cost F=-1.0 is not a time"),
        (SHOW + ["--timing", "async"], "use lockstep, asynchronous"),
        (["schedule", "simulate", "cross_region_wave", *SIZES, "--chunks", "3"], "chunks=3 is odd"),
    ],
)
def test_mistakes(capsys, monkeypatch, tmp_path, argv, wanted):
    monkeypatch.chdir(tmp_path)
    assert wanted in fails(capsys, *argv)
    assert not any(tmp_path.iterdir())


def test_broken_config(capsys, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("run: {name: tiny}\nmodel: {layers: four}\n")
    for command in ("train", "plan"):
        assert "model.layers=four is not an integer" in fails(capsys, command, str(path))
    assert "train.steps=x is not an integer" in fails(
        capsys, "plan", str(path), "--json", "model.layers=4", "train.steps=x"
    )


def test_the_nearest_run_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    assert "did you mean runs/quickstart?" in fails(capsys, "report", "quikstart")


def test_schedule_list(capsys):
    assert main(["schedule", "list"]) == 0
    shown = capsys.readouterr().out.split()
    assert set(names()) <= set(shown)


@pytest.mark.parametrize("name", names())
def test_schedule_show_csv_reads_back(capsys, monkeypatch, tmp_path, name):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["schedule", "show", name, "--stages", "3", "--microbatches", "5", "--format", "csv"]) == 0
    path = tmp_path / "schedule.csv"
    path.write_text(capsys.readouterr().out)
    wanted = make(name, ranks=3, microbatches=5)
    assert from_csv(path.read_text()).actions == wanted.actions

    assert main(["schedule", "show", f"csv:{path}"]) == 0
    assert capsys.readouterr().out.count("rank ") == 3
    assert "--stages=4, but" in fails(capsys, "schedule", "show", f"csv:{path}", "--stages", "4")


def test_schedule_show_text_and_svg(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    options = ["--stages", "2", "--microbatches", "3"]
    assert main(["schedule", "show", "1f1b", *options]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rank ")]
    grid = timeline(make("1f1b", ranks=2, microbatches=3))
    assert [len(row.split()) - 2 for row in rows] == [len(row) for row in grid]
    assert main(["schedule", "show", "1f1b", *options, "--format", "svg"]) == 0
    assert capsys.readouterr().out.startswith("<svg")
    times = ["--costs", "F=1,I=2,W=1,send=1", "--timing", "asynchronous"]
    for given in (times, times[:2], times[2:]):
        assert main(["schedule", "show", "1f1b", *options, "--format", "svg", *given]) == 0
        assert "1f1b: makespan" in capsys.readouterr().out
        assert main(["schedule", "show", "1f1b", *options, "--format", "perfetto", *given]) == 0
        trace = json.loads(capsys.readouterr().out)
        assert trace["otherData"]["timing"] == ("asynchronous" if "--timing" in given else "lockstep")
        assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 12


@pytest.mark.parametrize(
    ("timing", "split", "makespan"), [("lockstep", 0, 148), ("asynchronous", 0, 117), ("lockstep", 1, 110)]
)
def test_schedule_simulate(capsys, timing, split, makespan):
    argv = ["schedule", "simulate", "1f1b", "--stages", "8", "--microbatches", "32", "--costs", "F=1,I=1,W=1"]
    argv += ["--timing", timing, *["--split"][:split]]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "name": "1f1b",
        "stages": 8,
        "microbatches": 32,
        "chunks": 1,
        "timing": timing,
        "makespan": makespan,
        "bubble_fraction": pytest.approx(1 - 96 / makespan),
        "work": [96] * 8,
        "peak_activations": list(range(8, 0, -1)),
        "peak_weight_stash": [split] * 8,
    }
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert f"makespan         {makespan}\n" in out
    assert [line.split() for line in out.splitlines()[-8:]] == [
        [str(rank), "96", str(8 - rank), str(split)] for rank in range(8)
    ]


def test_schedule_simulate_within_a_memory_cap(capsys):
    times = ["--costs", "F=1,I=1,W=1,send=2", "--timing", "asynchronous", "--json"]
    makespans = []
    for cap in ("4", "8"):
        assert main(["schedule", "simulate", "cross_region", *SIZES[:3], "16", *times, "--memory-cap", cap]) == 0
        found = json.loads(capsys.readouterr().out)
        assert max(found["peak_activations"]) <= int(cap)
        makespans.append(found["makespan"])
    assert makespans[1] < makespans[0]
    assert "memory_cap=8.0: 1f1b takes no memory_cap" in fails(capsys, *SIMULATE, "--memory-cap", "8")


def test_schedule_simulate_reads_a_cost_file(capsys, tmp_path):
    path = tmp_path / "costs=1.json"
    costs = Costs(F=(1, 2, 3, 4), I=2, W=1, links=(Link(0, 1, 2, 3),))
    path.write_text(costs.to_json({"device": "none"}))
    wanted = simulate(make("1f1b", ranks=4, microbatches=4), costs, "asynchronous")
    assert main([*SIMULATE, "--costs", str(path), "--timing", "asynchronous", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == wanted.makespan

    path.write_text(Costs(F=(1, 2)).to_json())
    assert "costs: F is given for 2 stages, and the schedule has 4" in fails(capsys, *SIMULATE, "--costs", str(path))
    path.write_text('{"F": "x"}')
    assert f'--costs={path}: cost F="x" is not a time' in fails(capsys, *SIMULATE, "--costs", str(path))
    path.write_bytes(b"\xff\xfe")
    assert f"--costs={path} is not text" in fails(capsys, *SIMULATE, "--costs", str(path))


def test_schedule_show_group(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    options = ["--stages", "1", "--microbatches", "4", "--group", "4"]
    assert main(["schedule", "show", "kfkb", *options]) == 0
    assert "F0 F1 F2 F3 B0" in capsys.readouterr().out
    assert "group=4: 1f1b takes no group" in fails(capsys, "schedule", "show", "1f1b", *options)
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0B0\n")
    assert "--group=4, but the order of" in fails(capsys, "schedule", "show", f"csv:{path}", "--group", "4")


def test_broken_csv_names_the_file(capsys, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text("0F0,0X0\n")
    message = fails(capsys, "schedule", "show", f"csv:{path}")
    assert str(path) in message and "0X0" in message


def test_help_exits_with_0(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "schedule" in capsys.readouterr().out


def test_ctrl_c(monkeypatch):
    def interrupt() -> tuple[str, ...]:
        raise KeyboardInterrupt

    monkeypatch.setattr("schedules.families.names", interrupt)
    assert main(["schedule", "list"]) == 130


def test_as_a_process():
    """No traceback, one line, and JAX stays out of commands that do not need it."""
    command = [sys.executable, "-X", "importtime", "-m", "meshsys", "schedule", "show", "1f1p"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    modules = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    rest = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2 and done.stdout == ""
    assert len(rest) == 1 and rest[0].startswith("meshsys: error: ")
    assert not any(line.split("|")[-1].strip() in ("jax", "pydantic") for line in modules)


def test_reader_that_leaves():
    """`meshsys ... | head` ends without a complaint."""
    command = [sys.executable, "-m", "meshsys", "schedule", "show", "gpipe", "--stages", "8", "--microbatches", "900"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141

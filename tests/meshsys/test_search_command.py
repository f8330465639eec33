"""`meshsys schedule search` at the command line."""

from __future__ import annotations

import json

import pytest

from meshsys.cli import main
from schedules.actions import from_csv
from schedules.costs import Costs
from schedules.simulate import simulate

SMALL = ["schedule", "search", "--stages", "3", "--microbatches", "6", "--seconds", "1"]
COSTS = ["--costs", "F=1,I=1.3,W=0.7"]


@pytest.mark.parametrize("timing", ["lockstep", "asynchronous"])
def test_json_and_csv_agree(capsys, tmp_path, timing):
    out = tmp_path / "found.csv"
    assert main([*SMALL, *COSTS, "--timing", timing, "--memory-cap", "4", "--json", "--out", str(out)]) == 0
    said = json.loads(capsys.readouterr().out)
    timeline = simulate(from_csv(out.read_text()), Costs(F=1, I=1.3, W=0.7), timing)
    assert said["makespan"] == timeline.makespan
    assert said["peak_activations"] == list(timeline.peak_activations)
    assert said["lower_bound"] <= said["makespan"] + 1e-9
    assert max(said["peak_activations"]) <= said["memory_cap"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["found.csv"]


def test_text_names_bound_and_method(capsys):
    assert main(SMALL) == 0  # with equal costs and the memory of 1f1b, zb_h1 is optimal
    out = capsys.readouterr().out
    assert "makespan         20\nlower_bound      20\nmethod           zb_h1, proved optimal\n" in out


@pytest.mark.parametrize(
    ("extra", "wanted"),
    [
        (["--stages", "0"], "--stages: 0 must be an integer of at least 1"),
        (["--stages", "300"], "--stages=300 is too large for a search"),
        (["--memory-cap", "0.5"], "--memory-cap: 0.5 must be a number of at least 1"),
        (["--memory-cap", "nan"], "--memory-cap: nan must be a number"),
        (["--costs", "F=1,X=2"], "'X' is no cost"),
        (["--costs", "nowhere.json"], "--costs=nowhere.json cannot be read"),
        (["--timing", "free"], "use lockstep, asynchronous"),
        (["--seconds", "0"], "--seconds: 0 must be a number"),
        (["--out", "nowhere/found.csv"], "--out=nowhere/found.csv cannot be written: No such file"),
        (["--out", "."], "--out=. is a folder"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(capsys, monkeypatch, tmp_path, extra, wanted):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, *extra]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("meshsys: error: ") and err.count("\n") == 1
    assert wanted in err
    assert not any(tmp_path.iterdir())

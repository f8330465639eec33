"""The trace of a run: measured steps, and the schedule's actions stretched to them."""

from __future__ import annotations

import json

import pytest

from meshsys.assemble import assemble
from meshsys.cli import main
from meshsys.config import Config, to_yaml
from meshsys.planner import make_plan
from schedules.simulate import simulate

SECONDS = [0.5, 0.25, 0.125, 0.25]


@pytest.fixture
def run(tmp_path):
    """A run's folder as training leaves it."""
    config = Config.model_validate(
        {
            "run": {"name": "tiny"},
            "model": {"layers": 2, "d_model": 16, "heads": 2, "d_ff": 32},
            "data": {"sequence_length": 8, "batch_size": 6},
            "mesh": {"topology": "2", "axes": {"pipe": 2}},
            "pipeline": {"schedule": "zb_h1", "microbatches": 3, "costs": "F=1,I=1.25,W=0.75"},
        }
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    (tmp_path / "plan.json").write_text(make_plan(config).to_json())
    records = [{"step": step, "loss": 2.0, "step_seconds": time} for step, time in enumerate(SECONDS, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path, config


@pytest.mark.parametrize("drawn", [0, 2, 9])
def test_steps_are_measured_and_actions_fill_the_last_ones(capsys, run, drawn):
    folder, config = run
    assert main(["trace", str(folder), "--steps", str(drawn)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "trace.json")
    trace = json.loads((folder / "trace.json").read_text())
    assert trace["otherData"]["steps"].startswith("measured") and trace["otherData"]["actions"].startswith(
        "not measured"
    )
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in slices if event["name"].startswith("step")]
    assert [event["dur"] for event in steps] == [1e6 * seconds for seconds in SECONDS]
    assert [event["ts"] for event in steps] == [0, 5e5, 7.5e5, 8.75e5]

    assembly = assemble(config)
    found = simulate(assembly.schedule, assembly.costs)
    actions = [event for event in slices if event not in steps]
    assert len(actions) == min(drawn, 4) * len(list(assembly.schedule))
    for event in actions:
        step = steps[event["args"]["step"] - 1]
        scale = step["dur"] / found.makespan
        action = next(one for one in assembly.schedule if str(one) == event["name"])
        assert event["ts"] == pytest.approx(step["ts"] + scale * found.start[action])
        assert event["dur"] == pytest.approx(scale * assembly.costs.of(action))


def test_refused(capsys, run):
    folder, _ = run

    def fails(words: str) -> None:
        assert main(["trace", str(folder)]) == 2
        assert words in capsys.readouterr().err
        assert not (folder / "trace.json").exists()

    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    fails("has no measured step; train one first")
    (folder / "plan.json").write_text("{}")
    fails("has no plan.json that can be read")
    (folder / "config.yaml").unlink()
    fails("is not a run: it has no config.yaml")

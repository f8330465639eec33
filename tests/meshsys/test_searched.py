"""`pipeline.schedule=search`: what a run gets, keeps and finds again."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from meshsys import searched as module
from meshsys.assemble import assemble
from meshsys.config import Config
from meshsys.errors import ConfigError
from meshsys.searched import RECORD, searched
from meshsys.train import train
from schedules.costs import Costs
from schedules.search import Question, search


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(number * number) for number in range(500)))

    def make(search: dict[str, Any] | None = None, **pipeline: Any) -> Config:
        pipeline = {"costs": "F=1,I=1.3,W=0.7"} | pipeline
        looked_for = {"seconds": 0.2} | (search or {})
        return Config.model_validate(
            {
                "run": {"name": "tiny", "dir": str(tmp_path / "run")},
                "model": {"layers": 3, "d_model": 8, "heads": 2, "d_ff": 16},
                "data": {"source": str(text), "sequence_length": 8, "batch_size": 4},
                "mesh": {"topology": "2", "axes": {"pipe": 2}},
                "pipeline": {"schedule": "search", "microbatches": 4, "search": looked_for} | pipeline,
                "train": {"steps": 2, "learning_rate": 1e-2},
            }
        )

    return make


@pytest.fixture
def searches(monkeypatch) -> list[Question]:
    """The questions that were searched for, and not found in a file."""
    asked: list[Question] = []
    monkeypatch.setattr(module, "search", lambda question: asked.append(question) or search(question))
    return asked


def test_a_question_is_searched_for_once(config_of, searches, tmp_path):
    config = config_of()
    schedule, record = searched(config)
    assert searches == [Question(2, 4, Costs(F=1, I=1.3, W=0.7), 2, seconds=0.2)]
    assert searched(config) == (schedule, record)
    assert len(searches) == 1
    assert not (tmp_path / "run").exists()  # only a run writes there
    searched(config_of({"memory_cap": 3}))
    searched(config_of(costs=None))
    assert len(searches) == 3


def test_the_runs_own_schedule_comes_first(config_of, searches, tmp_path):
    """A later version may find another one; the run goes on with its own."""
    config = config_of()
    _, text = searched(config)
    record = json.loads(text)
    record["schedule"] = "0F0,0F1,0F2,0F3,,0I0,0I1,0I2,0I3,0W0,0W1,0W2,0W3\n,1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3\n"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RECORD).write_text(json.dumps(record))
    schedule, kept = searched(config)
    assert json.loads(kept) == record and str(schedule.actions[0][3]) == "0F3"
    assert assemble(config).schedule.actions[0] == schedule.actions[0]
    (tmp_path / "run" / RECORD).write_text(json.dumps(record | {"schedule": "0F0"}))
    assert searched(config) == (module.from_csv(json.loads(text)["schedule"], "search"), text)
    assert len(searches) == 1


def test_a_damaged_or_absent_cache_costs_a_search(config_of, searches, tmp_path):
    config = config_of()
    answer = searched(config)
    for path in (tmp_path / "cache").rglob("*.json"):
        path.write_text("[1]")
    assert searched(config) == answer
    for path in (tmp_path / "cache").rglob("*.json"):
        path.unlink()
        path.mkdir()
    assert searched(config) == answer
    assert len(searches) == 3


@pytest.mark.slow
def test_a_run_trains_with_it_and_keeps_it(config_of, searches, tmp_path):
    def losses() -> list[float]:
        return [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]

    config = config_of(microbatches=4)
    assert train(config) == 0
    found = losses()
    record = json.loads((tmp_path / "run" / RECORD).read_text())
    assert record["question"]["memory_cap"] == 2 and record["makespan"] >= record["lower_bound"] - 1e-9
    assert assemble(config).schedule == searched(config)[0]
    assert len(searches) == 1
    (tmp_path / "run").rename(tmp_path / "first")
    assert train(config_of(schedule="1f1b", microbatches=4)) == 0
    assert losses() == pytest.approx(found, rel=1e-5)
    assert not (tmp_path / "run" / RECORD).exists()


@pytest.mark.parametrize(
    ("search", "pipeline", "words"),
    [
        ({}, {"costs": "F=x"}, "pipeline.costs: costs 'F=x'"),
        ({}, {"costs": "nowhere.json"}, "pipeline.costs=nowhere.json cannot be read"),
        ({}, {"chunks": 200}, "pipeline.chunks=200 is too large|mesh.axes.pipe=2 is too large"),
        ({}, {"group": 2}, "pipeline.group=2"),
    ],
)
def test_mistakes(config_of, searches, search, pipeline, words):
    with pytest.raises(ConfigError, match=words) as caught:
        assemble(config_of(search, **pipeline))
    assert "\n" not in str(caught.value) and not searches


def test_the_question_of_a_record_is_the_whole_question(config_of):
    _, text = searched(config_of())
    assert set(json.loads(text)["question"]) == {field.name for field in dataclasses.fields(Question)}

"""The run's page: it holds what the run recorded, asks for nothing from outside, and survives damaged runs."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser

import pytest

from meshsys.config import Config, to_yaml
from meshsys.errors import ConfigError
from meshsys.planner import make_plan
from meshsys.report import write_report
from meshsys.report.charts import line_chart, number_text, smooth, ticks
from meshsys.report.history import read_history


def config(topology: str = "2x2x2", schedule: str = "1f1b", microbatches: int = 4, **axes: int) -> Config:
    model = {"layers": 4, "d_model": 16, "heads": 2, "d_ff": 24}
    return Config.model_validate(
        {
            "run": {"name": "tiny"},
            "model": model,
            "data": {"sequence_length": 8, "batch_size": 4 * microbatches},
            "mesh": {"topology": topology, "axes": axes or {"pipe": 2, "data": 2, "tensor": 2}},
            "pipeline": {"schedule": schedule, "microbatches": microbatches},
            "train": {"steps": 10},
        }
    )


def record(step: int, **fields) -> dict:
    usual = {"loss": 5 / step, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 128, "tokens_per_s": 1000.0}
    return {"step": step, **usual, "step_seconds": 0.1} | fields


def make_run(folder, config: Config, records=(), plan: bool = True, tail: str = ""):
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    if plan:
        (folder / "plan.json").write_text(make_plan(config).to_json())
    lines = "".join(json.dumps(line) + "\n" for line in records)
    if records or tail:
        (folder / "metrics.jsonl").write_text(lines + tail)
    return folder


class Checker(HTMLParser):
    """Sees to it that tags close in order; collects ids, links and text."""

    VOID = {"meta", "br", "input", "img", "link"}

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.outside += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


def read_page(run) -> tuple[str, str]:
    """The page, and the words on it."""
    path = write_report(run)
    assert path == run / "report.html"
    text = path.read_text(encoding="utf-8")
    checker = Checker(text)
    assert not checker.outside
    assert not re.search(r"url\(|@import|fetch\(|https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.search(r"\bnan\b", text.lower())
    return text, " ".join(" ".join(checker.words).split())


def test_a_whole_run(tmp_path):
    run = make_run(tmp_path / "run", config(), [record(step) for step in range(1, 11)])
    text, words = read_page(run)
    for heading in ("Loss", "Gradient norm", "Learning rate", "Schedule", "Torus", "Stages", "Memory", "Residuals"):
        assert heading in words
    assert "10 of 10" in words
    assert "1f1b · pipe 2, data 2, tensor 2 on a 2x2x2 torus" in words
    assert text.count('class="chip"') == 8
    assert text.count('class="link"') + text.count('class="link hop"') == 12
    assert text.count('class="link hop"') == 4
    assert "batch_size: 16" in words
    plan = make_plan(config())
    assert f"{plan.parameters:,}" in words
    for value in plan.residuals:
        assert value.name in words
    assert [path.name for path in run.iterdir() if "report" in path.name] == ["report.html"]


@pytest.mark.parametrize(
    ("topology", "axes", "chips", "idle", "stubs"),
    [
        ("1", {"pipe": 1}, 1, 0, 0),
        ("8", {"pipe": 4}, 4, 4, 2),
        ("4x4", {"pipe": 2, "data": 2}, 4, 12, 16),
        ("v5p:4x4x4", {"pipe": 4, "data": 4}, 16, 48, 96),
        ("v4:4x4x8_twisted", {"pipe": 4, "data": 4}, 16, 112, 160),
        ("ironwood:2x2x1", {"pipe": 2, "data": 4}, 8, 0, 0),
        ("32x32x8", {"pipe": 2}, 0, 0, 0),
    ],
)
def test_tori(tmp_path, topology, axes, chips, idle, stubs):
    text, words = read_page(make_run(tmp_path / "run", config(topology, **axes)))
    assert text.count('class="chip"') == chips
    assert text.count('class="idle"') == idle
    assert text.count('class="link wrap"') == stubs
    assert ("too many to draw" in words) == (chips == 0)
    assert ("those along y come back 4 further along z" in words) == topology.endswith("twisted")


def test_a_long_schedule_stays_small(tmp_path):
    text, _ = read_page(make_run(tmp_path / "run", config("16", "zb_h1", 256, pipe=16)))
    assert len(text) < 1_500_000


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record(1)],
        [record(1, loss=None, grad_norm=None)],
        [record(step, loss=None) for step in range(1, 5)],
        [record(1), {"step": 2}, record(3, loss=math.nan), record(4, loss=math.inf), record(5, loss=2.0)],
        [record(step, loss=2.0) for step in range(1, 5)],
        [record(1), [], 3, "x", {"loss": 3.0}, {"step": "two"}, record(2)],
    ],
    ids=["none", "one", "one-null", "all-null", "gaps", "flat", "strange"],
)
@pytest.mark.parametrize("tail", ["", '{"step": 7, "lo'])
def test_odd_metrics(tmp_path, records, tail):
    _, words = read_page(make_run(tmp_path / "run", config(), records, plan=False, tail=tail))
    assert "Loss" in words and "no plan.json" in words
    shown = any(isinstance(line, dict) and line.get("step") and line.get("loss") for line in records)
    assert ("Loss Nothing yet." in words) == (not shown)


def test_thousands_of_steps_are_thinned_and_keep_the_extremes(tmp_path):
    records = [record(step, loss=2.0 + (step == 7777) * 50) for step in range(1, 20_001)]
    text, _ = read_page(make_run(tmp_path / "run", config(), records, plan=False))
    assert len(text) < 600_000
    assert "step 7,777: 52" in text


def test_everything_is_escaped(tmp_path):
    run = make_run(tmp_path / "run", config(), plan=False)
    (run / "config.yaml").write_text(to_yaml(config()).replace("1f1b", '"csv:<script>alert(1)</script>&.csv"'))
    plan = json.loads(make_plan(config()).to_json())
    plan["residuals"][0]["name"] = plan["schedule"]["name"] = '<b>"&'
    (run / "plan.json").write_text(json.dumps(plan))
    text, words = read_page(run)
    assert "<script>alert" not in text and "<b>" not in text
    assert "csv:<script>alert(1)</script>&.csv" in words


def test_no_run(tmp_path):
    with pytest.raises(ConfigError, match="is not a run: it has no config.yaml"):
        write_report(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", '{"run": ', "[1]"])
def test_damaged_plan(tmp_path, text):
    run = make_run(tmp_path / "run", config(), plan=False)
    (run / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match="plan.json is not a plan; remove it"):
        write_report(run)
    assert not (run / "report.html").exists()


def test_history_takes_the_later_of_two_records(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = (record(1, loss=5.0), record(2, loss=4.0), record(2, loss=3.0))
    path.write_text("\n".join(map(json.dumps, lines)))
    history = read_history(path)
    assert history.steps == (1, 2)
    assert history.of("loss") == (5.0, 3.0)
    assert math.isnan(history.of("absent")[0])


@pytest.mark.parametrize(
    ("low", "high", "whole", "wanted"),
    [
        (0, 10, False, [0, 2, 4, 6, 8, 10]),
        (0.1, 0.52, False, [0.1, 0.2, 0.3, 0.4, 0.5]),
        (1, 3, True, [1, 2, 3]),
        (-1, 1, False, [-1, -0.5, 0, 0.5, 1]),
        (0, 2e-3, False, [0, 0.0005, 0.001, 0.0015, 0.002]),
    ],
)
def test_ticks(low, high, whole, wanted):
    assert ticks(low, high, 5, whole) == pytest.approx(wanted)


def test_smooth_is_the_mean_around():
    values = [1.0, 2.0, 6.0, math.nan, 4.0, 8.0]
    found = smooth(values, 3)
    assert found == pytest.approx([1.0, 3.0, 4.0, 5.0, 6.0, 8.0])
    assert smooth([1.0, 5.0], 1) == [1.0, 5.0]
    assert all(map(math.isnan, smooth([math.nan], 3)))


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (0, "0"),
        (1.23456, "1.235"),
        (2345.6, "2,346"),
        (12345, "12.3k"),
        (1.5e6, "1.5M"),
        (3e-5, "3.0e-05"),
        (math.nan, "–"),
    ],
)
def test_numbers(value, wanted):
    assert number_text(value) == wanted


def test_chart_points_lie_on_the_chart():
    text = line_chart("Loss", [1, 2, 3], [3.0, math.nan, 1.0], width=300, height=100)
    x = [float(number) for number in re.findall(r"[ML]([\d.]+) ", re.search(r'class="line" d="([^"]*)"', text)[1])]
    assert x == sorted(x) and 0 <= x[0] and x[-1] <= 300
    assert text.count("M", text.index('class="line"'), text.index("/>", text.index('class="line"'))) == 2
    assert "step 2: not finite" in text

"""The page of a run that learned from rewards: what it recorded, where its time went, what it was told."""

from __future__ import annotations

import json
import math
import re

import pytest

from meshsys.config import Config
from meshsys.report.history import History
from meshsys.report.phases import phases
from meshsys.report.samples import read_samples
from tests.meshsys.test_report import config, make_run, read_page


def rl_config() -> Config:
    raw = config().model_dump() | {"rl": {"tasks": [{"source": "rack"}]}}
    return Config.model_validate(raw)


def record(step: int, **fields) -> dict:
    usual = {
        "reward_mean": step / 10,
        "reward/task": step / 8,
        "reward/format": 0.5,
        "zero_variance_groups": 1,
        "response_tokens_mean": 12.0,
        "stopped_fraction": 0.25,
        "reward_errors": 0,
        "loss": 0.1,
        "kl": 0.02,
        "sampler_logprob_error": 1e-6,
        "tokens": 100,
        "tokens_per_s": 50.0,
        "reshard_seconds": 0.5,
        "sample_seconds": 2.0,
        "reward_seconds": 0.25,
        "train_seconds": 1.0,
        "step_seconds": 4.0,
    }
    return {"step": step, **usual} | fields


def sample(step: int, **fields) -> dict:
    usual = {"prompt": f"question {step}", "response": f"said {step}", "answer": "7", "reward": 0.5, "tokens": 3}
    return {"step": step, **usual, "stopped": True} | fields


def write_samples(run, lines, tail: str = "", escaped: bool = False):
    text = "".join(json.dumps(line, ensure_ascii=escaped) + "\n" for line in lines)
    (run / "samples.jsonl").write_text(text + tail, encoding="utf-8")


def history_of(*records: dict) -> History:
    names = records[0]
    series = {name: tuple(float(one[name]) for one in records) for name in names}
    return History(tuple(one["step"] for one in records), series)


def test_a_whole_run(tmp_path):
    run = make_run(tmp_path / "run", rl_config(), [record(step) for step in range(1, 11)])
    write_samples(run, [sample(step) for step in range(1, 11)])
    text, words = read_page(run)
    assert re.search(r"<dt>reward</dt><dd>1<small>at first 0.1</small>", text)
    assert "<dt>loss</dt>" not in text
    for heading in ("Reward", "Each reward", "Updates", "Phases", "Responses", "Schedule", "Torus", "Memory"):
        assert f">{heading}" in text
    assert "Largest ratio" not in words  # was not recorded
    assert "question 1 " in words and "said 10" in words
    assert "tokens sampled 1,000" in words
    assert "failed" not in words


def test_rewards_that_failed_are_told(tmp_path):
    records = [record(1, reward_errors=2), record(2, reward_errors=1, reward_crashes=4)]
    _, words = read_page(make_run(tmp_path / "run", rl_config(), records, plan=False))
    assert "3 rewards raised" in words and "4 responses ended the process" in words and "too long" not in words


def test_phases_follow_one_another():
    text = phases(history_of(*(record(step) for step in range(1, 21))))
    bars = re.findall(r'x="([\d.]+)" y="[\d.]+" width="([\d.]+)".*?<title>step (\d+): (\w+) ([\d.]+) s', text)
    assert [(int(step), name) for _, _, step, name, _ in bars] == [
        (step, name) for step in range(13, 21) for name in ("reshard", "sample", "reward", "train")
    ]
    starts = [float(x) for x, *_ in bars]
    pixels = [float(width) / float(seconds) for _, width, _, _, seconds in bars]
    assert pixels == pytest.approx([pixels[1]] * len(bars), rel=0.1)
    for (x, width, _, name, _), begun in zip(bars, starts[1:], strict=False):
        rest = 0.25 * pixels[1] if name == "train" else 0.0
        assert float(x) + float(width) + rest == pytest.approx(begun, abs=0.3)


def test_shares_are_of_all_steps():
    slow = record(1, sample_seconds=12.0, step_seconds=14.0)
    text = phases(history_of(slow, record(2), record(3)))
    cells = [re.sub(r"<[^>]*>", " ", row).split() for row in re.findall(r"<tr>(.*?)</tr>|$", text)]
    found = {cell[0]: cell[1:] for cell in cells if cell}
    assert found["sample"] == ["16", "s", "72.7%", "2", "s"]
    assert found["train"] == ["3", "s", "13.6%", "1", "s"]
    assert found["the"][1:] == ["0.75", "s", "3.4%", "0.25", "s"]


def test_phases_that_overlap_are_not_laid_end_to_end():
    text = phases(history_of(*(record(step, trainer_wait_seconds=float(step)) for step in range(1, 4))))
    assert "<svg" not in text and "overlap" in text
    cells = [re.sub(r"<[^>]*>", " ", row).split() for row in re.findall(r"<tr[^>]*>(.*?)</tr>", text)][1:]
    assert cells[1] == ["sample", "2", "s"] and cells[4] == ["trainer", "waits", "2", "s"]
    assert cells[-1] == ["step", "4", "s"]


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"step": 1}],
        [record(1, reward_mean=None, sample_seconds=None)],
        [record(1), {"step": 2}, record(3, step_seconds=0.0), record(4, train_seconds=-1.0)],
        [record(1, **{f"{name}_seconds": 0.0 for name in ("reshard", "sample", "reward", "train", "step")})],
    ],
    ids=["none", "empty", "nulls", "gaps", "no-time"],
)
def test_odd_metrics(tmp_path, records):
    _, words = read_page(make_run(tmp_path / "run", rl_config(), records, plan=False, tail='{"step": 7, "re'))
    assert "Reward" in words and "Phases" in words and "None were kept" in words


def test_everything_is_escaped(tmp_path):
    run = make_run(tmp_path / "run", rl_config(), [record(1, **{'reward/<b>"': 0.5})], plan=False)
    bad = sample(1, prompt="<script>alert(1)</script>", response='"><b>\x00\x1b\ud800', answer="<i>&")
    write_samples(run, [bad], escaped=True)
    text, words = read_page(run)
    assert "<script>alert" not in text and "<b>" not in text
    assert "<script>alert(1)</script>" in words and r"\x00\x1b\ud800" in words and "<i>&" in words


def test_long_responses_are_cut(tmp_path):
    run = make_run(tmp_path / "run", rl_config(), [record(1)], plan=False)
    write_samples(run, [sample(1, response="x" * 100_000)])
    text, words = read_page(run)
    assert len(text) < 100_000 and "98,500 more characters" in words


def test_the_first_samples_and_the_last(tmp_path):
    write_samples(tmp_path, [sample(step) for step in range(1, 31)], tail='{"step": 31, "prom')
    found = read_samples(tmp_path / "samples.jsonl", 2, 3)
    assert [one.step for one in found] == [1, 2, 28, 29, 30]
    assert len(read_samples(tmp_path / "samples.jsonl", 20, 20)) == 30
    assert read_samples(tmp_path / "absent.jsonl", 2, 3) == ()


def test_odd_samples(tmp_path):
    lines = [sample(1, response="a\u2028b"), 3, {"step": "x"}, {"step": 2}, sample(3, reward="much", answer=None)]
    write_samples(tmp_path, lines)
    one, two, three = read_samples(tmp_path / "samples.jsonl", 9, 9)
    assert one.response == "a\u2028b" and one.reward == 0.5 and one.has_stopped
    assert (two.prompt, two.tokens, two.has_stopped) == ("", 0, False) and math.isnan(two.reward)
    assert three.answer == "" and math.isnan(three.reward)

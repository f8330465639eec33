"""`meshsys rl` through the real command line: what a run writes, how it goes on, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from meshsys.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

STEPS = 3

TASKS = '''
class Copies:
    """An endless task: a digit is to be said again."""

    def __init__(self, seed):
        self.seed = seed

    def __getitem__(self, number):
        digit = str((self.seed + 7 * number) % 10)
        return {"prompt": digit + "=", "answer": digit}


def copies(*, seed):
    return Copies(seed)


def low_bytes(prompt, response):
    """Half of what a new model says."""
    return sum(character < "@" for character in response) / max(len(response), 1)
'''

CONFIG = """
run: {name: tiny, seed: 3}
model: {layers: 2, d_model: 16, heads: 2, d_ff: 32}
mesh: {topology: "4", axes: {pipe: 2, data: 2}}
pipeline: {schedule: 1f1b, microbatches: 2}
train: {steps: 3, learning_rate: 1e-2}
checkpoint: {every: 1}
rl:
  tasks: [{source: "python:tasks.py:copies"}]
  rewards: [{kind: task}, {kind: "python:tasks.py:low_bytes", weight: 0.5}]
  reward_pool: {workers: 1}
  sampling: {axes: {tensor: 2}}
  algorithm: {name: grpo, kl: {coefficient: 0.1}}
  prompts_per_step: 4
  samples_per_prompt: 2
  max_prompt_tokens: 4
  max_response_tokens: 3
  minibatches: 2
"""

# Of each step: what depends on the machine, and all else.
TIMES = {
    "tokens_per_s",
    "reshard_seconds",
    "sample_seconds",
    "reward_seconds",
    "train_seconds",
    "step_seconds",
    "compilations",
}
RECORDED = {
    *("step", "reward_mean", "reward_std", "reward/task", "reward/low_bytes", "zero_variance_groups"),
    *("sampled_groups", "response_tokens_mean", "stopped_fraction", "reward_errors", "reward_timeouts"),
    *("reward_crashes", "sampler_logprob_error", "loss", "grad_norm", "ratio_max", "clip_fraction", "update_kl", "kl"),
    *("learning_rate", "tokens", "prompts_skipped", "reshard_bytes", "reshard_changed", "policy_version"),
}


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory) -> Iterator[None]:
    """The runs here are of the same programs."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    reset_cache()
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def write_files(folder: Path) -> None:
    (folder / "tasks.py").write_text(TASKS)
    (folder / "tiny.yaml").write_text(CONFIG)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("finished")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["rl", "tiny.yaml"]) == 0
    return folder / "runs" / "tiny"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory."""
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def exact(run: Path) -> list[dict[str, Any]]:
    """What a run recorded, without its times."""
    return [{name: value for name, value in one.items() if name not in TIMES} for one in lines(run / "metrics.jsonl")]


def checksums(run: Path, step: int) -> dict[str, Any]:
    """Of every array of a checkpoint, and the place in the prompts."""
    (path,) = (path for path in (run / "checkpoints" / str(step) / "meta").iterdir() if path.name == "metadata")
    return json.loads(path.read_text())


def test_what_a_run_writes(finished):
    records = lines(finished / "metrics.jsonl")
    assert [one["step"] for one in records] == [1, 2, 3]
    for one in records:
        assert RECORDED | TIMES <= set(one)
        assert all(math.isfinite(value) for value in one.values())
        assert one["reward_mean"] == pytest.approx(one["reward/task"] + 0.5 * one["reward/low_bytes"])
        assert one["sampler_logprob_error"] < 1e-4
        assert one["sampled_groups"] == 4 and one["policy_version"] == 2 * one["step"]
    assert records[0]["reward/low_bytes"] > 0
    samples = lines(finished / "samples.jsonl")
    assert [one["step"] for one in samples] == [1] * 4 + [2] * 4 + [3] * 4
    assert len({one["prompt_id"] for one in samples}) == 12
    for name in ("config.yaml", "plan.json", "report.html", "tensorboard"):
        assert (finished / name).exists()
    assert "low_bytes" in (finished / "report.html").read_text()


def test_a_resumed_run_is_the_same(finished, folder, capsys):
    """Bit for bit; what a run that is killed wrote of later steps is written again."""
    run = folder / "runs" / "tiny"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints" / "3")
    assert main(["rl", "tiny.yaml"]) == 0
    out = capsys.readouterr().out
    assert "resuming tiny after step 2\n" in out and "complete at step 3" in out
    assert exact(run) == exact(finished)
    assert lines(run / "samples.jsonl") == lines(finished / "samples.jsonl")
    assert checksums(run, 3) == checksums(finished, 3) != checksums(finished, 2)


def test_a_complete_run_stays_as_it_is(finished, folder, capsys):
    run = folder / "runs" / "tiny"
    shutil.copytree(finished, run)
    assert main(["rl", "tiny.yaml"]) == 0
    assert "complete at step 3" in capsys.readouterr().out
    assert lines(run / "metrics.jsonl") == lines(finished / "metrics.jsonl")


BAD_OPTIONS: dict[str, tuple[list[str], str]] = {
    "no rl": (["rl=null"], "rl is missing; `meshsys rl` needs that section"),
    "lone responses": (["rl.samples_per_prompt=1"], "rl.samples_per_prompt=1, but rl.algorithm.name=grpo compares the"),
    "minibatches": (["rl.minibatches=3"], "rl.minibatches=3 does not divide the 8 responses of a step"),
    "responses of a row": (
        ["rl.responses_per_row=4"],
        "rl.responses_per_row=4 does not divide rl.samples_per_prompt=2",
    ),
    "rows of a minibatch": (
        ["rl.responses_per_row=2", "rl.minibatches=8"],
        "rl.responses_per_row=2 does not divide a minibatch of 1, as rl.minibatches=8 parts have of 8 responses",
    ),
    "sampling axes": (["rl.sampling.axes.tensor=3"], "is not the 4 devices that train; change one of them"),
    "sampling data": (["rl.sampling.axes.data=4"], "rl.sampling.axes: data 4 x tensor 2"),
    "no flush": (["pipeline.schedule=pipedream_2bw"], "pipeline.schedule=pipedream_2bw has no flush"),
    "algorithm": (["rl.algorithm.name=grop"], "did you mean grpo?"),
    "task": (["rl.tasks=[{source: 'reasoning_gim:gcd'}]"], "did you mean reasoning_gym?"),
    "no tasks": (["rl.tasks=[]"], "rl.tasks"),
    "task of a file": (["rl.tasks=[{source: 'jsonl:nowhere.jsonl'}]"], "nowhere.jsonl"),
    "function": (["rl.tasks=[{source: 'python:tasks.py:copes'}]"], "module 'tasks' has no attribute 'copes'; mend it"),
    "reward": (["rl.rewards=[{kind: exact}]"], "did you mean exact_match?"),
    "long prompts": (["rl.max_prompt_tokens=2"], "rl.max_prompt_tokens=2: 1000 prompts in a row are longer"),
    "truncated heads": (
        ["pipeline.head=vocab_parallel", "rl.sampling.top_k=5"],
        "pipeline.head=vocab_parallel has no rank that sees all logits",
    ),
    "updates": (
        ["rl.algorithm={name: rloo}", "rl.minibatches=2"],
        "rl.algorithm.name=rloo learns from those of the very same policy",
    ),
}


@pytest.mark.parametrize(("overrides", "wanted"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_mistakes_are_one_line(folder, capsys, overrides, wanted):
    assert main(["rl", "tiny.yaml", *overrides]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("meshsys: error: ") and err.count("\n") == 1 and wanted in err
    assert not out and not (folder / "runs").exists()


def test_an_unknown_task_of_reasoning_gym(folder, capsys):
    pytest.importorskip("reasoning_gym")
    assert main(["rl", "tiny.yaml", "rl.tasks=[{source: 'reasoning_gym:gdc'}]"]) == 2
    err = capsys.readouterr().err
    assert "rl.tasks.0.source=reasoning_gym:gdc is no task of reasoning-gym; did you mean gcd?" in err


def test_a_run_of_rl_is_none_of_train(finished, folder, capsys):
    run = folder / "runs" / "tiny"
    shutil.copytree(finished, run)
    (folder / "text.txt").write_text("what is read " * 50)
    assert main(["train", "tiny.yaml", "rl=null", "data.source=text.txt", "data.batch_size=4"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "run.dir=runs/tiny holds a run of `meshsys rl`; begin a new one" in err

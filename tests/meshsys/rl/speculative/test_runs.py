"""Whole runs with drafts: stopped and gone on with, they are the run that was not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from meshsys.checkpoint import Checkpoints
from meshsys.config import Config
from meshsys.rl.loop import run_rl

STEPS, EVERY = 8, 3
TIMES = ("compilations", "tokens_per_s")


def config_of(folder: Path, mode: str, together: int) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "test", "seed": 1, "dir": str(folder / "run")},
            "model": {"layers": 2, "d_model": 16, "heads": 2, "d_ff": 32},
            "mesh": {"topology": "2", "axes": {"pipe": 2}},
            "pipeline": {"schedule": "1f1b", "microbatches": 2},
            "train": {"steps": STEPS, "learning_rate": 0.02, "warmup_steps": 0},
            "checkpoint": {"every": EVERY, "keep": 9},
            "rl": {
                "tasks": [{"source": f"jsonl:{folder / 'prompts.jsonl'}"}],
                "rewards": [{"kind": f"python:{folder / 'ascii.py'}:share"}],
                "algorithm": {"name": "dr_grpo"},
                "prompts_per_step": 2,
                "samples_per_prompt": 4,
                "responses_per_row": together,
                "max_prompt_tokens": 8,
                "max_response_tokens": 8,
                "speculative": {"mode": mode} | ({"refresh": 0.2} if mode == "exact" else {}),
            },
        }
    )


def records(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in line if "seconds" not in name and name not in TIMES} for line in lines]


def host(run: Path) -> dict[str, bytes]:
    """The drafts in the last checkpoint."""
    checkpoints = Checkpoints(run / "checkpoints", keep=9)
    meta = json.loads((run / "checkpoints" / str(STEPS) / "meta" / "metadata").read_text())
    try:
        arrays = checkpoints._host(STEPS, meta["host"])
    finally:
        checkpoints.close()
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "together"), [("exact", 1), ("lenient", 1), ("exact", 4)])
def test_a_run_that_was_stopped_is_the_one_that_was_not(mode: str, together: int, tmp_path: Path) -> None:
    prompts = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (tmp_path / "ascii.py").write_text(
        "def share(prompt, response):\n    return sum(ord(one) < 128 for one in response) / max(len(response), 1)\n"
    )
    config, run = config_of(tmp_path, mode, together), tmp_path / "run"
    assert run_rl(config) == 0
    whole, drafts = records(run), host(run)
    assert [one["draft_tokens"] > 0 for one in whole] == [False] * 2 + [True] * (STEPS - 2)
    assert 0 < min(one["accepted_fraction"] for one in whole[2:]) < 1
    for step in (2 * EVERY, STEPS):
        shutil.rmtree(run / "checkpoints" / str(step))
    assert run_rl(config) == 0
    assert records(run) == whole and host(run) == drafts

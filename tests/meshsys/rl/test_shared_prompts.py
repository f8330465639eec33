"""Runs in which responses share a row, and its prompt, beside runs in which each has a row of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.meshsys.rl.short_run import run

LEARNED = ("loss", "grad_norm", "reward_mean", "response_tokens_mean", "update_kl", "clip_fraction")


@pytest.mark.parametrize("options", [{}, {"algorithm": {"name": "gspo"}, "epochs": 2}], ids=["grpo", "gspo"])
def test_a_run_learns_the_same(tmp_path: Path, options: dict) -> None:
    records = {}
    for together in (1, 4):
        folder = tmp_path / str(together)
        folder.mkdir()
        records[together] = run(folder, 2, responses_per_row=together, **options)
    for alone, shared in zip(*records.values(), strict=True):
        for name in LEARNED:
            np.testing.assert_allclose(shared[name], alone[name], rtol=1e-3, atol=1e-5, err_msg=name)
        assert shared["sampler_logprob_error"] <= 2e-5


def test_minibatches_are_of_whole_rows(tmp_path: Path) -> None:
    for record in run(tmp_path, 2, responses_per_row=4, minibatches=2):
        assert record["grad_norm"] > 0 and record["sampler_logprob_error"] <= 2e-5

"""How many optimizer steps a step of the run takes, and where it stops."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from meshsys.rl.config import RlConfig
from meshsys.rl.learn import Learner

RESPONSES = 8


class Parts:
    """Stands for what is learned of the responses; a part of it is their numbers."""

    def __getitem__(self, part):
        return tuple(part)


def updates_until(finite: list[bool], *, skip: bool, monkeypatch) -> tuple[int, list[tuple[int, ...]]]:
    """The state that a count of the updates is, and the responses of each, where these updates are finite."""
    config = RlConfig.model_validate(
        {"tasks": [{"source": "rack"}], "prompts_per_step": 4, "samples_per_prompt": 2, "minibatches": 2, "epochs": 2}
    )
    whole = SimpleNamespace(
        train=SimpleNamespace(skip_nonfinite=skip),
        data=SimpleNamespace(sequence_length=8),
        model=SimpleNamespace(dtype="float32"),
    )
    update = SimpleNamespace(assembly=SimpleNamespace(config=whole))
    learner = Learner(config, config.algorithm.recipe(128, exact=True), update, RESPONSES)
    seen: list[tuple[int, ...]] = []

    def step(state, part, *, check):
        seen.append(part)
        is_finite = finite[len(seen) - 1]
        return state + is_finite, SimpleNamespace(finite=is_finite, learning_rate=0.1), {"loss": 1.0}, 0.0

    monkeypatch.setattr(learner, "_step", step)
    monkeypatch.setattr(learner, "prepared", lambda *_: (Parts(), {"sampler_logprob_error": 0.0}))
    state, record, metrics = learner.learn(0, [None] * RESPONSES, np.zeros(RESPONSES), np.random.default_rng(0))
    assert record["loss"] == 1.0 and bool(metrics.finite) == finite[len(seen) - 1]
    return state, seen


def test_every_epoch_sees_every_response_once(monkeypatch) -> None:
    state, seen = updates_until([True] * 4, skip=False, monkeypatch=monkeypatch)
    assert state == len(seen) == 4
    assert sorted(seen[0] + seen[1]) == sorted(seen[2] + seen[3]) == list(range(RESPONSES))
    assert seen[0] != seen[2]


@pytest.mark.parametrize("bad", range(4))
def test_nothing_follows_an_update_that_is_not_finite(monkeypatch, bad) -> None:
    finite = [number != bad for number in range(4)]
    state, seen = updates_until(finite, skip=False, monkeypatch=monkeypatch)
    assert state == bad and len(seen) == bad + 1


@pytest.mark.parametrize("bad", range(4))
def test_updates_that_are_not_finite_can_be_skipped(monkeypatch, bad) -> None:
    finite = [number != bad for number in range(4)]
    state, seen = updates_until(finite, skip=True, monkeypatch=monkeypatch)
    assert state == 3 and len(seen) == 4

"""Whole runs of a tiny policy in each mode."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from meshsys.checkpoint import restore_params
from meshsys.config import Config
from meshsys.errors import ConfigError
from meshsys.rl.loop import run_rl
from meshsys.rl.modes.staleness import staleness
from meshsys.rl.prompt import Prompt
from meshsys.rl.rollouts import Rollout
from models.decoder import Decoder

OWN = "python:tests.meshsys.rl.mode_rewards"


def make_config(folder: Path, changes: dict[str, Any]) -> Config:
    """Of four devices two train; changes are by path."""
    config: dict[str, Any] = {
        "run": {"name": "test", "seed": 1, "dir": str(folder)},
        "model": {"layers": 2, "d_model": 16, "heads": 2, "kv_heads": 2, "d_ff": 32, "vocab_size": 264},
        "mesh": {"topology": "4", "axes": {"pipe": 2}},
        "pipeline": {"microbatches": 2},
        "train": {"steps": 3, "learning_rate": 0.1, "warmup_steps": 0},
        "rl": {
            "tasks": [{"source": "python:tests.meshsys.rl.own_tasks:sums"}],
            "rewards": [{"kind": f"{OWN}:share_of_low"}],
            "reward_pool": {"workers": 1},
            "prompts_per_step": 4,
            "samples_per_prompt": 3,
            "max_prompt_tokens": 8,
            "max_response_tokens": 12,
            "sampling": {"slots": 5},
        },
    }
    for path, value in changes.items():
        *sections, last = path.split(".")
        at = config
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = value
    return Config.model_validate(config)


def run(folder: Path, **changes: Any) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """The records of a run and its parameters after it."""
    config = make_config(folder, {name.replace("__", "."): value for name, value in changes.items()})
    assert run_rl(config) == 0
    shapes = jax.eval_shape(Decoder(config.model).init, jax.eval_shape(jax.random.key, 0))
    params = jax.tree.leaves(restore_params(folder / "checkpoints", shapes))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return records, [np.asarray(leaf) for leaf in params]


# An aggregation over tokens, and one over responses with an importance weight and a reference.
ALGORITHMS = {
    "dapo": {"name": "dapo", "dynamic_sampling": False},
    "grpo": {"name": "grpo", "importance": {"mode": "truncate"}},
}


@pytest.mark.parametrize(
    ("name", "together"),
    [pytest.param("dapo", 1, marks=pytest.mark.slow), pytest.param("dapo", 3, marks=pytest.mark.slow), ("grpo", 1)],
)
def test_periodic_takes_the_steps_of_alternate(
    tmp_path: Path, name: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts are the same ones, and parameters are to the order of sums.

    With gradient descent, as Adam makes steps of a full size out of gradients that are only noise.
    """
    monkeypatch.setattr("meshsys.state.make_optimizer", lambda _: optax.trace(0.9))
    algorithm = ALGORITHMS[name]
    want, want_params = run(tmp_path / "alternate", rl__algorithm=algorithm)
    changes = {"rl__algorithm": algorithm, "rl__mode": "periodic", "rl__responses_per_row": together}
    got, got_params = run(tmp_path / "periodic", **changes)
    for ours, theirs in zip(got, want, strict=True):
        for field in ("reward_mean", "response_tokens_mean", "tokens", "policy_version"):
            assert ours[field] == theirs[field], field
        for field in ("loss", "grad_norm", "update_kl", "kl", "importance_max", "ratio_max"):
            if field in theirs:
                np.testing.assert_allclose(ours[field], theirs[field], rtol=1e-4, atol=1e-7, err_msg=field)
        assert ours["trainer_wait_seconds"] > 0 and ours["reshard_bytes"] > 0
    assert want[0]["grad_norm"] > 0
    for ours, theirs in zip(got_params, want_params, strict=True):
        assert np.abs(ours - theirs).max() <= 1e-6 * np.abs(theirs).max()


@pytest.mark.slow
def test_a_periodic_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    """Also when groups come from the rewards in another order and at other times."""
    slow = [{"kind": f"{OWN}:slow", "options": {"seconds": 0.02}}]
    _, whole = run(tmp_path / "whole", rl__mode="periodic")
    run(tmp_path / "parts", rl__mode="periodic", train__steps=1, rl__rewards=slow, rl__reward_pool__workers=2)
    _, parts = run(tmp_path / "parts", rl__mode="periodic", rl__rewards=slow, rl__reward_pool__workers=2)
    for ours, theirs in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_overlap_counts_and_bounds_staleness(tmp_path: Path) -> None:
    """And a second run makes the same of its seed, whatever its rewards take."""
    changes = {
        "rl__mode": "overlap",
        "rl__max_response_tokens": 24,
        "train__steps": 4,
        "rl__rewards": [{"kind": f"{OWN}:slow", "options": {"seconds": 0.02}}],
    }
    records, params = run(tmp_path / "run", **changes)
    assert [one["policy_version"] for one in records] == [1, 2, 3, 4]
    assert records[0]["staleness_max"] == 0 and records[1]["staleness_mean"] == 1
    assert 1 < records[3]["staleness_mean"] <= records[3]["staleness_max"] == 2
    assert sum(one["carried_tokens"] for one in records) > 0
    quick = {"rl__rewards": [{"kind": f"{OWN}:share_of_low", "name": "slow"}]}
    again, same_params = run(tmp_path / "again", **changes | quick)
    for name in ("reward_mean", "tokens", "staleness_mean", "carried_tokens", "dropped_responses", "grad_norm"):
        assert [one[name] for one in again] == [one[name] for one in records], name
    for ours, theirs in zip(params, same_params, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_overlap_drops_what_grows_too_old_and_asks_lost_prompts_again(tmp_path: Path) -> None:
    changes = {"rl__mode": "overlap", "rl__max_staleness": 1, "rl__max_response_tokens": 24, "rl__transcripts": 12}
    run(tmp_path / "run", train__steps=2, **changes)
    records, _ = run(tmp_path / "run", train__steps=5, **changes)
    assert [one["step"] for one in records] == [1, 2, 3, 4, 5]
    assert max(one["staleness_max"] for one in records) == 1
    assert sum(one["dropped_responses"] for one in records) > 0
    assert all(one["carried_tokens"] == 0 for one in records)
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    asked = [line["prompt_id"] for line in lines]
    assert all(asked.count(name) == 3 for name in asked)
    early = {int(name.rpartition("/")[2]) for name in asked}
    assert early >= set(range(8))  # the first ones of the stream are not lost at the resumption


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["alternate", "periodic"])
def test_a_sampler_that_differs_ends_the_run_with_its_state_saved(
    tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path / "run", {"rl.mode": mode, "rl.sampling.tolerance": 1e-12})
    assert run_rl(config) == 1
    told = " ".join("".join(capsys.readouterr()).split())
    found = re.search(r"log-probability (-[\d.]+) by the sampler and (-[\d.]+) by the trainer, and rl.sampling", told)
    assert found is not None and float(found[1]) == pytest.approx(float(found[2]), abs=1e-4)
    assert (tmp_path / "run" / "checkpoints" / "0").is_dir()


def test_staleness_is_counted_by_token() -> None:
    def rollout(*versions: int) -> Rollout:
        few = np.zeros(len(versions), np.float32)
        return Rollout(Prompt("", ""), few[:1], few, few, np.array(versions, np.int32), 0, 0, True)  # type: ignore

    found = staleness([rollout(2, 4, 4), rollout(6), rollout(2, 2, 4, 6)], 6, 2)
    assert found == {"staleness_mean": (2 + 1 + 1 + 0 + 2 + 2 + 1 + 0) / 8, "staleness_max": 2, "carried_tokens": 4}


WRONG = [
    ({"rl.mode": "periodic", "mesh.topology": "2"}, "rl.mode=periodic samples on devices that do not train"),
    ({"rl.mode": "periodic", "rl.epochs": 2}, "rl.epochs=2, but rl.mode=periodic"),
    ({"rl.mode": "periodic", "rl.algorithm": {"name": "dapo"}}, "set rl.algorithm.dynamic_sampling=false"),
    ({"rl.mode": "periodic", "rl.algorithm": {"name": "reinforce_plus_plus"}}, "compares all responses of a step"),
    ({"rl.mode": "overlap", "rl.algorithm": {"name": "grpo", "importance": {"mode": "none"}}}, "older policies"),
    ({"rl.mode": "overlap", "rl.sampling.tolerance": 0.1}, "rl.sampling.tolerance=0.1 does not go with"),
    ({"rl.mode": "periodic", "rl.sampling.axes": {"data": 3}}, "is not the 2 devices that do not train"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_does_not_go_together(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_rl(make_config(tmp_path / "run", changes))
    assert not (tmp_path / "run").exists()

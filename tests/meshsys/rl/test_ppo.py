"""PPO: a run with a value head, and what such a run leaves and refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from meshsys.assemble import assemble
from meshsys.config import Config
from meshsys.errors import ConfigError
from meshsys.load_model import load_model
from meshsys.mesh import make_mesh
from meshsys.rl.loop import run_rl
from meshsys.state import StateForms
from models import Decoder, ModelConfig
from models.pretrained import save_pretrained
from models.sampling import Sampling, entropy
from tests.meshsys.rl.short_run import run
from tests.oracles.inputs import random_parameters

TINY = {"layers": 1, "d_model": 16, "heads": 2, "d_ff": 16}


@pytest.mark.slow
def test_policy_and_values_learn_and_the_model_is_read_without_its_value_head(tmp_path: Path) -> None:
    algorithm = {"name": "ppo", "gae_lambda": 0.9, "value_coefficient": 1.0, "entropy_coefficient": 1e-3}
    records = run(tmp_path, 30, algorithm=algorithm, minibatches=2)
    rewards = [record["reward_mean"] for record in records]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2, rewards
    assert records[0]["value_mean"] == 0 and records[0]["explained_variance"] == 0
    assert np.mean([record["value_error"] for record in records[-5:]]) < 0.7 * records[0]["value_error"]
    assert records[0]["entropy"] == pytest.approx(np.log(264), rel=0.2)
    loaded = load_model(str(tmp_path / "run"))
    assert set(loaded.params["shared"]["head"]) == {"norm", "kernel"}


def test_what_has_no_place_for_a_value_head_is_refused(tmp_path: Path) -> None:
    rl = {"tasks": [{"source": "rack"}], "algorithm": {"name": "ppo"}}
    base = {"run": {"name": "a", "dir": str(tmp_path / "run")}, "model": TINY, "rl": rl}
    base |= {"mesh": {"topology": "2", "axes": {"pipe": 2}}, "pipeline": {"head": "vocab_parallel", "schedule": "1f1b"}}
    with pytest.raises(ConfigError, match="rl.algorithm.name=ppo and its value head need; set pipeline.head=last_"):
        run_rl(Config.model_validate(base | {"model": {**TINY, "layers": 2}}))
    base["rl"]["algorithm"] = {"name": "dr_grpo", "entropy_coefficient": 0.1}
    with pytest.raises(ConfigError, match="rl.algorithm.entropy_coefficient needs"):
        run_rl(Config.model_validate(base | {"model": {**TINY, "layers": 2}}))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="model.value_head=true is what `meshsys rl` sets"):
        Config.model_validate({"run": {"name": "a"}, "model": {**TINY, "value_head": True}})


def test_the_head_is_one_vector_of_zeros_and_changes_nothing_else() -> None:
    plain, valued = (
        Decoder(ModelConfig(**TINY, vocab_size=32, value_head=has)).init(jax.random.key(0)) for has in (False, True)
    )
    head = valued["shared"]["head"].pop("value_head")
    assert head.shape == (16,) and not head.any()
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), plain, valued))


def test_a_pretrained_model_begins_with_a_head_of_zeros_that_trains_beside_its_updates(tmp_path: Path) -> None:
    model = ModelConfig(**TINY, vocab_size=264)
    params = random_parameters(Decoder(model))
    save_pretrained(model, params, tmp_path / "model")
    config = Config.model_validate(
        {
            "run": {"name": "a"},
            "model": {"pretrained": str(tmp_path / "model"), "lora": {"rank": 2}},
            "data": {"tokenizer": "bytes", "sequence_length": 16, "batch_size": 4},
            "mesh": {"topology": "2", "axes": {"fsdp": 2}},
            "pipeline": {"microbatches": 1},
        }
    )
    assembly = assemble(config.model_copy(update={"model": replace(config.model, value_head=True)}))
    forms = StateForms(assembly, make_mesh(assembly.placement))
    head = forms.init().params["shared"]["head"]
    assert not np.any(head["value_head"]) and np.array_equal(head["kernel"], params["shared"]["head"]["kernel"])
    trained = assembly.model.only_trained({"shared": {"head": head}})["shared"]["head"]
    assert trained["kernel"] is None and trained["value_head"] is not None


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7), Sampling(1.3, top_k=5), Sampling(0.9, min_p=0.2)])
def test_entropy_is_that_of_the_distribution_that_is_drawn_from(sampling: Sampling) -> None:
    logits = np.random.default_rng(0).normal(size=(2, 3, 12)).astype(np.float32) * 2
    tokens = logits.argmax(-1).astype(np.int32)
    scaled = logits.astype(np.float64) / sampling.temperature
    kept = np.ones_like(scaled, bool)
    if sampling.top_k:
        kept &= scaled >= np.sort(scaled, -1)[..., -sampling.top_k, None]
    kept &= scaled >= scaled.max(-1, keepdims=True) + (np.log(sampling.min_p) if sampling.min_p else -np.inf)
    p = np.where(kept, np.exp(scaled), 0)
    p /= p.sum(-1, keepdims=True)
    wanted = -np.sum(np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0), -1)
    np.testing.assert_allclose(entropy(logits, tokens, sampling), wanted, atol=1e-5)
    gradient = jax.grad(lambda x: entropy(x, tokens, sampling).sum())(logits)
    assert np.isfinite(gradient).all() and np.abs(gradient[~kept]).max(initial=0) == 0

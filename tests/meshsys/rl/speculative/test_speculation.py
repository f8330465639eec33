"""Responses that begin as drafts do, against responses of the same policy and noise that are sampled from nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshsys.assemble import assemble
from meshsys.config import Config
from meshsys.errors import ConfigError
from meshsys.mesh import make_mesh
from meshsys.rl.config import RlConfig
from meshsys.rl.objectives import PolicyLoss, PpoClip
from meshsys.rl.prompt import Prompt
from meshsys.rl.speculative.sampling import Speculation, speculation_of
from meshsys.rl.update import PolicyUpdate
from models.generation import Completion, Generator, Request
from models.sampling import Sampling
from tests.oracles.inputs import random_parameters

ROWS, LENGTH, TOKENS, PROMPTS, SAMPLES = 4, 24, 10, 7, 2
SEED = 5  # of the run

# Every row is a run; `sampling` is temperature, top-k, top-p.
LAYOUTS = """
schedule           mesh        layers  head            sampling
1f1b               2x2x1x1x1   3       last_stage      1,0,1
zb_h1              2x1x2x1x1   2       vocab_parallel  0.7,0,1
interleaved_1f1b   2x1x1x2x1   5       last_stage      1.3,20,0.9
gpipe              1x1x1x1x2   2       last_stage      1,0,1
"""
ROWS_OF_LAYOUTS = [" ".join(row.split()) for row in LAYOUTS.strip().splitlines()[1:]]


class Policy:
    """A model in a training layout, and a generator of it on one device."""

    def __init__(self, row: str):
        schedule, mesh, layers, head, sampling = row.split()
        temperature, top_k, top_p = sampling.split(",")
        self.how = Sampling(float(temperature), int(top_k), float(top_p))
        sizes = dict(zip(("pipe", "data", "fsdp", "tensor", "context"), map(int, mesh.split("x")), strict=True))
        config = Config.model_validate(
            {
                "run": {"name": "test", "seed": SEED},
                "model": {"layers": int(layers), "d_model": 16, "heads": 4, "kv_heads": 2, "d_ff": 32},
                "data": {"sequence_length": LENGTH, "batch_size": ROWS},
                "mesh": {"topology": str(math.prod(sizes.values())), "axes": sizes},
                "pipeline": {"schedule": schedule, "microbatches": 2, "head": head},
            }
        )
        assembly = assemble(config, poison=True)
        self.update = PolicyUpdate(assembly, make_mesh(assembly.placement), PolicyLoss(PpoClip(0.2, 0.2)), self.how)
        # Around zero, so that the text does not settle on one token.
        self._old = jax.tree.map(lambda leaf: 2 * leaf - 0.2, random_parameters(assembly.decoder))
        random = np.random.default_rng(2)
        self._new = jax.tree.map(lambda leaf: leaf + jnp.float32(0.02) * random.normal(size=leaf.shape), self._old)
        self._generator = Generator(assembly.decoder, self._old, slots=8)
        self.seen: list[Request] = []

    def params(self, *, changed: bool):
        """In training form; the generator takes them too."""
        params = jax.tree.map(jnp.float32, self._new if changed else self._old)
        self._generator.update(params)
        canonical = self.update.canonical(previous=False)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), canonical)
        return self.update.from_canonical(zeros._replace(params=params)).params

    def sample(self, requests: Sequence[Request]):
        """As a `Sampler` does."""
        self.seen = list(requests)
        return iter(self._generator.start(requests))

    def from_nothing(self, requests: Sequence[Request]) -> list[Completion]:
        return self._generator.generate(requests)

    def speculation(self, **options) -> Speculation:
        rl = RlConfig.model_validate(
            {
                "tasks": [{"source": "jsonl:x.jsonl"}],
                "max_prompt_tokens": LENGTH - TOKENS,
                "max_response_tokens": TOKENS,
                "speculative": {"mode": "exact"} | ({"refresh": 0.0} if "mode" not in options else {}) | options,
            }
        )
        return Speculation(rl, self.update, ROWS, frozenset({"finite"}), SEED)

    def requests(self, step: int) -> tuple[list[Request], list[Prompt]]:
        random = np.random.default_rng(0)
        requests, prompts = [], []
        for number in range(PROMPTS):
            prompt = Prompt(f"finite/{number}", "?", task="finite")
            ids = random.integers(0, 256, random.integers(1, LENGTH - TOKENS + 1))
            for sample in range(SAMPLES):
                prompts.append(prompt)
                requests.append(
                    Request(
                        prompt=ids,
                        max_tokens=TOKENS,
                        temperature=self.how.temperature,
                        top_k=self.how.top_k,
                        top_p=self.how.top_p,
                        stop_ids=tuple(range(16)),
                        seed=2**32 - step,
                        prompt_number=100 * step + number,
                        sample=sample,
                    )
                )
        return requests, prompts


@functools.cache
def make_policy(row: str = ROWS_OF_LAYOUTS[0]) -> Policy:
    return Policy(row)


def completions(policy: Policy, speculation: Speculation, step: int, *, changed: bool) -> list[Completion]:
    speculation.begin(policy.params(changed=changed), step)
    policy.seen = []
    requests, prompts = policy.requests(step)
    pieces: list[list] = [[] for _ in requests]
    for piece in speculation.sample(policy, requests, prompts):  # type: ignore[arg-type]
        pieces[piece.request].append(piece)
    return [
        Completion(np.concatenate([p.tokens for p in own]), np.concatenate([p.log_probs for p in own]), own[-1].reason)
        for own in pieces
    ]


def assert_equal(found: Sequence[Completion], wanted: Sequence[Completion]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
        assert one.reason == other.reason and one.tokens.dtype == np.int32 and one.log_probs.dtype == np.float32


@pytest.mark.parametrize(
    "row", [ROWS_OF_LAYOUTS[0], *(pytest.param(row, marks=pytest.mark.slow) for row in ROWS_OF_LAYOUTS[1:])]
)
def test_exact_responses_are_those_that_the_same_noise_gives_from_nothing(row: str) -> None:
    policy = make_policy(row)
    speculation = policy.speculation()
    first = completions(policy, speculation, 1, changed=False)
    assert_equal(first, policy.from_nothing(policy.requests(1)[0]))
    assert {one.reason for one in first} == {"stop", "length"}
    tokens = sum(len(one.tokens) for one in first)
    record = speculation.commit()
    assert (record["draft_tokens"], record["tokens_saved"], record["skipped_fraction"]) == (0, 0, 0)

    again = completions(policy, speculation, 2, changed=False)
    assert_equal(again, first)
    assert not policy.seen
    record = speculation.commit()
    assert (record["draft_tokens"], record["tokens_saved"]) == (tokens, tokens)
    assert record["accepted_fraction"] == record["skipped_fraction"] == 1

    other = completions(policy, speculation, 3, changed=True)
    assert_equal(other, policy.from_nothing(policy.requests(1)[0]))
    record = speculation.commit()
    assert 0.1 < record["accepted_fraction"] < 0.9 and 0 < record["skipped_fraction"] < 0.8
    kept = round(record["accepted_fraction"] * tokens)
    assert kept < record["tokens_saved"] <= kept + len(other)  # the redrawn token too, where one is rejected
    sampled = sum(len(one.tokens) for one in other) - record["tokens_saved"]
    assert sum(one.max_tokens for one in policy.seen) >= sampled > 0


def test_a_step_that_is_not_committed_leaves_no_draft() -> None:
    policy = make_policy()
    speculation = policy.speculation()
    completions(policy, speculation, 1, changed=False)
    completions(policy, speculation, 1, changed=False)
    assert len(speculation.drafts) == 0 and speculation.commit()["draft_tokens"] == 0
    assert len(speculation.drafts) == PROMPTS * SAMPLES


def test_noise_is_drawn_anew_for_the_share_that_is_asked_for() -> None:
    policy = make_policy()
    speculation = policy.speculation(refresh=0.5)
    completions(policy, speculation, 1, changed=False)
    speculation.commit()
    second = completions(policy, speculation, 2, changed=False)
    fresh, old = (policy.from_nothing(policy.requests(step)[0]) for step in (2, 1))
    is_fresh = [np.array_equal(one.tokens, new.tokens) for one, new in zip(second, fresh, strict=True)]
    assert 0 < sum(is_fresh) < len(is_fresh)
    assert_equal(second, [new if is_new else known for is_new, new, known in zip(is_fresh, fresh, old, strict=True)])
    # The new noise is that of the drafts from now on.
    speculation.commit()
    seeds = {draft.seed for draft in map(speculation.drafts.get, list(speculation.drafts)) if draft}
    assert seeds == {2**32 - 1, 2**32 - 2}

    all_anew = policy.speculation(refresh=1.0)
    for step in (1, 2):
        assert_equal(completions(policy, all_anew, step, changed=False), policy.from_nothing(policy.requests(step)[0]))
        assert all_anew.commit()["draft_tokens"] == 0


def test_a_prompt_that_comes_twice_in_a_step_has_other_responses() -> None:
    policy = make_policy()
    speculation = policy.speculation()
    params = policy.params(changed=False)
    requests, prompts = policy.requests(1)
    twice = [*requests, *(replace(one, prompt_number=one.prompt_number + 50) for one in requests)]
    seen = []
    for step in (1, 2):
        speculation.begin(params, step)
        pieces: dict[int, list[np.ndarray]] = {}
        for piece in speculation.sample(policy, twice, prompts * 2):  # type: ignore[arg-type]
            pieces.setdefault(piece.request, []).append(piece.tokens)
        seen.append([np.concatenate(pieces[number]).tolist() for number in range(len(twice))])
        assert speculation.commit()["skipped_fraction"] == step - 1
    assert seen[0] == seen[1]
    half = len(requests)
    assert seen[0][:half] != seen[0][half:]


def test_drafts_that_are_too_long_now_are_cut_and_those_that_are_too_short_go_on() -> None:
    policy = make_policy()
    speculation = policy.speculation()
    params = policy.params(changed=False)
    for step, most in ((1, 6), (2, 10), (3, 4)):
        speculation.begin(params, step)
        requests, prompts = policy.requests(1)
        asked = [replace(one, max_tokens=most) for one in requests]
        pieces: dict[int, list[np.ndarray]] = {}
        for piece in speculation.sample(policy, asked, prompts):  # type: ignore[arg-type]
            pieces.setdefault(piece.request, []).append(piece.tokens)
        for number, one in enumerate(policy.from_nothing(asked)):
            np.testing.assert_array_equal(np.concatenate(pieces[number]), one.tokens)
        assert speculation.commit()["accepted_fraction"] == (step > 1)


def test_lenience_takes_all_or_nothing_at_its_ends() -> None:
    policy = make_policy()
    speculation = policy.speculation(mode="lenient", lenience=1e6)
    first = completions(policy, speculation, 1, changed=False)
    speculation.commit()
    second = completions(policy, speculation, 2, changed=True)
    record = speculation.commit()
    assert record["accepted_fraction"] == record["skipped_fraction"] == 1
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        assert np.abs(one.log_probs - other.log_probs).max() > 1e-3  # those of the new policy

    speculation = policy.speculation(mode="lenient", lenience=1e-9)
    completions(policy, speculation, 1, changed=False)
    speculation.commit()
    third = completions(policy, speculation, 2, changed=True)
    assert speculation.commit()["tokens_saved"] == 0
    assert_equal(third, policy.from_nothing(policy.requests(2)[0]))


def test_lenient_responses_of_the_same_policy_stay() -> None:
    policy = make_policy()
    speculation = policy.speculation(mode="lenient")
    first = completions(policy, speculation, 1, changed=False)
    speculation.commit()
    assert_equal(completions(policy, speculation, 2, changed=False), first)
    speculation.commit()
    completions(policy, speculation, 3, changed=True)
    assert 0.05 < speculation.commit()["accepted_fraction"] < 0.95


def test_prompts_of_endless_tasks_have_no_drafts() -> None:
    policy = make_policy()
    speculation = policy.speculation()
    requests, prompts = policy.requests(1)
    speculation.begin(policy.params(changed=False), 1)
    list(speculation.sample(policy, requests, [replace(prompt, task="endless") for prompt in prompts]))  # type: ignore[arg-type]
    speculation.commit()
    assert len(speculation.drafts) == 0

    endless = SimpleNamespace(tasks=[SimpleNamespace(name="endless", size=None)])
    config = RlConfig.model_validate({"tasks": [{"source": "rack"}], "speculative": {"mode": "lenient"}})
    with pytest.raises(ConfigError, match=r"^rl\.speculative\.mode=lenient needs prompts that come again"):
        speculation_of(config, endless, policy.update, ROWS, SEED)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"refresh": 0.5}, {"mode": "lenient", "refresh": 0.5}, {"mode": "exact", "lenience": 2.0}]
)
def test_options_that_do_nothing_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=r"rl\.speculative\.\w+=[\d.]+ does nothing with rl\.speculative\.mode="):
        RlConfig.model_validate({"tasks": [{"source": "rack"}], "speculative": options})

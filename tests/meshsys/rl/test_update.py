"""A policy's update and scores on every layout, against plain autodiff of the whole model."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshsys.assemble import assemble
from meshsys.config import Config
from meshsys.errors import ConfigError
from meshsys.mesh import make_mesh
from meshsys.rl.aggregation import token_weights
from meshsys.rl.kl import KlPenalty
from meshsys.rl.objectives import Gspo, PolicyLoss, PpoClip, TokenFields
from meshsys.rl.policy import Learned, PolicyBatch
from meshsys.rl.prompt import Prompt
from meshsys.rl.rollouts import Rollout, RolloutRows, length_of_a_row
from meshsys.rl.update import PolicyUpdate, Sampled
from meshsys.rl.values import ValueFields, ValueLoss
from models import Batch, Decoder
from models.sampling import Sampling
from tests.oracles.inputs import random_parameters

ROWS, LENGTH, TOKENS, VOCAB = 12, 24, 10, 264
CLIPPED = PolicyLoss(PpoClip(0.1, 0.2, 3.0), KlPenalty(0.1, "k2", "loss"))
VALUED = PolicyLoss(PpoClip(0.2, 0.2), entropy_coefficient=0.3)

# Every row is a run; `sampling` is temperature, top-k, top-p.
CASES = """
schedule           mesh        M   layers  remat   head            sampling      objective
1f1b               2x2x1x2x1   3   3       full    last_stage      1,0,1         clipped
zb_h1              2x1x2x1x1   3   2       none    vocab_parallel  0.7,0,1       clipped
interleaved_1f1b   2x1x1x2x1   2   5       full    last_stage      0.8,20,0.9    gspo
zbv                2x2x1x1x1   3   4       none    last_stage      1.3,0,0.8     clipped
gpipe              1x1x1x1x2   2   2       none    last_stage      1,0,1         gspo
1f1b               2x1x2x1x1   3   3       none    last_stage      0.7,0,1       valued
"""


def rows(table: str) -> list[str]:
    return [" ".join(row.split()) for row in table.strip().splitlines()[1:]]


def make_rollouts(random: np.random.Generator, count: int) -> list[Rollout]:
    prompt = Prompt("task/0", "?")
    found = []
    for number in range(count):
        asked, answered = random.integers(1, LENGTH - TOKENS + 1), random.integers(1, TOKENS + 1)
        ids, tokens = (random.integers(0, VOCAB, size, dtype=np.int32) for size in (asked, answered))
        logp, version = random.normal(size=answered).astype(np.float32), np.zeros(answered, np.int32)
        found.append(Rollout(prompt, ids, tokens, logp, version, number // 2, number % 2, True))
    return found


class Case:
    def __init__(self, row: str, length: int = LENGTH, together: int = 1):
        schedule, mesh, microbatches, layers, remat, head, sampling, objective = row.split()
        temperature, top_k, top_p = sampling.split(",")
        self.sampling = Sampling(float(temperature), int(top_k), float(top_p))
        sizes = dict(zip(("pipe", "data", "fsdp", "tensor", "context"), map(int, mesh.split("x")), strict=True))
        axis = "context" if sizes["context"] > 1 else None
        losses = {"clipped": CLIPPED, "valued": VALUED}
        self.loss = (losses | {"gspo": PolicyLoss(Gspo(0.01, 0.02, together, axis))})[objective]
        self.plain_loss = (losses | {"gspo": PolicyLoss(Gspo(0.01, 0.02))})[objective]
        self.has_values = objective == "valued"
        config = Config.model_validate(
            {
                "run": {"name": "test", "seed": 3},
                "model": {"layers": int(layers), "d_model": 16, "heads": 4, "kv_heads": 2, "d_ff": 32},
                "data": {"sequence_length": length, "batch_size": ROWS},
                "mesh": {"topology": str(math.prod(sizes.values())), "axes": sizes},
                "pipeline": {"schedule": schedule, "microbatches": int(microbatches), "remat": remat, "head": head},
                "train": {"learning_rate": 1e-3, "gradient_clip": 0.0},
            }
        )
        model = replace(config.model, value_head=self.has_values)
        assembly = assemble(config.model_copy(update={"model": model}), poison=True)
        self.decoder: Decoder = assembly.decoder
        value_loss = ValueLoss(0.5, 0.2) if self.has_values else None
        self.update = PolicyUpdate(assembly, make_mesh(assembly.placement), self.loss, self.sampling, value_loss)
        self.params = random_parameters(self.decoder)
        canonical = self.update.canonical(previous=False)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), canonical)
        self.state = self.update.from_canonical(zeros._replace(params=self.params))

    def log_probs(self, params, batch: Batch) -> jax.Array:
        batch = jax.tree.map(jnp.asarray, batch)
        context = self.decoder.prepare(batch)
        x = self.decoder.hidden(params, context)[0]
        return self.decoder.log_probs(params["shared"], x, context, self.sampling)

    def values_and_entropies(self, params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """By their definitions."""
        context = self.decoder.prepare(jax.tree.map(jnp.asarray, batch))
        x, head = self.decoder.hidden(params, context)[0], params["shared"]["head"]
        norm = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * head["norm"]["scale"][None, None]
        logits = self.decoder.logits(params["shared"], x) / self.sampling.temperature
        logp = jax.nn.log_softmax(logits, -1)
        return norm @ head["value_head"], -jnp.sum(jnp.exp(logp) * logp, -1)


@functools.cache
def make_case(row: str) -> Case:
    return Case(row)


def policy_batch(case: Case, rollouts: RolloutRows, random: np.random.Generator, *, old: bool) -> PolicyBatch:
    """Fields at random, NaN where no token is learned."""
    mask = rollouts.mask_NT
    scored = rollouts.to_tokens(np.asarray(case.log_probs(case.params, rollouts.batch())))

    def near() -> np.ndarray:
        return rollouts.to_rows(scored + random.normal(size=mask.shape) * 0.2, fill=np.nan)

    fields = TokenFields(
        sequence_ids_BS=rollouts.sequence_ids_RS,
        old_logp_BS=near() if old else None,
        advantage_BS=rollouts.to_rows(random.normal(size=mask.shape), fill=np.nan),
        importance_BS=rollouts.to_rows(random.uniform(0.5, 1.5, mask.shape), fill=np.nan),
        reference_logp_BS=near(),
    )
    values = None
    if case.has_values:
        old, returned = (rollouts.to_rows(random.normal(size=mask.shape), fill=np.nan) for _ in range(2))
        values = ValueFields(fields.sequence_ids_BS, old, returned)
    return PolicyBatch(rollouts.batch(token_weights("token_mean", mask, TOKENS)), fields, values)


def learned_as_by_the_whole_model(case: Case, batch: PolicyBatch, plain: PolicyBatch) -> Learned:
    """What the update learns of a batch, whose loss and gradients are those of the whole model.

    Args:
        plain: the same in any rows, for the whole model.
    """
    is_learned = plain.fields.sequence_ids_BS > 0

    def loss(params):
        logp, fields = case.log_probs(params, plain.batch), jax.tree.map(jnp.asarray, plain.fields)
        if not case.has_values:
            return jnp.sum(plain.batch.weights * case.plain_loss(logp, fields).loss_BS)
        value, entropy = case.values_and_entropies(params, plain.batch)
        old, returned = (jnp.where(is_learned, x, 0) for x in plain.values[1:])
        held = old + jnp.clip(value - old, -0.2, 0.2)
        value_loss = 0.25 * jnp.maximum((value - returned) ** 2, (held - returned) ** 2)
        told = replace(case.plain_loss, entropy_coefficient=0.0)(logp, fields)
        return jnp.sum(plain.batch.weights * (told.loss_BS + jnp.where(is_learned, value_loss - 0.3 * entropy, 0)))

    want_loss, want_grads = jax.jit(jax.value_and_grad(loss))(case.params)
    update = case.update
    gradients = jax.jit(lambda p, b, r: update._gradients(p, b, jnp.ones((), jnp.float32), None, r))
    (got_loss, learned), grads = gradients(case.state.params, update._batches.put(batch), update._update_rows)
    np.testing.assert_allclose(got_loss, want_loss, rtol=1e-4)
    got_grads = update.to_canonical(case.state._replace(params=grads)).params
    for (path, got), wanted in zip(jax.tree.leaves_with_path(got_grads), jax.tree.leaves(want_grads), strict=True):
        scale = np.abs(wanted).max()
        assert np.abs(np.asarray(got) - np.asarray(wanted)).max() <= 1e-4 * scale, jax.tree_util.keystr(path)
    return learned


@pytest.mark.parametrize("row", rows(CASES))
def test_scores_losses_and_gradients_equal_the_whole_models(row: str) -> None:
    case, random = make_case(row), np.random.default_rng(0)
    rollouts = RolloutRows(make_rollouts(random, ROWS - 1), ROWS, LENGTH, TOKENS)
    is_sampled = rollouts.is_sampled_RS
    want = np.asarray(case.log_probs(case.params, rollouts.batch()))
    scores, values = case.update.scored(case.state.params, rollouts.batch())
    assert (values is not None) == case.has_values
    np.testing.assert_allclose(scores[is_sampled], want[is_sampled], atol=2e-5)

    batch = policy_batch(case, rollouts, random, old=True)

    update, learned = case.update, learned_as_by_the_whole_model(case, batch, batch)
    np.testing.assert_allclose(update._batches.take(learned.logp_BS)[is_sampled], want[is_sampled], atol=2e-5)
    if case.has_values:
        told = case.values_and_entropies(case.params, rollouts.batch())
        for got, wanted in zip((values, update._batches.take(learned.entropy_BS)), told, strict=True):
            np.testing.assert_allclose(got[is_sampled], wanted[is_sampled], atol=2e-5)
        np.testing.assert_array_equal(update._batches.take(learned.value_BS)[is_sampled], values[is_sampled])


def test_the_first_ratio_is_exactly_one_and_the_last_token_is_learned() -> None:
    case, random = make_case(rows(CASES)[0]), np.random.default_rng(1)
    rollouts = RolloutRows(make_rollouts(random, ROWS), ROWS, LENGTH, TOKENS)
    batch = policy_batch(case, rollouts, random, old=False)
    batch = batch._replace(fields=batch.fields._replace(reference_logp_BS=batch.fields.advantage_BS))
    update = case.update
    gradients = jax.jit(lambda p, b, r: update._gradients(p, b, jnp.ones((), jnp.float32), None, r))
    (_, learned), _ = gradients(case.state.params, update._batches.put(batch), update._update_rows)
    assert (update._batches.take(learned.diagnostics.ratio_BS)[rollouts.is_sampled_RS] == 1).all()
    ends = rollouts.to_rows(np.arange(TOKENS) == rollouts.mask_NT.sum(1, keepdims=True) - 1)
    assert (batch.batch.weights[ends == 1] > 0).all() and ends.sum() == ROWS


def test_a_sampler_that_differs_stops_the_update() -> None:
    case, random = make_case(rows(CASES)[0]), np.random.default_rng(2)
    rollouts = RolloutRows(make_rollouts(random, ROWS), ROWS, LENGTH, TOKENS)
    batch = policy_batch(case, rollouts, random, old=True)
    scored = case.update.score(case.state.params, rollouts.batch())
    state = jax.tree.map(jnp.copy, case.state)
    wrong = scored + 0.5 * (np.arange(ROWS) == 3)[:, None]
    for logp, tolerance, taken in ((wrong, 0.1, False), (scored, 1e-3, True), (np.full_like(scored, np.nan), 1, False)):
        sampled = Sampled(logp.astype(np.float32), rollouts.is_sampled_RS)
        before = jax.tree.map(np.asarray, state.params)
        state, metrics, _, error = case.update.update(state, batch, sampled, tolerance)
        assert metrics.finite and (error <= tolerance) == taken
        same = [
            np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True)
        ]
        assert not all(same) if taken else all(same)


def test_rows_hold_prompt_response_and_padding() -> None:
    random = np.random.default_rng(3)
    made = make_rollouts(random, 3)
    rollouts = RolloutRows(made, 5, LENGTH, TOKENS)
    batch, logp = rollouts.batch(), rollouts.to_rows(rollouts.padded("log_probs"))
    for row, one in enumerate(made):
        whole = [*one.prompt_ids, *one.tokens]
        for place in range(LENGTH):
            token = place + 1 - len(one.prompt_ids)
            is_there = 0 <= token < len(one.tokens)
            assert rollouts.is_sampled_RS[row, place] == is_there == (batch.weights[row, place] == 1)
            assert logp[row, place] == (one.log_probs[token] if is_there else 0)
            assert batch.segment_ids[row, place] == (place < len(whole))
            if place < len(whole):
                assert batch.tokens[row, place] == whole[place] and batch.positions[row, place] == place
            if place + 1 < len(whole):
                assert batch.targets[row, place] == whole[place + 1]
    assert not batch.segment_ids[3:].any() and not batch.weights[3:].any()
    again = rollouts.to_tokens(logp)
    np.testing.assert_array_equal(again[rollouts.mask_NT], rollouts.padded("log_probs")[rollouts.mask_NT])
    assert np.isnan(again[~rollouts.mask_NT]).all()


TOGETHER, PROMPT = 3, 14  # responses of a row, and tokens of the longest prompt
SHARED = """
schedule           mesh        M   layers  remat   head            sampling      objective
1f1b               2x2x1x2x1   3   3       full    last_stage      1,0,1         gspo
zb_h1              2x1x2x1x1   3   2       none    vocab_parallel  0.7,0,1       clipped
zbv                2x1x1x1x2   3   4       none    last_stage      0.8,20,0.9    gspo
interleaved_1f1b   2x1x1x2x1   2   5       full    last_stage      0.7,0,1       valued
"""


def share_prompts(rollouts: list[Rollout]) -> list[Rollout]:
    """The same, each with the prompt of the first of its row."""
    first = [number - number % TOGETHER for number in range(len(rollouts))]
    return [replace(one, prompt_ids=rollouts[at].prompt_ids, group=at) for one, at in zip(rollouts, first, strict=True)]


@pytest.mark.parametrize("row", rows(SHARED))
def test_responses_that_share_a_row_are_learned_as_those_in_rows_of_their_own(row: str) -> None:
    count, length = ROWS * TOGETHER, length_of_a_row(PROMPT, TOKENS, TOGETHER)
    length += -length % 4  # which two devices of `context` divide in two chunks each
    case, random = Case(row, length, TOGETHER), np.random.default_rng(0)
    made, sizes = share_prompts(make_rollouts(random, count - 2 * TOGETHER)), (length, TOKENS)
    alone, shared = RolloutRows(made, count, *sizes), RolloutRows(made, ROWS, *sizes, TOGETHER)
    want_logp = alone.to_tokens(np.asarray(case.log_probs(case.params, alone.batch())))
    scores = case.update.score(case.state.params, shared.batch())
    np.testing.assert_allclose(shared.to_tokens(scores), want_logp, atol=2e-5)
    own, batch = (policy_batch(case, made, np.random.default_rng(1), old=True) for made in (alone, shared))
    learned = learned_as_by_the_whole_model(case, batch, own)
    np.testing.assert_allclose(shared.to_tokens(case.update._batches.take(learned.logp_BS)), want_logp, atol=2e-5)


def test_rows_of_several_responses_hold_their_prompt_once() -> None:
    made = share_prompts(make_rollouts(np.random.default_rng(4), 2 * TOGETHER))
    rollouts = RolloutRows(made, 3, length_of_a_row(PROMPT, TOKENS, TOGETHER), TOKENS, TOGETHER)
    batch, logp = rollouts.batch(), rollouts.to_rows(rollouts.padded("log_probs"))
    assert batch.trunk_ids is not None
    for row in range(2):
        *own, last = made[row * TOGETHER].prompt_ids
        at = len(own)
        assert batch.tokens[row, :at].tolist() == own and set(batch.segment_ids[row, :at]) <= {1}
        assert not batch.trunk_ids[row, :at].any()
        for which in range(TOGETHER):
            one = made[row * TOGETHER + which]
            part = np.s_[row, at : at + len(one.tokens) + 1]
            assert batch.tokens[part].tolist() == [last, *one.tokens]
            assert batch.targets[part][:-1].tolist() == one.tokens.tolist()
            assert batch.positions[part].tolist() == list(range(len(own), len(own) + len(one.tokens) + 1))
            assert set(batch.segment_ids[part]) == {which + 2} and set(batch.trunk_ids[part]) == {1}
            assert rollouts.sequence_ids_RS[part].tolist() == [which + 1] * len(one.tokens) + [0]
            np.testing.assert_array_equal(logp[part][:-1], one.log_probs)
            at += len(one.tokens) + 1
        assert not batch.segment_ids[row, at:].any() and not batch.weights[row, at:].any()
    assert not batch.segment_ids[2].any() and batch.weights.sum() == rollouts.mask_NT.sum()


def test_responses_to_different_prompts_do_not_share_a_row() -> None:
    made = make_rollouts(np.random.default_rng(5), 2 * TOGETHER)
    with pytest.raises(ConfigError, match="rl.responses_per_row=3, but games of task/0 did not begin with the same"):
        RolloutRows(made, 2, length_of_a_row(PROMPT, TOKENS, TOGETHER), TOKENS, TOGETHER)

"""Sampling against sorting in NumPy, as Hugging Face defines it, and against the probabilities that draws must have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sampling import Settings, sample, truncate

VOCAB = 37  # no multiple of the blocks that are drawn from
ROWS = (  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.5, 5, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 1000, 1.0, 0.0),
    (1.0, 0, 0.6, 0.0),
    (2.0, 0, 0.95, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.0, 0, 1.0, 1.0),
    (1.3, 12, 0.8, 0.05),
    (0.5, 20, 0.9, 0.01),
    (0.0, 3, 0.5, 0.5),
)


def settings_of(*rows: tuple[float, int, float, float]) -> Settings:
    dtypes = np.float32, np.int32, np.float32, np.float32
    return Settings(
        *(jnp.asarray(column, dtype) for column, dtype in zip(zip(*rows, strict=True), dtypes, strict=True))
    )


def random_logits(rows: int, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal((rows, VOCAB))).astype(np.float32)


def naive(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The distribution of one row, in float64: sort, cut, normalise, and again."""
    if temperature == 0:
        temperature, top_k, top_p, min_p = 1.0, 0, 1.0, 0.0
    scores = logits.astype(np.float64) / temperature
    order = np.argsort(-scores, kind="stable")
    probability = np.exp(scores - scores.max())
    if top_k:
        probability[order[top_k:]] = 0
    probability /= probability.sum()
    before = np.cumsum(probability[order]) - probability[order]
    if top_p < 1:
        probability[order[before >= top_p]] = 0
    probability[probability < min_p * probability.max()] = 0
    return probability / probability.sum()


def keys_of(count: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count)


def test_truncation_keeps_what_sorting_keeps():
    logits, settings = random_logits(len(ROWS)), settings_of(*ROWS)
    kept = truncate(
        jnp.asarray(logits) / jnp.where(settings.temperature > 0, settings.temperature, 1.0)[:, None], settings
    )
    for number, (row, found) in enumerate(zip(ROWS, np.asarray(kept), strict=True)):
        if row[0]:
            assert np.array_equal(np.isfinite(found), naive(logits[number], *row) > 0), row


@pytest.mark.parametrize("seed", range(4))
def test_log_probability_is_that_of_the_truncated_distribution(seed):
    logits = random_logits(len(ROWS), seed)
    tokens, log_probs = sample(jnp.asarray(logits), settings_of(*ROWS), keys_of(len(ROWS), seed))
    for number, row in enumerate(ROWS):
        wanted = np.log(naive(logits[number], *row)[tokens[number]])
        assert abs(log_probs[number] - wanted) < 2e-5, row


def test_draws_have_the_probabilities():
    """Chi-square over 40,000 draws of each row: by chance above the bound once in 10,000 (the keys are fixed)."""
    draws = 40_000
    logits = random_logits(len(ROWS))
    many = jax.jit(jax.vmap(lambda keys: sample(jnp.asarray(logits), settings_of(*ROWS), keys)[0]))
    tokens = np.asarray(many(jax.random.split(jax.random.key(5), (draws, len(ROWS)))))
    for number, row in enumerate(ROWS[:-1]):
        wanted = naive(logits[number], *row) * draws
        counts = np.bincount(tokens[:, number], minlength=VOCAB)
        assert not counts[wanted == 0].any()
        seen = wanted > 5
        free = max(seen.sum() - 1, 1)
        chi_square = ((counts - wanted)[seen] ** 2 / wanted[seen]).sum()
        assert chi_square < free + 3.72 * np.sqrt(2 * free) + 8, row


def test_greedy_takes_the_first_of_the_likeliest():
    logits = jnp.asarray([[0.0, 2.0, 2.0, 1.0], [5.0, 1.0, 5.0, 5.0]])
    tokens, log_probs = sample(logits, settings_of((0.0, 0, 1.0, 0.0), (0.0, 1, 0.1, 1.0)), keys_of(2))
    assert tokens.tolist() == [1, 0]
    assert np.allclose(log_probs, jax.nn.log_softmax(logits)[jnp.arange(2), tokens])


def test_ties_are_kept_together():
    logits = jnp.asarray([[1.0, 1.0, 0.0, -1.0]] * 2)
    kept = truncate(logits, settings_of((1.0, 1, 1.0, 0.0), (1.0, 0, 0.1, 0.0)))
    assert np.isfinite(np.asarray(kept)).tolist() == [[True, True, False, False]] * 2


@pytest.mark.parametrize("vocab", [1, 2, 3, 4096])
def test_vocabularies_of_any_size(vocab):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((3, vocab)), jnp.float32)
    tokens, log_probs = sample(logits, settings_of(*[(1.0, 0, 1.0, 0.0)] * 3), keys_of(3))
    assert ((0 <= tokens) & (tokens < vocab)).all()
    assert np.allclose(log_probs, jax.nn.log_softmax(logits)[jnp.arange(3), tokens], atol=1e-5)


def test_large_logits_and_excluded_tokens():
    logits = jnp.asarray([[1e30, -jnp.inf, 1e30], [-1e30, -jnp.inf, -1e30]])
    tokens, log_probs = sample(logits, settings_of(*[(1.0, 2, 0.9, 0.1)] * 2), keys_of(2))
    assert set(tokens.tolist()) <= {0, 2}
    assert np.allclose(log_probs, np.log(0.5), atol=1e-5)


def test_other_settings_are_no_other_program():
    program = jax.jit(sample)
    for row in ROWS:
        program(jnp.asarray(random_logits(2)), settings_of(row, ROWS[0]), keys_of(2))
    assert program._cache_size() == 1


def test_rows_do_not_depend_on_each_other():
    logits, settings, keys = jnp.asarray(random_logits(len(ROWS))), settings_of(*ROWS), keys_of(len(ROWS))
    tokens, log_probs = sample(logits, settings, keys)
    order = np.random.default_rng(1).permutation(len(ROWS))
    mixed = sample(logits[order], Settings(*(column[order] for column in settings)), keys[order])
    assert np.array_equal(mixed[0], tokens[order]) and np.array_equal(mixed[1], log_probs[order])
    for number in range(len(ROWS)):
        one = slice(number, number + 1)
        alone = sample(logits[one], Settings(*(column[one] for column in settings)), keys[one])
        assert alone[0][0] == tokens[number] and abs(alone[1][0] - log_probs[number]) < 1e-6

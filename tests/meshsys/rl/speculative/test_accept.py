"""What is left of drafts and what is put behind them, against the distributions of two policies that are tables.

Shapes: N samples, T tokens of each, V vocabulary.
"""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshsys.rl.speculative.accept import accepted, is_lenient, is_redrawn
from models.sampling import SOFTMAX, redraw

SAMPLES = 1_000_000
OPTIMISED = {"xla_backend_optimization_level": 2}
"""A million samples take longer to draw than to compile for."""


class TablePolicy:
    """Draws a token by the one before it; the last row is for the first token."""

    def __init__(self, table: jax.Array, tokens: int):
        self.table, self.tokens, self.vocabulary = table, tokens, table.shape[1]

    def before(self, token_NT: jax.Array) -> jax.Array:
        return jnp.concatenate((jnp.full_like(token_NT[:, :1], self.vocabulary), token_NT[:, :-1]), axis=1)

    def redrawn(self, token_NT: jax.Array, name_N3: jax.Array, *places: int) -> jax.Array:
        """At the places alone, or at all."""
        place_P = jnp.asarray(places or range(self.tokens), jnp.int32)
        place_NP = jnp.broadcast_to(place_P[None], (len(token_NT), len(place_P)))
        return redraw(self.table[self.before(token_NT)[:, place_P]], name_N3, place_NP, SOFTMAX)[0]

    def log_probs(self, token_NT: jax.Array) -> jax.Array:
        return self.table[self.before(token_NT), token_NT]

    def continued(self, token_NT: jax.Array, known_N: jax.Array, name_N3: jax.Array) -> jax.Array:
        """Draws what is not known, one place after the other."""
        for place in range(self.tokens):
            drawn_N = self.redrawn(token_NT, name_N3, place)[:, 0]
            token_NT = token_NT.at[:, place].set(jnp.where(place < known_N, token_NT[:, place], drawn_N))
        return token_NT

    def sampled(self, name_N3: jax.Array) -> jax.Array:
        none = jnp.zeros((len(name_N3), self.tokens), jnp.int32)
        return self.continued(none, jnp.zeros((len(name_N3),), jnp.int32), name_N3)

    def distribution(self) -> np.ndarray:
        table = np.exp(np.asarray(self.table, np.float64))
        table /= table.sum(1, keepdims=True)
        found = np.zeros((self.vocabulary,) * self.tokens)
        for response in itertools.product(range(self.vocabulary), repeat=self.tokens):
            found[response] = np.prod([table[pair] for pair in itertools.pairwise((-1, *response))])
        return found


def names(seed: int) -> jax.Array:
    number = jnp.arange(SAMPLES, dtype=jnp.uint32)
    return jnp.stack((jnp.full_like(number, seed), jnp.zeros_like(number), number), axis=1)


def after_drafts(old: TablePolicy, new: TablePolicy, mode: str) -> np.ndarray:
    """The new policy's responses, each after a draft of the old one's."""
    tokens = old.tokens

    @partial(jax.jit, compiler_options=OPTIMISED)
    def responses(noise: jax.Array, fresh: jax.Array, *tables: jax.Array) -> jax.Array:
        old, new = (TablePolicy(table, tokens) for table in tables)  # constants would be folded for a minute
        draft_NT = old.sampled(noise)
        length_N = jnp.full((SAMPLES,), tokens, jnp.int32)
        if mode == "exact":
            redrawn_NT = new.redrawn(draft_NT, noise)
            known_N = jnp.minimum(accepted(is_redrawn(draft_NT, redrawn_NT), length_N) + 1, length_N)
            return new.continued(redrawn_NT, known_N, noise)
        log_uniform_NT = -jax.random.exponential(jax.random.key(3), draft_NT.shape)
        stays_NT = is_lenient(log_uniform_NT, new.log_probs(draft_NT), old.log_probs(draft_NT), 1.0)
        return new.continued(draft_NT, accepted(stays_NT, length_N), fresh)

    return np.asarray(responses(names(1), names(2), old.table, new.table))


def total_variation(response_NT: np.ndarray, policy: TablePolicy) -> float:
    count = np.zeros((policy.vocabulary,) * policy.tokens)
    np.add.at(count, tuple(response_NT.T), 1)
    return 0.5 * np.abs(count / len(response_NT) - policy.distribution()).sum()


def policy(tokens: int, *probabilities: list[float]) -> TablePolicy:
    return TablePolicy(jnp.log(jnp.asarray(probabilities, jnp.float32)), tokens)


POLICIES = {
    "coin": (policy(1, *[[0.5, 0.5]] * 3), policy(1, *[[0.8, 0.2]] * 3)),
    "chain": (
        policy(3, [0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]),
        policy(3, [0.3, 0.5, 0.2], [0.4, 0.2, 0.4], [0.1, 0.4, 0.5], [0.5, 0.2, 0.3]),
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_exact_responses_are_the_new_policys_and_lenient_ones_are_not(name: str) -> None:
    old, new = POLICIES[name]
    probability = new.distribution().ravel()
    # What a million samples of the policy itself may be off by: the mean of the variation, and half of it again,
    noise = 1.5 * 0.5 * np.sqrt(2 / np.pi * probability * (1 - probability) / SAMPLES).sum()
    exact, lenient = (after_drafts(old, new, mode) for mode in ("exact", "lenient"))
    assert total_variation(exact, new) < max(noise, 2e-3)
    assert total_variation(lenient, new) > 0.05
    assert total_variation(exact, old) > 0.2
    if name == "coin":  # half stays; of the other half, 0.6 of which is rejected, 0.8 is the first: 0.5 + 0.3 * 0.8
        assert np.mean(lenient == 0) == pytest.approx(0.74, abs=2e-3)
        assert np.mean(exact == 0) == pytest.approx(0.8, abs=2e-3)


def test_a_draft_stays_up_to_its_first_rejection_or_its_end() -> None:
    stays_NT = np.array([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0, 1], [1, 0, 0, 0]], bool)
    length_N = np.array([4, 4, 4, 4])
    for array in (np.asarray, jnp.asarray):
        np.testing.assert_array_equal(accepted(array(stays_NT), array(length_N)), [4, 0, 2, 1])
        np.testing.assert_array_equal(accepted(array(stays_NT), array(length_N // 2)), [2, 0, 2, 1])


def test_lenience_multiplies_the_ratio() -> None:
    old_NT, new_NT, uniform_NT = np.log([[0.5, 0.5]]), np.log([[0.2, 0.2]]), np.log([[0.39, 0.41]])
    assert is_lenient(uniform_NT, new_NT, old_NT, 1.0).tolist() == [[True, False]]
    assert is_lenient(uniform_NT, new_NT, old_NT, 1.1).tolist() == [[True, True]]
    assert is_lenient(uniform_NT, new_NT, old_NT, 0.9).tolist() == [[False, False]]
    assert is_lenient(np.zeros((1, 2)), old_NT, new_NT, 1.0).all()

"""What each estimate does to a policy, in exact expectation: every token, or every sequence, that it could draw.

The policy is a table of logits, of a first token and of a second after each first one. Every sequence is one of N
responses, weighted by its probability, so that sums over the batch are expectations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshsys.rl import kl
from meshsys.rl.advantages import Episodes, reinforce_plus_plus
from meshsys.rl.kl import KlPenalty
from meshsys.rl.objectives import PolicyLoss, PpoClip, Reinforce, TokenFields

WORDS = 3
SEQUENCES_N2 = np.array(list(itertools.product(range(WORDS), repeat=2)))
MASK_N2 = np.ones((WORDS**2, 2), bool)
Table = np.ndarray  # logits [1 + WORDS, WORDS]: of the first token, then of the second after each first


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def _table(seed: int) -> Table:
    return np.random.default_rng(seed).normal(size=(1 + WORDS, WORDS))


def _logp(table: Table | jax.Array) -> jax.Array:
    """The log-probabilities of all sequences' tokens [N, 2]."""
    states_N2 = np.stack([np.zeros(WORDS**2, int), 1 + SEQUENCES_N2[:, 0]], axis=1)
    return jax.nn.log_softmax(jnp.asarray(table))[states_N2, SEQUENCES_N2]


def _probability_N(table: Table) -> np.ndarray:
    return np.exp(np.asarray(_logp(table)).sum(1))


def _difference_gradient(function: Callable[[Table], float], table: Table) -> np.ndarray:
    """By finite differences."""
    gradient, step = np.zeros_like(table), 1e-5
    for place in np.ndindex(table.shape):
        moved = np.zeros_like(table)
        moved[place] = step
        gradient[place] = (function(table + moved) - function(table - moved)) / (2 * step)
    return gradient


def _sequence_kl(table: Table, reference: Table) -> float:
    """KL(policy || reference) of whole sequences."""
    p_N, r_N = _probability_N(table), _probability_N(reference)
    return float(np.sum(p_N * np.log(p_N / r_N)))


def _token_kl(states_by: Table, p: Table, q: Table) -> float:
    """KL(p || q) of the next token, summed over the tokens of sequences whose states come from a third policy."""
    first, after = (np.asarray(jax.nn.softmax(jnp.asarray(states_by)))[0], slice(1, None))
    p, q = (np.asarray(jax.nn.softmax(jnp.asarray(table))) for table in (p, q))
    each = np.sum(p * np.log(p / q), axis=1)
    return float(each[0] + first @ each[after])


def _loss_gradient(estimator: str, table: Table, old: Table, reference: Table) -> np.ndarray:
    """The expected gradient of a penalty in the loss, over sequences that the old policy draws."""
    loss = PolicyLoss(PpoClip(0.2, 0.2), KlPenalty(1.0, estimator, "loss"))
    fields = TokenFields(
        jnp.ones((WORDS**2, 2), jnp.int32), _logp(old), jnp.zeros((WORDS**2, 2)), None, _logp(reference)
    )
    weight_NT = jnp.asarray(_probability_N(old))[:, None]
    return np.asarray(
        jax.grad(lambda table: jnp.sum(weight_NT * loss(_logp(table), fields).loss_BS))(jnp.asarray(table))
    )


def _reward_gradient(estimator: str, table: Table, reference: Table) -> np.ndarray:
    """The expected gradient of a penalty in the reward, for sequences that the policy draws itself."""
    logp_NT, reference_NT = np.asarray(_logp(table)), np.asarray(_logp(reference))
    reward_NT = kl.token_rewards(KlPenalty(1.0, estimator, "reward"), logp_NT, reference_NT, MASK_N2)
    episodes = Episodes(np.zeros(WORDS**2), MASK_N2, reward_NT)
    advantage_NT = reinforce_plus_plus(episodes, normalize_advantages=False).advantage_NT
    fields = TokenFields(jnp.ones((WORDS**2, 2), jnp.int32), jnp.asarray(logp_NT), jnp.asarray(advantage_NT))
    weight_NT = jnp.asarray(_probability_N(table))[:, None]
    loss = PolicyLoss(Reinforce())
    return np.asarray(
        jax.grad(lambda table: jnp.sum(weight_NT * loss(_logp(table), fields).loss_BS))(jnp.asarray(table))
    )


def test_k1_in_the_reward_has_the_gradient_of_kl() -> None:
    table, reference = _table(0), _table(1)
    true = _difference_gradient(lambda table: _sequence_kl(table, reference), table)
    np.testing.assert_allclose(_reward_gradient("k1", table, reference), true, atol=1e-8)
    assert np.abs(true).max() > 0.1


def test_k1_in_the_loss_has_none() -> None:
    assert np.abs(_loss_gradient("k1", _table(0), _table(0), _table(1))).max() < 1e-15


@pytest.mark.parametrize("old_seed", [0, 2], ids=["on policy", "off policy"])
def test_k2_in_the_loss_has_the_gradient_of_kl(old_seed: int) -> None:
    table, old, reference = _table(0), _table(old_seed), _table(1)
    true = _difference_gradient(lambda table: _token_kl(old, table, reference), table)
    np.testing.assert_allclose(_loss_gradient("k2", table, old, reference), true, atol=1e-8)


@pytest.mark.parametrize("old_seed", [0, 2], ids=["on policy", "off policy"])
def test_k3_in_the_loss_has_the_gradient_of_the_other_kl(old_seed: int) -> None:
    table, old, reference = _table(0), _table(old_seed), _table(1)
    true = _difference_gradient(lambda table: _token_kl(old, reference, table), table)
    np.testing.assert_allclose(_loss_gradient("k3", table, old, reference), true, atol=1e-8)
    reverse = _difference_gradient(lambda table: _token_kl(old, table, reference), table)
    assert np.abs(true - reverse).max() > 0.03


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_k2_and_k3_in_the_reward_vanish_near_the_reference(estimator: str) -> None:
    """Ten times nearer, k1's gradient is ten times less, and theirs a hundred times."""
    table, direction = _table(0), _table(1)

    def shrinks(estimator: str) -> float:
        far, near = (np.abs(_reward_gradient(estimator, table, table + d * direction)).max() for d in (1e-3, 1e-4))
        return float(far / near)

    assert shrinks("k1") == pytest.approx(10, rel=0.01)
    assert shrinks(estimator) == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_of_k1_and_k3_is_kl(estimator: str) -> None:
    table, reference = _table(0), _table(1)
    mean = np.sum(
        _probability_N(table)[:, None] * kl.estimate(estimator, np.asarray(_logp(table)), np.asarray(_logp(reference)))
    )
    assert mean == pytest.approx(_sequence_kl(table, reference), abs=1e-12)


def test_estimates_of_verl(shared: Path) -> None:
    verl = np.load(shared / "fixtures" / "rl" / "verl_reference.npz")
    for ours, theirs in {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}.items():
        estimate = kl.estimate(ours, verl["log_prob"], verl["ref_log_prob"])
        np.testing.assert_allclose(estimate, verl[f"kl_{theirs}"], rtol=0, atol=1e-14)


def test_what_is_masked_costs_nothing() -> None:
    mask_NT = np.array([[True, False]])
    reward_NT = kl.token_rewards(KlPenalty(0.5, "k1", "reward"), [[-1.0, np.nan]], [[-3.0, -np.inf]], mask_NT)
    np.testing.assert_array_equal(reward_NT, [[-1.0, 0.0]])
    assert np.isfinite(kl.estimate("k3", np.array([-1e9, 0.0]), np.array([0.0, -np.inf]))).all()

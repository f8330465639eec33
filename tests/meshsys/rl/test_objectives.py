"""Token losses against loops that a reader can check by eye, and against values and gradients of verl."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from meshsys.rl.aggregation import AGGREGATIONS, token_weights
from meshsys.rl.kl import KlPenalty
from meshsys.rl.objectives import Cispo, Gspo, Objective, PolicyLoss, PpoClip, Reinforce, TokenFields
from meshsys.rl.values import ValueFields, ValueLoss

LOW, HIGH, DUAL = 0.2, 0.28, 3.0
OBJECTIVES = {
    "ppo_clip": PpoClip(LOW, HIGH),
    "ppo_dual": PpoClip(LOW, HIGH, DUAL),
    "gspo": Gspo(LOW, HIGH, max_sequences=2),
    "cispo": Cispo(LOW, HIGH),
    "reinforce": Reinforce(),
}
every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)


@pytest.fixture
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def _batch(seed: int = 0, scale: float = 1.0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Log-probabilities and fields, float32 [3, 8]: two sequences to a row, with prompts, a hole and padding."""
    rng = np.random.default_rng(seed)
    ids_BS = np.array([[0, 1, 1, 1, 0, 2, 2, 0], [1, 1, 0, 1, 2, 2, 2, 2], [0, 0, 2, 2, 2, 0, 0, 0]], np.int32)
    logp_BS = -rng.exponential(size=(3, 8))
    fields = {
        "old_logp_BS": logp_BS + scale * rng.normal(size=(3, 8)),
        "advantage_BS": rng.normal(size=(3, 8)),
        "importance_BS": rng.uniform(0.5, 2, size=(3, 8)),
        "reference_logp_BS": logp_BS + rng.normal(size=(3, 8)),
    }
    floats = {name: x_BS.astype(np.float32) for name, x_BS in fields.items()}
    return logp_BS.astype(np.float32), {"sequence_ids_BS": ids_BS, **floats}


def _fields(arrays: dict[str, np.ndarray], **others: np.ndarray | None) -> TokenFields:
    return TokenFields(**{name: None if x is None else jnp.asarray(x) for name, x in {**arrays, **others}.items()})


def _naive(
    objective: Objective, logp: np.ndarray, arrays: dict[str, np.ndarray], row: int, t: int
) -> tuple[float, float]:
    """The loss of one token without importance or penalty, and its derivative by the token's log-probability."""
    ids, old, advantage = arrays["sequence_ids_BS"], arrays["old_logp_BS"], float(arrays["advantage_BS"][row, t])
    ratio = math.exp(float(logp[row, t]) - float(old[row, t]))
    if isinstance(objective, Reinforce):
        return -advantage * float(logp[row, t]), -advantage
    if isinstance(objective, Cispo):
        weight = min(max(ratio, 1 - LOW), 1 + HIGH)
        return -advantage * weight * float(logp[row, t]), -advantage * weight
    if isinstance(objective, Gspo):
        tokens = [s for s in range(ids.shape[1]) if ids[row, s] == ids[row, t]]
        ratio = math.exp(sum(float(logp[row, s]) - float(old[row, s]) for s in tokens) / len(tokens))
    if advantage > 0 and ratio > 1 + HIGH:
        return -advantage * (1 + HIGH), 0.0
    if advantage < 0 and ratio < 1 - LOW:
        return -advantage * (1 - LOW), 0.0
    if advantage < 0 and isinstance(objective, PpoClip) and objective.dual_clip and ratio > objective.dual_clip:
        return -advantage * objective.dual_clip, 0.0
    return -advantage * ratio, -advantage * ratio


@every_objective
def test_every_token_is_as_by_hand(objective: Objective) -> None:
    logp_BS, arrays = _batch(scale=2.0)
    fields = _fields(arrays, importance_BS=None, reference_logp_BS=None)
    loss_BS, diagnostics = PolicyLoss(objective)(jnp.asarray(logp_BS), fields)
    gradient_BS = jax.grad(lambda logp_BS: PolicyLoss(objective)(logp_BS, fields).loss_BS.sum())(jnp.asarray(logp_BS))
    naive_BS, naive_gradient_BS = np.zeros((2, 3, 8))
    for row, t in np.argwhere(arrays["sequence_ids_BS"] > 0):
        naive_BS[row, t], naive_gradient_BS[row, t] = _naive(objective, logp_BS, arrays, row, t)
    np.testing.assert_allclose(loss_BS, naive_BS, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(gradient_BS, naive_gradient_BS, rtol=2e-6, atol=1e-7)
    if isinstance(objective, PpoClip | Gspo):  # what has no gradient is what is said to be clipped
        clipped_BS = sum(np.asarray(x_BS) for x_BS in diagnostics[1:4])
        np.testing.assert_array_equal(clipped_BS > 0, (naive_BS != 0) & (naive_gradient_BS == 0))
        assert clipped_BS.any()


@every_objective
def test_the_first_update_has_ratio_one_to_the_bit(objective: Objective) -> None:
    logp_BS, arrays = _batch()
    fields = _fields(arrays, old_logp_BS=logp_BS)
    diagnostics = PolicyLoss(objective)(jnp.asarray(logp_BS), fields).diagnostics
    np.testing.assert_array_equal(diagnostics.ratio_BS, (arrays["sequence_ids_BS"] > 0).astype(np.float32))
    for name in ("clipped_low_BS", "clipped_high_BS", "clipped_dual_BS", "old_kl_BS"):
        assert not np.any(getattr(diagnostics, name)), name


@every_objective
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_learned_may_hold_anything(objective: Objective, poison: float) -> None:
    logp_BS, arrays = _batch()
    loss = PolicyLoss(objective, KlPenalty(0.1, "k3", "loss"), entropy_coefficient=0.1)
    masked_BS = arrays["sequence_ids_BS"] == 0

    def poisoned(x_BS: np.ndarray) -> np.ndarray:
        return x_BS if x_BS.dtype == np.int32 else np.where(masked_BS, np.float32(poison), x_BS)

    def values(logp_BS: np.ndarray, fields: TokenFields) -> tuple:
        def total(logp_BS: jax.Array, entropy_BS: jax.Array) -> tuple:
            token_loss = loss(logp_BS, fields, entropy_BS)
            return token_loss.loss_BS.sum(), token_loss

        return jax.value_and_grad(total, (0, 1), has_aux=True)(jnp.asarray(logp_BS), jnp.asarray(logp_BS))

    clean = values(logp_BS, _fields(arrays))
    dirty = values(poisoned(logp_BS), _fields({name: poisoned(x_BS) for name, x_BS in arrays.items()}))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    for leaf in jax.tree.leaves(dirty):
        assert leaf.ndim == 0 or not np.any(np.asarray(leaf)[masked_BS])


@every_objective
@pytest.mark.parametrize("gap", [1e4, -1e4, np.inf, -np.inf])
def test_nothing_overflows(objective: Objective, gap: float) -> None:
    logp_BS, arrays = _batch()
    far_BS = np.full_like(logp_BS, gap)
    for other in ({"old_logp_BS": far_BS}, {"reference_logp_BS": far_BS}):
        for estimator in ("k2", "k3"):
            loss = PolicyLoss(objective, KlPenalty(0.1, estimator, "loss"))
            fields = _fields(arrays, **other)
            value, gradient_BS = jax.value_and_grad(
                lambda x_BS, loss=loss, fields=fields: loss(x_BS, fields).loss_BS.sum()
            )(jnp.asarray(logp_BS))
            assert np.isfinite(value) and np.isfinite(gradient_BS).all()


@every_objective
def test_the_last_token_of_a_sequence_is_learned(objective: Objective) -> None:
    logp_BS, arrays = _batch(scale=0.01)
    fields = _fields(arrays)
    gradient_BS = jax.grad(lambda logp_BS: PolicyLoss(objective)(logp_BS, fields).loss_BS.sum())(jnp.asarray(logp_BS))
    assert all(float(gradient_BS[row, last]) != 0 for row, last in [(0, 3), (0, 6), (1, 3), (1, 7), (2, 4)])


def test_importance_multiplies_loss_and_penalty() -> None:
    logp_BS, arrays = _batch()
    loss = PolicyLoss(OBJECTIVES["ppo_clip"], KlPenalty(0.1, "k2", "loss"))
    plain_BS = loss(jnp.asarray(logp_BS), _fields(arrays, importance_BS=None)).loss_BS
    weighted_BS = loss(jnp.asarray(logp_BS), _fields(arrays)).loss_BS
    np.testing.assert_allclose(weighted_BS, plain_BS * arrays["importance_BS"], rtol=1e-6)


def test_a_bonus_for_entropy_raises_it() -> None:
    logp_BS, arrays = _batch()
    fields, entropy_BS = _fields(arrays), jnp.ones((3, 8), jnp.float32)
    loss = PolicyLoss(Reinforce(), entropy_coefficient=0.5)
    gradient_BS = jax.grad(lambda entropy_BS: loss(jnp.asarray(logp_BS), fields, entropy_BS).loss_BS.sum())(entropy_BS)
    np.testing.assert_array_equal(gradient_BS, np.where(arrays["sequence_ids_BS"] > 0, -0.5, 0))
    with pytest.raises(ValueError, match="needs entropy_BS"):
        loss(jnp.asarray(logp_BS), fields)
    with pytest.raises(ValueError, match="needs reference_logp_BS"):
        PolicyLoss(Reinforce(), KlPenalty(0.1, "k2", "loss"))(
            jnp.asarray(logp_BS), _fields(arrays, reference_logp_BS=None)
        )


def test_gspo_has_the_gradient_of_the_sequences_own_ratio(double: None) -> None:
    """One advantage and one weight for all tokens of a sequence, as they are in GSPO."""
    rng = np.random.default_rng(3)
    ids_BS = np.array([[1, 1, 1, 2, 2, 0]], np.int32)
    length_BS, advantage_BS = np.array([[3.0, 3, 3, 2, 2, 1]]), np.array([[0.7, 0.7, 0.7, -1.3, -1.3, 9]])
    logp_BS = rng.normal(size=(1, 6))
    old_BS = logp_BS + 0.1 * rng.normal(size=(1, 6))
    fields = _fields({"sequence_ids_BS": ids_BS, "old_logp_BS": old_BS, "advantage_BS": advantage_BS})

    def ours(logp_BS: jax.Array) -> jax.Array:
        token_loss = PolicyLoss(Gspo(LOW, HIGH, max_sequences=2))(logp_BS, fields)
        return jnp.sum(token_loss.loss_BS / length_BS)

    def papers(logp_BS: jax.Array) -> jax.Array:
        ratios = [jnp.exp((logp_BS - old_BS)[0, part].mean()) for part in (slice(0, 3), slice(3, 5))]
        return sum(
            -jnp.minimum(a * r, a * jnp.clip(r, 1 - LOW, 1 + HIGH)) for a, r in zip((0.7, -1.3), ratios, strict=True)
        )

    for ours_, papers_ in zip(*(jax.value_and_grad(it)(jnp.asarray(logp_BS)) for it in (ours, papers)), strict=True):
        np.testing.assert_allclose(ours_, papers_, atol=1e-14)


def test_gspo_over_a_divided_sequence() -> None:
    logp_BS, arrays = _batch()
    fields = _fields(arrays)
    mesh = Mesh(np.array(jax.devices()[:4]), ("context",))
    rows, whole = PartitionSpec(None, "context"), Gspo(LOW, HIGH, max_sequences=2)

    def gradient(objective: Gspo, logp_BS: jax.Array, fields: TokenFields) -> jax.Array:
        return jax.grad(lambda logp_BS: PolicyLoss(objective)(logp_BS, fields).loss_BS.sum())(logp_BS)

    divided = jax.shard_map(
        lambda *args: gradient(Gspo(LOW, HIGH, max_sequences=2, axis="context"), *args),
        mesh=mesh,
        in_specs=(rows, rows),
        out_specs=rows,
        check_vma=False,
    )
    np.testing.assert_allclose(
        jax.jit(divided)(jnp.asarray(logp_BS), fields), gradient(whole, jnp.asarray(logp_BS), fields), rtol=1e-6
    )


def test_gspo_does_not_forget_sequences() -> None:
    logp_BS, arrays = _batch()
    loss_BS = PolicyLoss(Gspo(LOW, HIGH, max_sequences=1))(jnp.asarray(logp_BS), _fields(arrays)).loss_BS
    np.testing.assert_array_equal(np.isnan(loss_BS), arrays["sequence_ids_BS"] == 2)


@every_objective
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_accumulation_is_the_whole(objective: Objective, aggregation: str, double: None) -> None:
    """Rows in any microbatches, and with other sequences beside them, have the loss and the gradient of one batch."""
    rng = np.random.default_rng(4)
    mask_NT = np.arange(5)[None, :] < np.array([5, 1, 3, 2])[:, None]
    logp_NT, noise_NT, advantage_NT = rng.normal(size=(3, 4, 5))
    arrays = {
        "sequence_ids_BS": mask_NT.astype(np.int32),
        "old_logp_BS": logp_NT + 0.2 * noise_NT,
        "advantage_BS": advantage_NT,
        "weight": token_weights(aggregation, mask_NT, 5),
    }
    loss = PolicyLoss(objective)

    def total(logp_BS: jax.Array, weight: np.ndarray, **arrays: np.ndarray) -> jax.Array:
        return jnp.sum(weight * loss(logp_BS, _fields(arrays)).loss_BS)

    whole, gradient_NT = jax.value_and_grad(total)(jnp.asarray(logp_NT), **arrays)
    parts = [
        jax.value_and_grad(total)(jnp.asarray(logp_NT[n : n + 1]), **{name: x[n : n + 1] for name, x in arrays.items()})
        for n in range(4)
    ]
    np.testing.assert_allclose(sum(value for value, _ in parts), whole, rtol=1e-14)
    np.testing.assert_allclose(np.concatenate([gradient for _, gradient in parts]), gradient_NT, rtol=1e-14)

    packed = {name: np.concatenate([x[:2], x[2:]], axis=1) for name, x in arrays.items()}
    packed["sequence_ids_BS"][:, 5:] *= 2
    value, gradient_BS = jax.value_and_grad(total)(jnp.asarray(np.concatenate([logp_NT[:2], logp_NT[2:]], 1)), **packed)
    np.testing.assert_allclose(value, whole, rtol=1e-14)
    np.testing.assert_allclose(np.concatenate([gradient_BS[:, :5], gradient_BS[:, 5:]]), gradient_NT, rtol=1e-14)


VERL_ERROR = 5e-9  # where verl divides by a count of tokens, it adds 1e-8 to it
VERL_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
}
VERL_OBJECTIVES = {
    "ppo_clip_0.2_0.28_dual3": PpoClip(0.2, 0.28, 3.0),
    "gspo_clip_0.2_0.28": Gspo(0.2, 0.28),
    "cispo_0.2_0.28": Cispo(0.2, 0.28),
}


@pytest.mark.parametrize("aggregation", VERL_AGGREGATIONS)
@pytest.mark.parametrize("name", VERL_OBJECTIVES)
def test_values_and_gradients_of_verl(name: str, aggregation: str, shared: Path, double: None) -> None:
    verl = np.load(shared / "fixtures" / "rl" / "verl_reference.npz")
    # verl's GSPO has one aggregation, whatever is asked for.
    ours = "sequence_mean_token_mean" if name.startswith("gspo") else VERL_AGGREGATIONS[aggregation]
    weight_NT = token_weights(ours, verl["mask"], 9)
    fields = _fields(
        {
            "sequence_ids_BS": (verl["mask"] > 0).astype(np.int32),
            "old_logp_BS": verl["old_log_prob"],
            "advantage_BS": verl["advantage_grpo"],
        }
    )
    value, gradient_NT = jax.value_and_grad(
        lambda logp_NT: jnp.sum(weight_NT * PolicyLoss(VERL_OBJECTIVES[name])(logp_NT, fields).loss_BS)
    )(jnp.asarray(verl["log_prob"]))
    np.testing.assert_allclose(value, verl[f"loss_{name}_{aggregation}"], rtol=0, atol=VERL_ERROR)
    np.testing.assert_allclose(gradient_NT, verl[f"grad_{name}_{aggregation}"], rtol=0, atol=VERL_ERROR)


def test_value_loss_of_verl(shared: Path, double: None) -> None:
    verl = np.load(shared / "fixtures" / "rl" / "verl_reference.npz")
    weight_NT = token_weights("token_mean", verl["mask"], 9)
    fields = ValueFields(
        jnp.asarray((verl["mask"] > 0).astype(np.int32)),
        jnp.asarray(verl["values"]),
        jnp.asarray(verl["returns_gae_gamma0.98_lambda0.95"]),
    )
    value, gradient_NT = jax.value_and_grad(
        lambda value_NT: jnp.sum(weight_NT * ValueLoss(clip=0.2)(value_NT, fields))
    )(jnp.asarray(verl["vpreds"]))
    np.testing.assert_allclose(value, verl["value_loss_clip0.2"], rtol=0, atol=1e-15)
    np.testing.assert_allclose(gradient_NT, verl["value_grad_clip0.2"], rtol=0, atol=1e-15)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_by_hand(clip: float | None) -> None:
    rng = np.random.default_rng(5)
    value, old, target = rng.normal(size=(3, 1, 6)).astype(np.float32)
    ids = np.array([[1, 1, 0, 2, 2, 2]], np.int32)
    naive = np.zeros((1, 6))
    for t in (0, 1, 3, 4, 5):
        v, o, r = float(value[0, t]), float(old[0, t]), float(target[0, t])
        held = v if clip is None else min(max(v, o - clip), o + clip)
        naive[0, t] = 0.3 * max((v - r) ** 2, (held - r) ** 2) / 2
    value[0, 2], old[0, 2], target[0, 2] = np.nan, np.inf, np.nan
    fields = ValueFields(*map(jnp.asarray, (ids, old, target)))
    loss = ValueLoss(0.3, clip)
    np.testing.assert_allclose(loss(jnp.asarray(value), fields), naive, rtol=1e-6)
    gradient = jax.grad(lambda value: loss(value, fields).sum())(jnp.asarray(value))
    assert np.isfinite(gradient).all() and gradient[0, 2] == 0

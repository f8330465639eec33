"""What a policy minimises: the loss of each token, as a pure function of its log-probability.

A step's loss is the sum over tokens, microbatches and devices of weight times token loss; the weights
(`meshsys.rl.aggregation`) hold all denominators, and nothing is normalised here. Every token's loss depends on its own
log-probability alone: what an objective needs to know of the other tokens of a sequence is a constant.

Shapes: B rows, S tokens of a row, Q sequences of a row. All floats are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from meshsys.rl import kl
from meshsys.rl.kl import LARGEST_LOG_RATIO, KlPenalty

__all__ = [
    "Cispo",
    "Diagnostics",
    "Gspo",
    "Objective",
    "PolicyLoss",
    "PpoClip",
    "Reinforce",
    "TokenFields",
    "TokenLoss",
]


class TokenFields(NamedTuple):
    """The constants of each token's loss. Where `sequence_ids_BS` is 0 the others may hold anything, NaN too.

    Attributes:
        sequence_ids_BS: int32, which of its row's sequences a token belongs to, counted from 1; 0 for tokens that are
            not learned: prompts, padding, the words of a tool. It is the only mask.
        old_logp_BS: of the policy that the update started from.
        advantage_BS: how much better the token was than expected.
        importance_BS: corrects for a sampler that differs from the old policy; None for a sampler that does not.
        reference_logp_BS: of the reference; None without a penalty in the loss.
    """

    sequence_ids_BS: jax.Array
    old_logp_BS: jax.Array
    advantage_BS: jax.Array
    importance_BS: jax.Array | None = None
    reference_logp_BS: jax.Array | None = None


class Diagnostics(NamedTuple):
    """Of each token, float32, constant and 0 where no loss is; means are sums of weight times these.

    Attributes:
        ratio_BS: the policy to the old one, of the token, or of its sequence for objectives on sequences.
        clipped_low_BS: 1 where the lower bound of the ratio holds the token.
        clipped_high_BS: 1 where the upper bound does.
        clipped_dual_BS: 1 where the dual clip does.
        old_kl_BS: k3 between the old policy and this one; its mean estimates KL(old || policy).
        reference_kl_BS: k3 between this policy and the reference; zeros without one.
    """

    ratio_BS: jax.Array
    clipped_low_BS: jax.Array
    clipped_high_BS: jax.Array
    clipped_dual_BS: jax.Array
    old_kl_BS: jax.Array
    reference_kl_BS: jax.Array


class TokenLoss(NamedTuple):
    """The loss of each token, float32, 0 where none is learned, and what there is to know of it."""

    loss_BS: jax.Array
    diagnostics: Diagnostics


class Surrogate(NamedTuple):
    """An objective's own share of a token's loss, and where it is clipped."""

    loss_BS: jax.Array
    ratio_BS: jax.Array
    low_BS: jax.Array
    high_BS: jax.Array
    dual_BS: jax.Array


class Objective(Protocol):
    """Arrays come without NaN, and with advantage 0 where no token is learned."""

    def __call__(
        self, logp_BS: jax.Array, old_logp_BS: jax.Array, advantage_BS: jax.Array, sequence_ids_BS: jax.Array
    ) -> Surrogate: ...


@dataclass(frozen=True)
class PolicyLoss:
    """An objective, a penalty for leaving the reference, and a bonus for entropy.

    Attributes:
        objective: what is minimised for the advantages.
        kl: the penalty; one in the reward is none of the loss's business.
        entropy_coefficient: of the bonus.
    """

    objective: Objective
    kl: KlPenalty | None = None
    entropy_coefficient: float = 0.0

    def __call__(self, logp_BS: jax.Array, fields: TokenFields, entropy_BS: jax.Array | None = None) -> TokenLoss:
        """The loss of each token; differentiable in the log-probabilities, and in the entropies.

        Args:
            logp_BS: of the policy, of the tokens that were drawn, at the sampler's temperature.
            entropy_BS: of the policy before each token; may be left out where it has no coefficient.
        """
        learned_BS = fields.sequence_ids_BS > 0

        # What is not learned becomes 0 before anything else, so that no NaN of it reaches a gradient.
        def clean(x_BS: jax.Array) -> jax.Array:
            return jnp.where(learned_BS, x_BS, 0)

        def constant(x_BS: jax.Array) -> jax.Array:
            return clean(jax.lax.stop_gradient(x_BS))

        logp_BS, old_logp_BS = clean(logp_BS), constant(fields.old_logp_BS)
        surrogate = self.objective(logp_BS, old_logp_BS, constant(fields.advantage_BS), fields.sequence_ids_BS)
        loss_BS, reference_kl_BS = surrogate.loss_BS, jnp.zeros_like(logp_BS)
        if fields.reference_logp_BS is not None:
            reference_logp_BS = constant(fields.reference_logp_BS)
            reference_kl_BS = kl.estimate("k3", logp_BS, reference_logp_BS)
        if self.kl and self.kl.place == "loss":
            if fields.reference_logp_BS is None:
                raise ValueError("a penalty in the loss needs reference_logp_BS")
            drift_BS = jax.lax.stop_gradient(_ratio(logp_BS - old_logp_BS))
            penalty_BS = kl.estimate(self.kl.estimator, logp_BS, reference_logp_BS)
            loss_BS = loss_BS + self.kl.coefficient * drift_BS * penalty_BS
        if fields.importance_BS is not None:
            loss_BS = loss_BS * constant(fields.importance_BS)
        if self.entropy_coefficient:
            if entropy_BS is None:
                raise ValueError("a bonus for entropy needs entropy_BS")
            loss_BS = loss_BS - self.entropy_coefficient * clean(entropy_BS)
        diagnostics = Diagnostics(
            ratio_BS=surrogate.ratio_BS,
            clipped_low_BS=surrogate.low_BS.astype(logp_BS.dtype),
            clipped_high_BS=surrogate.high_BS.astype(logp_BS.dtype),
            clipped_dual_BS=surrogate.dual_BS.astype(logp_BS.dtype),
            old_kl_BS=kl.estimate("k3", old_logp_BS, logp_BS),
            reference_kl_BS=reference_kl_BS,
        )
        return TokenLoss(loss_BS, jax.tree.map(constant, diagnostics))


@dataclass(frozen=True)
class PpoClip:
    """The clipped surrogate of PPO (Schulman et al. 2017), with bounds of its own on each side (Yu et al. 2025).

    Attributes:
        clip_low: the ratio is held above 1 - clip_low where the advantage is negative.
        clip_high: and below 1 + clip_high where it is positive.
        dual_clip: the largest ratio that a negative advantage is multiplied by (Ye et al. 2020); None for no limit.
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None = None

    def __call__(
        self, logp_BS: jax.Array, old_logp_BS: jax.Array, advantage_BS: jax.Array, sequence_ids_BS: jax.Array
    ) -> Surrogate:
        return _clipped(_ratio(logp_BS - old_logp_BS), advantage_BS, self.clip_low, self.clip_high, self.dual_clip)


@dataclass(frozen=True)
class Gspo:
    """PPO's surrogate with the ratio of the whole sequence, its geometric mean over tokens (Zheng et al. 2025).

    In the form of the paper's section 4.3, GSPO-token: the ratio's value is the sequence's, and its gradient goes to
    each token alone. With one advantage to a sequence, and tokens of a sequence weighted alike, the gradient equals
    that of the sequence's own ratio, and no gradient crosses devices that share a sequence.

    Attributes:
        clip_low: the ratio is held above 1 - clip_low where the advantage is negative.
        clip_high: and below 1 + clip_high where it is positive.
        max_sequences: the largest of `sequence_ids_BS`; beyond it, the loss is NaN.
        axis: a manual mesh axis that sequences are divided over; None for none.
    """

    clip_low: float
    clip_high: float
    max_sequences: int = 1
    axis: str | None = None

    def __call__(
        self, logp_BS: jax.Array, old_logp_BS: jax.Array, advantage_BS: jax.Array, sequence_ids_BS: jax.Array
    ) -> Surrogate:
        constant_BS = jax.lax.stop_gradient(logp_BS)
        mean_BS = _sequence_mean(constant_BS - old_logp_BS, sequence_ids_BS, self.max_sequences, self.axis)
        return _clipped(_ratio(mean_BS + (logp_BS - constant_BS)), advantage_BS, self.clip_low, self.clip_high)


@dataclass(frozen=True)
class Cispo:
    """Every token's score function, weighted by its clipped ratio (MiniMax 2025): no token loses its gradient.

    Attributes:
        clip_low: the weight is at least 1 - clip_low.
        clip_high: and at most 1 + clip_high.
    """

    clip_low: float
    clip_high: float

    def __call__(
        self, logp_BS: jax.Array, old_logp_BS: jax.Array, advantage_BS: jax.Array, sequence_ids_BS: jax.Array
    ) -> Surrogate:
        ratio_BS = jax.lax.stop_gradient(_ratio(logp_BS - old_logp_BS))
        low, high = 1 - self.clip_low, 1 + self.clip_high
        loss_BS = -advantage_BS * jnp.clip(ratio_BS, low, high) * logp_BS
        return Surrogate(loss_BS, ratio_BS, ratio_BS < low, ratio_BS > high, jnp.zeros_like(ratio_BS, bool))


@dataclass(frozen=True)
class Reinforce:
    """Every token's score function, weighted by its advantage (Williams 1992): for tokens of this very policy."""

    def __call__(
        self, logp_BS: jax.Array, old_logp_BS: jax.Array, advantage_BS: jax.Array, sequence_ids_BS: jax.Array
    ) -> Surrogate:
        never_BS = jnp.zeros_like(logp_BS, bool)
        return Surrogate(-advantage_BS * logp_BS, _ratio(logp_BS - old_logp_BS), never_BS, never_BS, never_BS)


def _ratio(log_ratio_BS: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(log_ratio_BS, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def _clipped(
    ratio_BS: jax.Array, advantage_BS: jax.Array, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Surrogate:
    low, high = 1 - clip_low, 1 + clip_high
    loss_BS = jnp.maximum(-advantage_BS * ratio_BS, -advantage_BS * jnp.clip(ratio_BS, low, high))
    bad_BS = advantage_BS < 0
    dual_BS = jnp.zeros_like(bad_BS)
    if dual_clip is not None:
        dual_BS = bad_BS & (ratio_BS > dual_clip)
        loss_BS = jnp.where(dual_BS, -advantage_BS * dual_clip, loss_BS)
    return Surrogate(loss_BS, ratio_BS, bad_BS & (ratio_BS < low), (advantage_BS > 0) & (ratio_BS > high), dual_BS)


def _sequence_mean(x_BS: jax.Array, sequence_ids_BS: jax.Array, sequences: int, axis: str | None) -> jax.Array:
    """The mean over the sequence of each token; 0 outside sequences.

    Written as reductions over a comparison, which XLA neither stores nor gathers, in full precision.
    """
    ids_Q = jnp.arange(1, sequences + 1, dtype=sequence_ids_BS.dtype)
    belongs_BSQ = sequence_ids_BS[:, :, None] == ids_Q[None, None, :]
    sum_BQ = jnp.where(belongs_BSQ, x_BS[:, :, None], 0).sum(1)
    count_BQ = belongs_BSQ.sum(1, dtype=x_BS.dtype)
    if axis is not None:
        sum_BQ, count_BQ = jax.lax.psum((sum_BQ, count_BQ), axis)
    mean_BQ = sum_BQ / jnp.maximum(count_BQ, 1)
    mean_BS = jnp.where(belongs_BSQ, mean_BQ[:, None, :], 0).sum(2)
    return jnp.where(sequence_ids_BS > sequences, jnp.nan, mean_BS)

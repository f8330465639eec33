"""From scored rollouts to optimizer steps: old and reference log-probabilities, advantages, weights, updates.

Shapes: N responses, T tokens of a response, padded; R rows, S tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshsys.errors import ConfigError
from meshsys.rl import kl
from meshsys.rl.advantages import Episodes
from meshsys.rl.aggregation import token_weights
from meshsys.rl.algorithm_config import Recipe
from meshsys.rl.config import RlConfig
from meshsys.rl.objectives import TokenFields
from meshsys.rl.overlong import overlong_penalty
from meshsys.rl.policy import Learned, PolicyBatch
from meshsys.rl.rollouts import Rollout, RolloutRows
from meshsys.rl.update import PolicyUpdate, Sampled
from meshsys.rl.values import ValueFields
from meshsys.state import Metrics, State

__all__ = ["Learner", "Mismatch", "Part", "rows_of_an_update", "told_of"]

PyTree = Any
Floats = NDArray[np.float64]


class Mismatch(Exception):
    """Sampler and trainer give a token log-probabilities that differ by more than they may.

    Attributes:
        state: without the update that found it, where that consumed the state before.
    """

    state: State | None = None


@dataclass(frozen=True)
class Part:
    """Rollouts with what is learned of each of their tokens; the whole of an optimizer step, or a part of it."""

    rollouts: Sequence[Rollout]
    advantage_NT: Floats
    importance_NT: Floats
    old_NT: Floats | None
    reference_NT: Floats | None
    value_NT: Floats | None
    return_NT: Floats | None

    def __getitem__(self, part: NDArray[np.intp]) -> Part:
        def of(values: Floats | None) -> Floats | None:
            return None if values is None else values[part]

        rollouts, fields = [self.rollouts[number] for number in part], (self.advantage_NT, self.importance_NT)
        others = (of(values) for values in (self.old_NT, self.reference_NT, self.value_NT, self.return_NT))
        return Part(rollouts, fields[0][part], fields[1][part], *others)


class Learner:
    """Updates a policy from rollouts.

    Args:
        rows: of an optimizer step; those without a rollout are padding.
        reference: parameters of the reference in training form; None where nothing asks for one.
    """

    def __init__(self, config: RlConfig, recipe: Recipe, update: PolicyUpdate, rows: int, reference: PyTree = None):
        self._config, self._recipe, self._update, self._reference = config, recipe, update, reference
        length = update.assembly.config.data.sequence_length
        self._sizes = rows, length, config.max_response_tokens, config.responses_per_row
        self.tolerance = _tolerance(config, update.assembly.config.model.dtype)

    @property
    def needs_old(self) -> bool:
        """Whether log-probabilities, and values, are looked up before the update, which finds them too."""
        recipe = self._recipe
        return self._updates > 1 or recipe.importance.mode != "none" or recipe.value_loss is not None

    @property
    def _updates(self) -> int:
        return self._config.minibatches * self._config.epochs

    def learn(
        self, state: State, rollouts: Sequence[Rollout], score_N: Floats, order: np.random.Generator
    ) -> tuple[State, dict[str, float], Metrics]:
        """All optimizer steps of a step of the run; the state given is consumed. One that is not finite is not taken,
        and unless such are to be skipped, none after it.

        Args:
            order: how rollouts are divided into minibatches.

        Returns:
            The state, what the step's record says of them, and the last one's metrics.

        Raises:
            Mismatch: the state is as it was before the update that found it.
        """
        batch, record = self.prepared(state, rollouts, score_N)
        parts = self._config.minibatches
        sums: dict[str, float] = {}
        error = record.get("sampler_logprob_error")
        updates = 0
        for number in range(self._updates):
            if number % parts == 0:  # an epoch begins
                numbers = self._shuffled(len(rollouts), order) if parts > 1 else np.arange(len(rollouts))
            part = np.split(numbers, parts)[number % parts]
            is_first = error is None
            state, metrics, found, difference = self._step(state, batch[part], check=is_first)
            error = difference if is_first else error
            updates += 1
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value
            if not metrics.finite and not self._update.assembly.config.train.skip_nonfinite:
                break
        record |= {name: value / updates for name, value in sums.items()}
        record |= {"sampler_logprob_error": float(error or 0.0), "learning_rate": float(metrics.learning_rate)}
        return state, record, metrics

    def _shuffled(self, rollouts: int, order: np.random.Generator) -> NDArray[np.intp]:
        """Numbers of rollouts in another order, those of a row together."""
        return order.permutation(np.arange(rollouts).reshape(-1, self._config.responses_per_row)).reshape(-1)

    def prepared(self, state: State, rollouts: Sequence[Rollout], score_N: Floats) -> tuple[Part, dict[str, float]]:
        """What all updates of a step are made of, and what the step's record says of it.

        Raises:
            Mismatch: log-probabilities were looked up, and differ.
        """
        recipe, record = self._recipe, {}
        old_NT, reference_NT, value_NT = None, None, None
        mask_NT, sampled_NT = self._padded(rollouts)
        importance_NT = np.ones(mask_NT.shape)
        if self.needs_old:
            old_NT, value_NT = self._scores(state.params, rollouts)
            correction = recipe.importance(old_NT, sampled_NT, mask_NT)
            importance_NT = correction.weight_NT
            error = record["sampler_logprob_error"] = correction.metrics["logp_difference_max"]
            self.check(error, Sampled(sampled_NT, mask_NT), old_NT)
            record |= {
                name: correction.metrics[name]
                for name in ("logp_difference_mean", "sampler_kl", "importance_max", "importance_ess", "bounded_share")
            }
        if self._reference is not None:
            reference_NT, _ = self._scores(self._reference, rollouts)
        if recipe.overlong_buffer:
            lengths_N = RolloutRows(rollouts, *self._sizes).lengths_N
            penalty_N = overlong_penalty(lengths_N, self._config.max_response_tokens, recipe.overlong_buffer)
            score_N, record["overlong_penalty"] = score_N + penalty_N, float(penalty_N.mean())
        token_reward_NT = None
        if recipe.kl and recipe.kl.place == "reward":
            assert reference_NT is not None
            drawn_NT = sampled_NT if old_NT is None else old_NT
            token_reward_NT = kl.token_rewards(recipe.kl, drawn_NT, reference_NT, mask_NT)
            record["kl"] = float(-token_reward_NT[mask_NT].mean() / recipe.kl.coefficient)
        episodes = Episodes(
            score_N,
            mask_NT,
            token_reward_NT=token_reward_NT,
            group_N=np.array([one.group for one in rollouts]) if recipe.grouped else None,
            group_size=self._config.samples_per_prompt if recipe.grouped else None,
            value_NT=value_NT,
        )
        advantage_NT, return_NT = recipe.advantage(episodes)
        if value_NT is not None and return_NT is not None:
            record |= _of_values(value_NT[mask_NT], return_NT[mask_NT])
        reference_NT = reference_NT if recipe.policy_loss.kl else None
        return Part(rollouts, advantage_NT, importance_NT, old_NT, reference_NT, value_NT, return_NT), record

    def _padded(self, rollouts: Sequence[Rollout]) -> tuple[NDArray[np.bool_], Floats]:
        rows = RolloutRows(rollouts, *self._sizes)
        return rows.mask_NT, rows.padded("log_probs").astype(np.float64)

    def _scores(self, params: PyTree, rollouts: Sequence[Rollout]) -> tuple[Floats, Floats | None]:
        """Log-probabilities of the rollouts' tokens and the values before them, [N, T]; NaN where there is none."""
        count = self._sizes[0] * self._config.responses_per_row
        found: list[list[Floats]] = []
        for start in range(0, len(rollouts), count):
            rows = RolloutRows(rollouts[start : start + count], *self._sizes)
            scored = self._update.scored(params, rows.batch())
            found.append([rows.to_tokens(np.asarray(one)) for one in scored if one is not None])
        logp_NT, *value_NT = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return logp_NT, value_NT[0] if value_NT else None

    def _step(self, state: State, part: Part, *, check: bool) -> tuple[State, Metrics, dict[str, float], float]:
        rows = self.rows_of(part)
        weight_NT = token_weights(self._recipe.aggregation, rows.mask_NT, self._config.max_response_tokens)
        tolerance = self.tolerance if check else math.inf
        batch, sampled = self.arguments(part, rows, weight_NT)
        state, metrics, learned, error = self._update.update(state, batch, sampled, tolerance)
        if check:
            self.check(error, sampled, learned.logp_BS, state)
        found = {"loss": float(metrics.loss), "grad_norm": float(metrics.grad_norm), **told_of(learned, rows, part)}
        return state, metrics, found, error

    def rows_of(self, part: Part) -> RolloutRows:
        """The part's rollouts, as rows of the programs."""
        return RolloutRows(part.rollouts, *self._sizes)

    def arguments(self, part: Part, rows: RolloutRows, weight_NT: Floats) -> tuple[PolicyBatch, Sampled]:
        """What the programs of an update take, of NumPy.

        Args:
            rows: of the part's rollouts.
            weight_NT: of each token's loss.
        """

        def places(values_NT: Floats | None) -> Any:
            return None if values_NT is None else rows.to_rows(values_NT, fill=np.nan)

        fields = TokenFields(
            sequence_ids_BS=rows.sequence_ids_RS,  # type: ignore[arg-type]
            old_logp_BS=places(part.old_NT) if self._updates > 1 else None,  # type: ignore[arg-type]
            advantage_BS=places(part.advantage_NT),
            importance_BS=places(part.importance_NT) if self._recipe.importance.mode != "none" else None,
            reference_logp_BS=places(part.reference_NT),
        )
        values = None
        if part.return_NT is not None:
            values = ValueFields(fields.sequence_ids_BS, places(part.value_NT), places(part.return_NT))
        batch = PolicyBatch(rows.batch(weight_NT), fields, values)
        return batch, Sampled(rows.to_rows(rows.padded("log_probs")), rows.is_sampled_RS)

    def check(self, error: float, sampled: Sampled, trained: Any, state: State | None = None) -> None:
        """Raises `Mismatch` for log-probabilities that differ by more than they may.

        Args:
            error: the largest difference.
            trained: the trainer's log-probabilities, in the shape of the sampler's.
        """
        if error <= self.tolerance:
            return
        apart = np.where(sampled.is_sampled_RS, np.abs(trained - sampled.logp_RS), -1.0)
        worst = np.unravel_index(np.argmax(np.where(np.isnan(apart), np.inf, apart)), apart.shape)
        both = f"{sampled.logp_RS[worst]:.7g} by the sampler and {trained[worst]:.7g} by the trainer"
        found = Mismatch(
            f"a token has the log-probability {both}, and rl.sampling.tolerance={self.tolerance:g} is the most that "
            "they may differ by; raise that if the difference is one of precision"
        )
        found.state = state
        raise found


def told_of(learned: Learned, rows: RolloutRows, part: Part) -> dict[str, float]:
    """What an update's record says of its tokens: means over them, and the largest ratio."""
    told, sampled_RS = learned.diagnostics, rows.is_sampled_RS

    def mean(values_RS: Any) -> float:
        return float(values_RS[sampled_RS].mean()) if sampled_RS.any() else 0.0

    found = {
        "ratio_max": float(told.ratio_BS.max()),
        "clip_fraction": mean(told.clipped_low_BS + told.clipped_high_BS + told.clipped_dual_BS),
        "update_kl": mean(told.old_kl_BS),
    }
    if part.reference_NT is not None:
        found["kl"] = mean(told.reference_kl_BS)
    if learned.entropy_BS is not None:
        found["entropy"] = mean(learned.entropy_BS)
    if learned.value_BS is not None and part.return_NT is not None:
        found["value_error"] = mean(np.abs(learned.value_BS - rows.to_rows(part.return_NT)))
    return found


def _of_values(value: Floats, returned: Floats) -> dict[str, float]:
    """What a value model expected of tokens, and how much of what they brought it explains: 1 for all, 0 for nothing
    more than a constant does."""
    variance, left = (float(np.var(x)) if x.size else 0.0 for x in (returned, returned - value))
    explained = 1 - left / variance if variance > 0 else 0.0
    return {"value_mean": float(value.mean()) if value.size else 0.0, "explained_variance": explained}


def _tolerance(config: RlConfig, dtype: str) -> float:
    if config.sampling.tolerance is not None:
        return config.sampling.tolerance
    return 1e-3 if dtype == "float32" and config.mode != "overlap" else math.inf


def rows_of_an_update(config: RlConfig, unit: int) -> int:
    """Rows of an optimizer step, a multiple of `unit` that holds a minibatch.

    Raises:
        ConfigError: the rollouts do not divide into minibatches, or these or groups into rows.
    """
    together = config.responses_per_row
    if config.samples_per_prompt % together:
        raise ConfigError(
            f"rl.responses_per_row={together} does not divide rl.samples_per_prompt={config.samples_per_prompt}; the "
            "responses of a row are to one prompt, so set it to a divisor"
        )
    if config.responses % config.minibatches:
        raise ConfigError(
            f"rl.minibatches={config.minibatches} does not divide the {config.responses} responses of a step, "
            f"rl.prompts_per_step={config.prompts_per_step} x rl.samples_per_prompt={config.samples_per_prompt}; set "
            "rl.minibatches to a divisor"
        )
    of_a_minibatch = config.responses // config.minibatches
    if of_a_minibatch % together:
        raise ConfigError(
            f"rl.responses_per_row={together} does not divide a minibatch of {of_a_minibatch}, as rl.minibatches="
            f"{config.minibatches} parts have of {config.responses} responses; lower one of them"
        )
    return -(-of_a_minibatch // together // unit) * unit

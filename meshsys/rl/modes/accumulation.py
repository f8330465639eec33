"""One optimizer step out of parts that come one after another.

The step's gradients are those of all its rollouts at once, to the order of sums: weights of tokens are divided when
the last part has told what by (`meshsys.rl.aggregation.divisor`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshsys.rl.aggregation import divisor, token_weights
from meshsys.rl.algorithm_config import Recipe
from meshsys.rl.learn import Learner, told_of
from meshsys.rl.rollouts import Rollout
from meshsys.rl.update import PolicyUpdate
from meshsys.state import Metrics, State

__all__ = ["Accumulation"]

_LARGEST = ("sampler_logprob_error", "importance_max", "ratio_max")


class Accumulation:
    """The gradients of a step so far.

    Args:
        state: before the step; it is consumed by `finish`.
    """

    def __init__(self, learner: Learner, recipe: Recipe, update: PolicyUpdate, state: State, max_tokens: int):
        self._learner, self._recipe, self._update, self._state = learner, recipe, update, state
        self._max_tokens = max_tokens
        self._sums, self._divisor = update.no_sums(), 0
        self._tokens: list[int] = []
        self._told: list[dict[str, float]] = []

    def add(self, rollouts: Sequence[Rollout], score_N: NDArray[np.float64]) -> None:
        """Another part: whole groups, as many at most as the rows of the program hold.

        Raises:
            Mismatch: sampler and trainer differ.
        """
        part, record = self._learner.prepared(self._state, rollouts, score_N)
        rows = self._learner.rows_of(part)
        here, aggregation = divisor(self._recipe.aggregation, rows.mask_NT), self._recipe.aggregation
        weight_NT = token_weights(aggregation, rows.mask_NT, self._max_tokens) * here
        batch, sampled = self._learner.arguments(part, rows, weight_NT)
        self._sums, learned, error = self._update.accumulate(self._state.params, self._sums, batch, sampled)
        if "sampler_logprob_error" not in record:
            record["sampler_logprob_error"] = error
            self._learner.check(error, sampled, learned.logp_BS)
        self._divisor += here
        self._tokens.append(int(rows.mask_NT.sum()))
        self._told.append(record | told_of(learned, rows, part))

    def finish(self) -> tuple[State, dict[str, float], Metrics]:
        """Takes the step; see `Learner.learn` for what it returns.

        What is a mean over tokens is one over those of all parts; the effective sample size is the mean of the parts'.
        """
        state, metrics = self._update.finish(self._state, self._sums, max(self._divisor, 1))
        record = {}
        for name in self._told[0]:
            values = [told[name] for told in self._told]
            record[name] = max(values) if name in _LARGEST else float(np.average(values, weights=self._tokens))
        record |= {"loss": float(metrics.loss), "grad_norm": float(metrics.grad_norm)}
        return state, record | {"learning_rate": float(metrics.learning_rate)}, metrics

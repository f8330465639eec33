"""The programs of the training layout: a policy's update, and what it makes of tokens that others drew.

Shapes: R rows, S tokens of a row; M microbatches, B sequences of a microbatch.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshsys.assemble import Assembly
from meshsys.rl.objectives import PolicyLoss
from meshsys.rl.policy import (
    DraftBatch,
    Learned,
    PolicyBatch,
    Redrawn,
    Scored,
    learning_model,
    redrawing_model,
    scoring_model,
)
from meshsys.rl.values import ValueLoss
from meshsys.rows import Rows
from meshsys.state import Metrics, State, StateForms
from models import Batch
from models.sampling import Sampling
from schedules.actions import forward_only
from schedules.program import Program, compiler_options

__all__ = ["PolicyUpdate", "Sampled", "Sums"]

PyTree = Any


class Sampled(NamedTuple):
    """What an update is checked by: the sampler's log-probabilities, and where tokens were sampled; [R, S]."""

    logp_RS: Any
    is_sampled_RS: Any


class Sums(NamedTuple):
    """Of the parts of a step that were seen so far: loss, gradients in float32, and tokens learned from."""

    loss: jax.Array
    grads: PyTree
    tokens: jax.Array


class PolicyUpdate(StateForms):
    """The state of a policy, its update and its scores, on the assembly's mesh and schedule.

    Args:
        loss: of the policy.
        sampling: how tokens are sampled; log-probabilities are under that distribution.
        value_loss: of the value head, where the model has one.
    """

    def __init__(
        self,
        assembly: Assembly,
        mesh: Mesh,
        loss: PolicyLoss,
        sampling: Sampling,
        value_loss: ValueLoss | None = None,
    ):
        super().__init__(assembly, mesh)
        config, decoder, tables = assembly.config, assembly.decoder, assembly.program
        self._batches = Rows(mesh, config.pipeline.microbatches, config.data.sequence_length)
        self._rows_sharding = NamedSharding(mesh, PartitionSpec(None, "pipe"))
        self._replicated = NamedSharding(mesh, PartitionSpec())
        jit, options = partial(jax.jit, compiler_options=compiler_options(mesh)), self.program_options

        model = learning_model(assembly.model, decoder, loss, sampling, value_loss)
        self._gradients = tables.value_and_grad(model, mesh, self.specs, **options)
        self._update = jit(self._updated, donate_argnums=0)
        self._accumulate = jit(self._accumulated, donate_argnums=1)
        self._finish = jit(self._finished, donate_argnums=(0, 1))

        treatment = [remat for remat, _ in tables.treatment]
        self._forwards = Program(
            forward_only(assembly.schedule), config.model.layers, treatment, holders=decoder.holders
        )
        score = self._forwards.value(scoring_model(assembly.model, decoder, sampling), mesh, self.specs, **options)
        self._score = jit(lambda params, batch, rows: score(decoder.cast(params), batch, None, rows)[1])
        again = self._forwards.value(redrawing_model(assembly.model, decoder, sampling), mesh, self.specs, **options)
        self._redraw = jit(lambda params, drafts, rows: again(decoder.cast(params), drafts, None, rows)[1])

    @cached_property
    def _update_rows(self) -> PyTree:
        return jax.device_put(self.assembly.program.rows(), self._rows_sharding)

    @cached_property
    def _score_rows(self) -> PyTree:
        return jax.device_put(self._forwards.rows(), self._rows_sharding)

    @property
    def compilations(self) -> int:
        """Programs that were compiled so far."""
        programs: tuple[Any, ...] = self._update, self._score, self._redraw, self._accumulate, self._finish
        return sum(program._cache_size() for program in programs)

    def score(self, params: PyTree, rows: Batch) -> np.ndarray:
        """Log-probabilities of the targets of NumPy's rows, float32 [R, S]; of parameters in training form."""
        return self.scored(params, rows).logp_BS  # type: ignore[return-value]

    def scored(self, params: PyTree, rows: Batch) -> Scored:
        """The same with values, as NumPy's [R, S]."""
        return self._batches.take(self._score(params, self._batches.put(rows), self._score_rows))

    def redraw(self, params: PyTree, drafts: DraftBatch) -> Redrawn:
        """What the policy draws in place of each target of NumPy's rows, with their noise, [R, S]; of parameters in
        training form.

        Where a sequence's first tokens are the ones that are drawn, the next one is what a sampler would draw after
        them, up to the rounding of logits.
        """
        return self._batches.take(self._redraw(params, self._batches.put(drafts), self._score_rows))

    def update(
        self, state: State, rows: PolicyBatch, sampled: Sampled, tolerance: float
    ) -> tuple[State, Metrics, Learned, float]:
        """One optimizer step; the state given is consumed.

        Args:
            rows: of NumPy.
            tolerance: the most that log-probabilities of the sampler and of this policy may differ; beyond it the
                step is not taken. Infinite for an update that is not the first on these rows.

        Returns:
            The state, its metrics, what was learned as NumPy's [R, S], and the largest difference.
        """
        limit = jax.device_put(np.float32(tolerance), self._replicated)
        arguments = self._batches.put((rows, sampled))
        state, metrics, learned, error = self._update(state, *arguments, limit, self._update_rows)
        return state, jax.device_get(metrics), self._batches.take(learned), float(error)

    def no_sums(self) -> Sums:
        """Of no part."""
        shapes, shardings = self._trained(self.abstract_state().params), self._trained(self.shardings.params)
        whole = self._replicated

        def zeros() -> Sums:
            grads = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes)
            return Sums(jnp.zeros((), jnp.float32), grads, jnp.zeros((), jnp.int32))

        out: Any = (whole, shardings, whole)
        return jax.jit(zeros, out_shardings=Sums(*out))()

    def accumulate(
        self, params: PyTree, sums: Sums, rows: PolicyBatch, sampled: Sampled
    ) -> tuple[Sums, Learned, float]:
        """The sums with those of another part; the sums given are consumed.

        Args:
            params: in training form.
            rows: of NumPy, with weights that are to be divided by the step's divisor.

        Returns:
            The sums, what was learned, and the largest difference between sampler and policy, as of `update`.
        """
        sums, learned, error = self._accumulate(params, sums, *self._batches.put((rows, sampled)), self._update_rows)
        return sums, self._batches.take(learned), float(error)

    def finish(self, state: State, sums: Sums, divisor: float) -> tuple[State, Metrics]:
        """The optimizer step of all parts together; state and sums are consumed."""
        state, metrics = self._finish(state, sums, jax.device_put(np.float32(divisor), self._replicated))
        return state, jax.device_get(metrics)

    def _accumulated(
        self, params: PyTree, sums: Sums, rows: PolicyBatch, sampled: Sampled, table: PyTree
    ) -> tuple[Sums, Learned, jax.Array]:
        loss, grads, learned, error, tokens = self._learned(params, rows, sampled, table)
        added = jax.tree.map(lambda total, grad: total + grad.astype(jnp.float32), sums.grads, grads)
        shardings = self._trained(self.shardings.params)
        added = jax.lax.with_sharding_constraint(added, shardings)
        return Sums(sums.loss + loss, added, sums.tokens + tokens), learned, error

    def _finished(self, state: State, sums: Sums, divisor: jax.Array) -> tuple[State, Metrics]:
        grads = jax.tree.map(lambda total: total / divisor, sums.grads)
        state, metrics = self.updated(state, sums.loss / divisor, grads, sums.tokens)
        return jax.lax.with_sharding_constraint(state, self.shardings), metrics

    def _updated(
        self, state: State, rows: PolicyBatch, sampled: Sampled, tolerance: jax.Array, table: PyTree
    ) -> tuple[State, Metrics, Learned, jax.Array]:
        loss, grads, learned, error, tokens = self._learned(state.params, rows, sampled, table)
        state, metrics = self.updated(state, loss, grads, tokens, error <= tolerance)
        state = jax.lax.with_sharding_constraint(state, self.shardings)
        return state, metrics, learned, error

    def _learned(
        self, params: PyTree, rows: PolicyBatch, sampled: Sampled, table: PyTree
    ) -> tuple[jax.Array, PyTree, Learned, jax.Array, jax.Array]:
        """Loss, gradients, what was learned, the largest difference to the sampler, and tokens."""
        params = self.assembly.decoder.cast(params)
        (loss, learned), grads = self._gradients(params, rows, jnp.ones((), jnp.float32), None, table)
        apart = jnp.where(sampled.is_sampled_RS, jnp.abs(learned.logp_BS - sampled.logp_RS), 0.0)
        error = jnp.max(jnp.where(jnp.isnan(apart), jnp.inf, apart))  # a maximum over devices may lose a NaN
        tokens = jnp.sum(rows.fields.sequence_ids_BS > 0, dtype=jnp.int32)
        return loss, grads, learned, error, tokens

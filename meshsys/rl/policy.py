"""A policy as the pipeline's program needs it: what is learned of sampled tokens, and what is only looked up.

Shapes: B rows, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshsys.rl.objectives import Diagnostics, PolicyLoss, TokenFields
from meshsys.rl.values import ValueFields, ValueLoss
from models import Batch, Decoder
from models.sampling import Sampling, redraw
from schedules.pipeline_model import Part, PipelineModel

__all__ = [
    "DraftBatch",
    "Learned",
    "PolicyBatch",
    "Redrawn",
    "Scored",
    "learning_model",
    "redrawing_model",
    "scoring_model",
]

PyTree = Any


class PolicyBatch(NamedTuple):
    """Sampled rows; `batch.weights` are those of the tokens' losses.

    Attributes:
        fields: of each token; `old_logp_BS` None means that the policy that is updated drew the tokens.
        values: the same for the value head; None without one.
    """

    batch: Batch
    fields: TokenFields
    values: ValueFields | None = None


class DraftBatch(NamedTuple):
    """Rows, and the names of the noise that they were drawn with: uint32 [B] each, as a sampler's requests have them.

    Attributes:
        seed, prompt, sample: see `models.requests.Request`.
    """

    batch: Batch
    seed: jax.Array
    prompt: jax.Array
    sample: jax.Array


class Redrawn(NamedTuple):
    """What a policy draws at each place of rows, with the rows' own noise, where a target is.

    Attributes:
        token_BS: int32.
        logp_BS: float32, its log-probability.
    """

    token_BS: Any
    logp_BS: Any


class Learned(NamedTuple):
    """Of each token of an update, float32 [B, S]: its log-probability before it, the value, and the entropy of its
    distribution, None where no loss asks for them; and what the objective tells."""

    logp_BS: jax.Array
    diagnostics: Diagnostics
    value_BS: jax.Array | None = None
    entropy_BS: jax.Array | None = None


class Scored(NamedTuple):
    """Of each target, float32 [B, S]: its log-probability, and the value before it, None without a value head."""

    logp_BS: jax.Array
    value_BS: jax.Array | None


class _Context(NamedTuple):
    decoder: Any
    fields: Any
    values: ValueFields | None = None


def learning_model(
    model: PipelineModel,
    decoder: Decoder,
    loss: PolicyLoss,
    sampling: Sampling,
    value_loss: ValueLoss | None = None,
) -> PipelineModel:
    """The blocks of a pretraining model, with a head that minimises a policy's loss over `PolicyBatch`es, and the value
    head's if there is one.

    Its `aux` is `Learned`. Head and embedding may be divided over the pipeline, without truncated sampling, a bonus for
    entropy and a value head.
    """

    def prepare(microbatch: PolicyBatch, key: PyTree) -> _Context:
        return _Context(model.prepare(microbatch.batch, key), microbatch.fields, microbatch.values)

    def of_log_probs(
        context: _Context,
        logp_BS: jax.Array,
        entropy_BS: jax.Array | None = None,
        value_BS: jax.Array | None = None,
    ) -> tuple[jax.Array, Learned]:
        fields = context.fields
        if fields.old_logp_BS is None:
            fields = fields._replace(old_logp_BS=jax.lax.stop_gradient(logp_BS))
        found = loss(logp_BS, fields, entropy_BS)
        loss_BS = found.loss_BS
        if value_loss is not None:
            assert value_BS is not None and context.values is not None
            loss_BS = loss_BS + value_loss(value_BS, context.values)
        total = jnp.sum(context.decoder.batch.weights * loss_BS)
        return total, jax.lax.stop_gradient(Learned(logp_BS, found.diagnostics, value_BS, entropy_BS))

    def last(shared: PyTree, x_BSD: jax.Array, context: _Context) -> tuple[jax.Array, Learned]:
        entropy_BS = None
        if loss.entropy_coefficient:
            logp_BS, entropy_BS = decoder.log_probs_and_entropy(shared, x_BSD, context.decoder, sampling)
        else:
            logp_BS = decoder.log_probs(shared, x_BSD, context.decoder, sampling)
        value_BS = None if value_loss is None else decoder.values(shared, x_BSD)
        return of_log_probs(context, logp_BS, entropy_BS, value_BS)

    def last_part(
        shared: PyTree, x_BSD: jax.Array, context: _Context, scale: jax.Array, part: Part
    ) -> tuple[tuple[jax.Array, Learned], jax.Array, PyTree]:
        logp_BS, backward = decoder.log_probs_part(shared, x_BSD, context.decoder, part, sampling.temperature)
        total, pull, learned = jax.vjp(lambda logp_BS: of_log_probs(context, logp_BS), logp_BS, has_aux=True)
        return (total, learned), *backward(pull(scale)[0])

    return replace(_on_decoder(model, prepare), last=last, last_part=last_part, has_aux=True)


def scoring_model(model: PipelineModel, decoder: Decoder, sampling: Sampling) -> PipelineModel:
    """The same blocks over `Batch`es; `aux` is `Scored`."""

    def last(shared: PyTree, x_BSD: jax.Array, context: _Context) -> tuple[jax.Array, Scored]:
        value_BS = decoder.values(shared, x_BSD) if decoder.config.value_head else None
        logp_BS = decoder.log_probs(shared, x_BSD, context.decoder, sampling)
        return jnp.zeros((), jnp.float32), Scored(logp_BS, value_BS)

    def prepare(batch: Batch, key: PyTree) -> _Context:
        return _Context(model.prepare(batch, key), ())

    return replace(_on_decoder(model, prepare), last=last, last_part=None, has_aux=True)


def redrawing_model(model: PipelineModel, decoder: Decoder, sampling: Sampling) -> PipelineModel:
    """The same blocks over `DraftBatch`es; `aux` is `Redrawn`."""

    def last(shared: PyTree, x_BSD: jax.Array, context: _Context) -> tuple[jax.Array, Redrawn]:
        name_B3, place_BS = context.fields, context.decoder.batch.positions + 1  # targets are one token further
        found = redraw(_gathered(decoder.logits(shared, x_BSD)), name_B3, place_BS, sampling)
        return jnp.zeros((), jnp.float32), Redrawn(*found)

    def prepare(drafts: DraftBatch, key: PyTree) -> _Context:
        name_B3 = jnp.stack((drafts.seed, drafts.prompt, drafts.sample), axis=-1)
        return _Context(model.prepare(drafts.batch, key), name_B3)

    return replace(_on_decoder(model, prepare), last=last, last_part=None, has_aux=True)


def _gathered(logits_BSV: jax.Array) -> jax.Array:
    """The logits, whole on every device of `tensor`.

    To cut a divided vocabulary into blocks, XLA would have neighbours exchange their edges, which all devices must take
    part in; only some ranks have the head.
    """
    if jax.sharding.get_abstract_mesh().empty:  # where shapes are all that is asked for
        return logits_BSV
    return jax.lax.with_sharding_constraint(logits_BSV, PartitionSpec())


def _on_decoder(model: PipelineModel, prepare: Callable[..., _Context]) -> PipelineModel:
    """The model's embedding and layers, which have the decoder's own context within that of `prepare`."""
    part = model.first_part
    return replace(
        model,
        prepare=prepare,
        first=lambda shared, context: model.first(shared, context.decoder),
        layer=lambda params, x, context, number: model.layer(params, x, context.decoder, number),
        first_part=part and (lambda shared, context, which: part(shared, context.decoder, which)),
    )

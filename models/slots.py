"""A table of sequences that are generated at once, and the programs that change it.

`admit` runs prompts through the model and puts their keys and values into slots; `decode` runs steps for all slots;
`compact` leaves slots out.
A sequence's randomness depends on its seed, prompt, sample number and places alone: not on its slot, nor on what else
is in the table.

Shapes: B slots, R prompts at once, P their padded length, T places, C tokens of a chunk, X stop tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.decoder import Decoder
from models.decoding import DecodingForm, extend
from models.kv_cache import KvCache, empty_cache
from models.requests import Request
from models.sampling import Settings, sample, sequence_keys, token_keys

__all__ = ["Arrival", "Chunk", "Slots", "admit", "arrival", "compact", "decode", "empty_slots"]

PyTree = Any


class Slots(NamedTuple):
    """The sequences.

    Attributes:
        cache: keys and values of all tokens but the last.
        token_B: the last token.
        remaining_B: int32, tokens that the sequence may still have; 0 if it has ended, or the slot is free.
        keys_B: of the sequence; a token's is this one with its place folded in.
        stop_BX: tokens that end the sequence, filled up with -1.
    """

    cache: KvCache
    token_B: jax.Array
    remaining_B: jax.Array
    keys_B: jax.Array
    settings: Settings
    stop_BX: jax.Array


class Chunk(NamedTuple):
    """What `decode` made: of each row, the first `count_B` are new; and `Slots.remaining_B`."""

    tokens_BC: Any
    log_probs_BC: Any
    count_B: Any
    remaining_B: Any


class Arrival(NamedTuple):
    """Sequences for slots, as arrays of fixed shapes: NumPy's, until a program has them.

    Attributes:
        tokens_RP, count_R: prompts without their last tokens, padded on the left, and their lengths.
        source_B: the row of a slot's prompt; negative where a slot stays as it is.
        token_B: the prompts' last tokens.
        name_B3: uint32: seed, prompt, sample.
    """

    tokens_RP: Any
    count_R: Any
    source_B: Any
    token_B: Any
    remaining_B: Any
    name_B3: Any
    settings: Any
    stop_BX: Any


def empty_slots(decoder: Decoder, slots: int, places: int, stops: int) -> Slots:
    """All slots free."""
    whole, real = jnp.zeros((slots,), jnp.int32), jnp.zeros((slots,), jnp.float32)
    return Slots(
        cache=empty_cache(decoder.config, slots, places),
        token_B=whole,
        remaining_B=whole,
        keys_B=sequence_keys(jnp.zeros((slots, 3), jnp.uint32)),
        settings=Settings(real, whole, real, real),
        stop_BX=jnp.full((slots, stops), -1, jnp.int32),
    )


def arrival(
    prompts: list[list[int]], requests: dict[int, Request], *, slots: int, at_once: int, padded: int, stops: int
) -> Arrival:
    """Requests for slots, as `admit` takes them.

    Args:
        prompts: the slots of each prompt, `at_once` prompts at most.
        requests: of each of these slots.
        padded: length to which prompts are padded.
    """

    def column(dtype: Any, fill: int = 0) -> np.ndarray:
        return np.full((slots,), fill, dtype)

    new = Arrival(
        tokens_RP=np.zeros((at_once, padded), np.int32),
        count_R=np.zeros((at_once,), np.int32),
        source_B=column(np.int32, -1),
        token_B=column(np.int32),
        remaining_B=column(np.int32),
        name_B3=np.zeros((slots, 3), np.uint32),
        settings=Settings(*map(column, (np.float32, np.int32, np.float32, np.float32))),  # type: ignore[arg-type]
        stop_BX=np.full((slots, stops), -1, np.int32),
    )
    for row, own in enumerate(prompts):
        *fed, last = requests[own[0]].ids
        new.tokens_RP[row, padded - len(fed) :] = fed
        new.count_R[row] = len(fed)
        for slot in own:
            request = requests[slot]
            new.source_B[slot], new.token_B[slot], new.remaining_B[slot] = row, last, request.max_tokens
            new.name_B3[slot] = request.seed, request.prompt_number, request.sample
            for name, values in new.settings._asdict().items():
                values[slot] = getattr(request, name)
            new.stop_BX[slot, : len(request.stop_ids)] = request.stop_ids
    return new


def admit(form: DecodingForm, params: PyTree, slots: Slots, new: Arrival) -> Slots:
    """Puts sequences into slots.

    Args:
        params: in the form.
    """
    prompts, padded = new.tokens_RP.shape
    fresh = empty_cache(form.decoder.config, prompts, padded)
    _, fresh = extend(form, params, fresh, new.tokens_RP, new.count_R)
    cache, is_new_B, row_B = slots.cache, new.source_B >= 0, jnp.maximum(new.source_B, 0)

    def merged(old_BKTH: jax.Array, new_RKPH: jax.Array) -> jax.Array:
        """A prompt's columns end where the table's next column is."""
        new_BKPH = jnp.take(new_RKPH, row_B, axis=0)
        new_BKTH = jnp.pad(new_BKPH, ((0, 0), (0, 0), (0, cache.places - padded), (0, 0)))
        new_BKTH = jnp.roll(new_BKTH, cache.column - padded, axis=2)
        return jnp.where(is_new_B[:, None, None, None], new_BKTH, old_BKTH)

    cache = cache._replace(
        keys=tuple(map(merged, cache.keys, fresh.keys)),
        values=tuple(map(merged, cache.values, fresh.values)),
        length_B=jnp.where(is_new_B, jnp.take(new.count_R, row_B), cache.length_B),
    )

    def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(is_new_B.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    rest = (new.token_B, new.remaining_B, sequence_keys(new.name_B3), new.settings, new.stop_BX)
    return Slots(cache, *jax.tree.map(chosen, rest, tuple(slots)[1:]))


def compact(slots: Slots, slot_b: jax.Array) -> Slots:
    """A smaller table, of these slots."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, slot_b, axis=0) if leaf.ndim else leaf, slots)


def decode(
    form: DecodingForm, params: PyTree, slots: Slots, steps: jax.Array, cancelled_B: jax.Array, *, chunk: int
) -> tuple[Slots, Chunk]:
    """Generates up to `steps` tokens of each sequence, fewer if all end.

    Args:
        params: in the form.
        steps: int32, at most `chunk`.
        cancelled_B: sequences that end here.
    """
    rows = slots.token_B.shape[0]
    slots = slots._replace(remaining_B=jnp.where(cancelled_B, 0, slots.remaining_B))
    none_B, any_truncates = jnp.zeros((rows,), jnp.int32), slots.settings.any_truncates()
    made = Chunk(jnp.zeros((rows, chunk), jnp.int32), jnp.zeros((rows, chunk), jnp.float32), none_B, none_B)

    def is_on(carry: tuple[jax.Array, Slots, Chunk]) -> jax.Array:
        step, slots, _ = carry
        return (step < steps) & jnp.any(slots.remaining_B > 0)

    def body(carry: tuple[jax.Array, Slots, Chunk]) -> tuple[jax.Array, Slots, Chunk]:
        step, slots, made = carry
        is_active_B = slots.remaining_B > 0
        one_B = is_active_B.astype(jnp.int32)
        x_B1D, cache = extend(form, params, slots.cache, slots.token_B[:, None], one_B)
        keys_B = token_keys(slots.keys_B, cache.length_B)
        logits_BV = form.decoder.logits(form.read_shared(params["shared"]), x_B1D)[:, 0]
        token_B, log_prob_B = sample(logits_BV, slots.settings, keys_B, any_truncates)
        has_ended_B = jnp.any(token_B[:, None] == slots.stop_BX, -1)
        made = made._replace(
            tokens_BC=jax.lax.dynamic_update_index_in_dim(made.tokens_BC, token_B, step, 1),
            log_probs_BC=jax.lax.dynamic_update_index_in_dim(made.log_probs_BC, log_prob_B, step, 1),
            count_B=made.count_B + one_B,
        )
        remaining_B = jnp.where(is_active_B & ~has_ended_B, slots.remaining_B - 1, 0)
        return step + 1, slots._replace(cache=cache, token_B=token_B, remaining_B=remaining_B), made

    _, slots, made = jax.lax.while_loop(is_on, body, (jnp.zeros((), jnp.int32), slots, made))
    return slots, made._replace(remaining_B=slots.remaining_B)

"""Generation with a cache against the whole model run again, in any batch, slot and shape."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import Decoder, ModelConfig
from models.config import LatentAttention, MoeConfig
from models.decoding import DecodingForm, extend
from models.generation import Generator, Request
from models.kv_cache import empty_cache
from models.products import weights_first
from tests.oracles.inputs import QUICK, random_parameters

VOCAB = 40
BASE = ModelConfig(layers=2, d_model=16, heads=4, kv_heads=2, d_ff=32, vocab_size=VOCAB, dropout=0.5)
MODELS = {
    "llama": BASE,
    "tied": replace(BASE, tie_embeddings=True),
    "window": replace(
        BASE, layers=3, window=3, window_pattern=(True, False), rope_local_theta=100.0, rope_pattern=(True, True, False)
    ),
    "gemma": replace(
        BASE,
        norm_placement="both",
        norm_plus_one=True,
        attention_softcap=5.0,
        logits_softcap=3.0,
        scale_embeddings=True,
        tie_embeddings=True,
        activation="gelu_tanh",
    ),
    "biases": replace(BASE, attention_bias="all", mlp_bias=True, qk_norm="head"),
    "olmo": replace(BASE, norm_placement="post", qk_norm="all"),
    "moe": replace(
        BASE, layers=3, moe=MoeConfig(experts=4, experts_per_token=2, d_ff=16, shared_experts=1, dense_layers=(0,))
    ),
    "latent": replace(BASE, kv_heads=0, latent=LatentAttention(kv_rank=8, nope_dim=6, rope_dim=4, value_dim=5)),
}


@functools.cache
def model(name: str = "llama") -> tuple[Decoder, Any, Any]:
    decoder = Decoder(MODELS[name])
    # Around zero, so that the text does not settle on one token.
    params = jax.tree.map(lambda leaf: 2 * leaf - 0.2, random_parameters(decoder))
    return decoder, params, jax.jit(functools.partial(decoder.forward, params), compiler_options=QUICK)


@functools.cache
def generator(slots: int = 4, name: str = "llama", chunk: int = 8) -> Generator:
    decoder, params, _ = model(name)
    return Generator(decoder, params, slots=slots, chunk=chunk, compiler_options=QUICK)


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([length, seed]).integers(0, VOCAB, length).astype(np.int32)


def logits_after(text: Sequence[int], name: str = "llama") -> np.ndarray:
    """The logits after each token, [n, V], by the whole model; padding on the right changes nothing."""
    padded = np.zeros((1, 128), np.int32)
    padded[0, : len(text)] = text
    return np.asarray(model(name)[2](padded, (np.arange(128) < len(text)).astype(np.int32)[None])[0, : len(text)])


LENGTHS = (1, 5, 17, 30, 2, 33)
REQUESTS = [
    Request(prompt=prompt_of(length), max_tokens=20, temperature=1.0, top_k=top_k, top_p=top_p, seed=3)
    for length, top_k, top_p in zip(LENGTHS, (0, 7, 0, 3, 0, 0), (1.0, 1.0, 0.8, 0.9, 1.0, 1.0), strict=True)
]


def same(one: Any, other: Any) -> bool:
    return np.array_equal(one.tokens, other.tokens) and np.allclose(one.log_probs, other.log_probs, atol=2e-5)


# --- The cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "first"), [*((name, True) for name in MODELS), ("llama", False), ("moe", False), ("latent", False)]
)
def test_logits_equal_the_whole_model(name, first):
    """Prompts of 0 to 9 tokens in a block that is padded on the left, then token by token, past the ring's end."""
    decoder, params, whole = model(name)
    prompts, total = (0, 1, 4, 9), 16
    rows = np.random.default_rng(1).integers(0, VOCAB, (len(prompts), total)).astype(np.int32)
    form = DecodingForm(decoder, first)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def feed(cache: Any, tokens: jax.Array, count: jax.Array) -> tuple[jax.Array, Any]:
        with weights_first(first):
            layers = [
                form.layers({n: params["layers"][n] for n in own}, [own])[0]
                for number in range(decoder.config.layers)
                if (own := {n: at.index(number) for n, at in decoder.holders.items() if number in at})
            ]
            shared = form.shared(params["shared"])
            x, cache = extend(form, {"shared": shared, "layers": tuple(layers)}, cache, tokens, count)
            return decoder.logits(form.read_shared(shared), x), cache

    block = np.full((len(prompts), 10), 7, np.int32)
    for row, length in enumerate(prompts):
        block[row, 10 - length :] = rows[row, :length]
    logits, cache = feed(empty_cache(decoder.config, len(prompts), total), block, np.array(prompts, np.int32))
    seen = [[*np.asarray(logits[row, 10 - length :])] for row, length in enumerate(prompts)]
    for step in range(total - max(prompts)):
        new = np.array([[rows[row, length + step]] for row, length in enumerate(prompts)], np.int32)
        logits, cache = feed(cache, new, np.ones(len(prompts), np.int32))
        for row in range(len(prompts)):
            seen[row].append(np.asarray(logits[row, 0]))
    for row, found in enumerate(seen):
        right = np.zeros((1, total + 3), np.int32)
        right[0, : len(found)] = rows[row, : len(found)]
        mask = (np.arange(total + 3) < len(found)).astype(np.int32)[None]
        wanted = np.asarray(whole(right, mask))[0, : len(found)]
        left = np.asarray(whole(np.roll(right, total + 3 - len(found), 1), mask[:, ::-1]))[0, -len(found) :]
        assert np.abs(np.stack(found) - wanted).max() < 2e-5
        assert np.abs(np.stack(found) - left).max() < 2e-5


# --- Tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tied", "window", "moe", "latent"])
def test_greedy_tokens_are_the_likeliest(name):
    requests = [Request(prompt=prompt_of(length), max_tokens=12) for length in (1, 9, 17, 3)]
    texts = set()
    for request, made in zip(requests, generator(4, name).generate(requests), strict=True):
        text = np.concatenate([request.ids, made.tokens])
        after = logits_after(text, name)[len(request.ids) - 1 : -1]
        assert np.array_equal(after.argmax(-1), made.tokens)
        log_probs = np.asarray(jax.nn.log_softmax(after))[np.arange(12), made.tokens]
        assert np.abs(log_probs - made.log_probs).max() < 2e-5
        assert made.reason == "length"
        texts.add(tuple(made.tokens))
    assert len(texts) > 1  # or else the test would say little


def test_log_probabilities_are_those_of_the_distribution_sampled_from():
    from tests.models.test_sampling import naive

    for request, made in zip(REQUESTS, generator().generate(REQUESTS), strict=True):
        after = logits_after(np.concatenate([request.ids, made.tokens]))[len(request.ids) - 1 : -1]
        for logits, token, log_prob in zip(after, made.tokens, made.log_probs, strict=True):
            wanted = naive(logits, request.temperature, request.top_k, request.top_p, request.min_p)[token]
            assert abs(np.log(wanted) - log_prob) < 2e-5


def test_tokens_do_not_depend_on_the_batch():
    """Alone, in another order, in fewer slots that are filled again, with other company and a longer cache."""
    together = generator().generate(REQUESTS)
    assert len({tuple(made.tokens) for made in together}) == len(REQUESTS)
    for request, made in zip(REQUESTS, together, strict=True):
        assert same(generator().generate([request])[0], made)
    order = [3, 0, 5, 1, 4, 2]
    for number, made in zip(order, generator(2).generate([REQUESTS[n] for n in order]), strict=True):
        assert same(made, together[number])
    longer = [*REQUESTS, Request(prompt=prompt_of(100), max_tokens=40, temperature=1.0)]
    assert all(map(same, together, generator().generate(longer)))


def test_tokens_do_not_depend_on_the_pieces():
    whole = generator().generate(REQUESTS)
    for every in (1, 3, 100):
        found: dict[int, list[int]] = {number: [] for number in range(len(REQUESTS))}
        for piece in generator().start(REQUESTS, every=every):
            assert 1 <= len(piece.tokens) == len(piece.log_probs) <= every
            found[piece.request].extend(piece.tokens.tolist())
        assert all(np.array_equal(found[number], made.tokens) for number, made in enumerate(whole))


def test_the_noise_is_of_seed_prompt_sample_and_place():
    """Equal prompts in one call have different samples; another seed, or prompt number, has other noise."""
    request = Request(prompt=prompt_of(5), max_tokens=16, temperature=3.0, seed=1)
    first, second, third = generator().generate([request] * 3)
    again = generator().generate([replace(request, sample=number) for number in (2, 0, 1)])
    assert same(again[0], third) and same(again[1], first) and same(again[2], second)
    others = [replace(request, seed=2), replace(request, prompt_number=1), replace(request, prompt=prompt_of(5, 1))]
    texts = {tuple(made.tokens) for made in (first, second, third, *generator().generate(others))}
    assert len(texts) == 6
    later = replace(request, prompt=[*request.prompt, *first.tokens[:4]], prompt_number=7, max_tokens=12)
    whole = generator().generate([replace(request, prompt_number=7, sample=0)])[0]
    resumed = generator().generate([replace(later, prompt=[*request.prompt, *whole.tokens[:4]])])[0]
    assert np.array_equal(resumed.tokens, whole.tokens[4:])


def test_a_low_temperature_is_greedy():
    cold, greedy = (replace(REQUESTS[1], temperature=t, top_k=0) for t in (1e-4, 0.0))
    assert np.array_equal(generator().generate([cold])[0].tokens, generator().generate([greedy])[0].tokens)


# --- Ends ------------------------------------------------------------------------------------------------------------


def test_stop_tokens_are_part_of_the_sequence():
    whole = generator().generate(REQUESTS)
    stops = [(int(made.tokens[at]), VOCAB + 5) for made, at in zip(whole, (0, 3, 8, 10, 19, 5), strict=True)]
    requests = [replace(request, stop_ids=stop) for request, stop in zip(REQUESTS, stops, strict=True)]
    for made, stop, before in zip(generator().generate(requests), stops, whole, strict=True):
        end = before.tokens.tolist().index(stop[0]) + 1
        assert np.array_equal(made.tokens, before.tokens[:end]) and made.reason == "stop"
        assert np.allclose(made.log_probs, before.log_probs[:end], atol=2e-5)


def test_a_cancelled_request_makes_room():
    whole = generator(2).generate(REQUESTS)
    generation = generator(2).start(REQUESTS, every=4)
    found: dict[int, list[int]] = {number: [] for number in range(len(REQUESTS))}
    for piece in generation:
        found[piece.request].extend(piece.tokens.tolist())
        if piece.request == 0:
            generation.cancel(0)  # running
            generation.cancel(3)  # waiting
    assert [len(found[number]) for number in range(6)] == [4, 20, 20, 0, 20, 20]
    assert all(np.array_equal(found[number], whole[number].tokens) for number in (1, 2, 4, 5))


def test_added_requests_are_as_from_the_beginning():
    whole = generator(2).generate(REQUESTS)
    generation = generator(2).start(REQUESTS[:2], every=4, room=(33, 20))
    found: dict[int, list[int]] = {number: [] for number in range(len(REQUESTS))}
    left = list(REQUESTS[2:])
    while pieces := generation.advance():
        for piece in pieces:
            found[piece.request].extend(piece.tokens.tolist())
        if left:
            assert generation.add([left.pop(0)]) == [len(REQUESTS) - len(left) - 1]
    assert all(np.array_equal(found[number], made.tokens) for number, made in enumerate(whole))
    with pytest.raises(ValueError, match="a prompt of 900 tokens and 1 new ones need more room"):
        generation.add([Request(prompt=prompt_of(900), max_tokens=1)])


def test_a_sequence_goes_on_with_other_parameters():
    """Of the newer ones are the tokens after the change, by keys and values that older ones made."""
    decoder, params, _ = model()
    other = jax.tree.map(lambda leaf: 0.9 * leaf, params)
    mine = Generator(decoder, params, slots=1, chunk=8, compiler_options=QUICK)
    request = Request(prompt=prompt_of(5), max_tokens=10, temperature=1.0, seed=3)
    generation = mine.start([request], every=4)
    pieces = generation.advance()
    mine.update(other)
    while new := generation.advance():
        pieces += new
    tokens = np.concatenate([piece.tokens for piece in pieces])
    log_probs = np.concatenate([piece.log_probs for piece in pieces])
    form = DecodingForm(decoder, True)
    cache, want = empty_cache(decoder.config, 1, 32), []
    with weights_first(True):
        for place, token in enumerate([*request.ids, *tokens[:-1]]):
            own = params if place < len(request.ids) - 1 + 4 else other
            held = Generator(decoder, own, slots=1, compiler_options=QUICK)._params
            one = np.ones((1,), np.int32)
            x_B1D, cache = extend(form, held, cache, np.full((1, 1), token, np.int32), one)
            logits_BV = decoder.logits(form.read_shared(held["shared"]), x_B1D)[:, 0]
            want.append(jax.nn.log_softmax(logits_BV[0]))
    picked = [float(row[token]) for row, token in zip(want[len(request.ids) - 1 :], tokens, strict=True)]
    np.testing.assert_allclose(log_probs, picked, atol=2e-5)


def decoded_sizes(generator: Generator) -> set[int]:
    """Slots of the tables that steps were run for."""
    return {shapes[-1][0][0] for name, _, *shapes in generator._programs if name == "decode"}


def test_the_last_sequences_go_on_in_fewer_slots():
    """With the tokens that they have among all slots."""
    decoder, params, _ = model()
    lengths = (3, 50, 9, 2, 21, 4, 33, 5, 5, 60, 1, 8)
    requests = [
        Request(prompt=prompt_of(4 + number), max_tokens=length, temperature=1.0, seed=number)
        for number, length in enumerate(lengths)
    ]
    options: dict[str, Any] = {"slots": 16, "chunk": 4, "compiler_options": QUICK}
    whole, compacting = Generator(decoder, params, **options), Generator(decoder, params, compacts=True, **options)
    assert all(map(same, whole.generate(requests), compacting.generate(requests)))
    assert decoded_sizes(whole) == {16} and decoded_sizes(compacting) == {16, 8, 4}
    before = compacting.compilations
    compacting.generate(requests[::-1])
    assert compacting.compilations == before
    # Not where others may come.
    generation = compacting.start(requests[:3], room=(16, 60))
    pieces = list(generation)
    assert len(generation._holder) == 4 and sum(len(piece.tokens) for piece in pieces) == sum(lengths[:3])


def test_a_cancelled_sequence_stays_so_in_fewer_slots():
    decoder, params, _ = model()
    compacting = Generator(decoder, params, slots=8, chunk=4, compacts=True, compiler_options=QUICK)
    requests = [Request(prompt=prompt_of(4), max_tokens=40, seed=number) for number in range(8)]
    alone = compacting.generate(requests[5:6])[0]
    generation = compacting.start(requests)
    made = {request: [] for request in range(8)}
    for number, piece in enumerate(generation):
        made[piece.request] += piece.tokens.tolist()
        if number == 7:
            for request in (0, 1, 2, 3, 4, 6, 7):
                generation.cancel(request)
    assert decoded_sizes(compacting) >= {8, 4}
    assert made[5] == alone.tokens.tolist() and all(len(made[request]) == 4 for request in range(8) if request != 5)


def test_nothing_to_do():
    assert generator().generate([]) == []


# --- Programs --------------------------------------------------------------------------------------------------------


def test_nothing_is_compiled_from_the_second_call_on():
    """Not for other prompts and settings, nor for other parameters, which take effect."""
    compiled: list[str] = []

    def listen(event: str, _: float, **__: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    decoder, params, _ = model()
    fresh = Generator(decoder, params, slots=4, chunk=8, compiler_options=QUICK)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        first = fresh.generate(REQUESTS)
        assert compiled and fresh.compilations >= 4
        before = len(compiled), fresh.compilations
        other = [
            replace(request, prompt=prompt_of(length, 9), temperature=0.5, min_p=0.1, stop_ids=(3,), max_tokens=tokens)
            for request, length, tokens in zip(REQUESTS, (3, 8, 12, 31, 9, 28), (7, 20, 9, 20, 1, 20), strict=True)
        ]
        fresh.generate(other)
        fresh.generate(REQUESTS[::-1])
        negative = jax.tree.map(lambda leaf: -leaf, params)
        compiled_here = len(compiled) - before[0]
        fresh.update(negative)
        assert not any(map(same, fresh.generate(REQUESTS), first))
        fresh.update(params)
        assert all(map(same, fresh.generate(REQUESTS), first))
        assert (len(compiled) - compiled_here, fresh.compilations) == before
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "the prompt has no token"),
        ({"prompt": [1, VOCAB]}, f"the prompt has token {VOCAB}, but the model's vocabulary ends at {VOCAB - 1}"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0 must be finite and at least 0"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"min_p": 2.0}, "min_p=2.0 must be at least 0 and at most 1"),
    ],
)
def test_requests_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        generator().generate([replace(REQUESTS[0], **change)])


def test_bfloat16_is_computed_in():
    decoder, params = Decoder(replace(BASE, dtype="bfloat16")), model()[1]
    fresh = Generator(decoder, params, slots=2, chunk=8, compiler_options=QUICK)
    made = fresh.generate([replace(REQUESTS[2], temperature=0.0)])[0]
    text = np.concatenate([REQUESTS[2].ids, made.tokens])
    after = decoder.forward(params, text[None].astype(np.int32))[0, len(REQUESTS[2].ids) - 1 : -1]
    log_probs = jax.nn.log_softmax(after)[jnp.arange(len(made.tokens)), made.tokens]
    assert np.abs(np.asarray(log_probs) - made.log_probs).max() < 0.2

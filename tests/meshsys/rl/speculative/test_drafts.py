"""The cache of drafts: what it keeps, how much, and that arrays bring it back bit by bit."""

from __future__ import annotations

import numpy as np

from meshsys.rl.speculative.drafts import Draft, DraftCache, Name


def make_draft(length: int, seed: int = 0) -> Draft:
    random = np.random.default_rng((length, seed))
    tokens, log_probs = random.integers(0, 2**31, length, np.int32), random.normal(size=length).astype(np.float32)
    return Draft(tokens, log_probs, seed=2**32 - 1 - seed, prompt_number=seed)


def bits(cache: DraftCache) -> list:
    found = []
    for name in cache:
        draft = cache.get(name)
        assert draft is not None and (draft.tokens.dtype, draft.log_probs.dtype) == (np.int32, np.float32)
        found.append((name, draft.tokens.tobytes(), draft.log_probs.tobytes(), draft.seed, draft.prompt_number))
    return found


def test_arrays_bring_the_drafts_back_in_their_order() -> None:
    cache = DraftCache(100)
    names = [Name("sums/7", 0, 0), Name("größe\n/0", 0, 3), Name("sums/7", 1, 0), Name("sums/7", 0, 1)]
    for number, name in enumerate(names):
        cache.put(name, make_draft(number + 1, number))
    cache.put(names[1], make_draft(5))  # the newest now
    other = DraftCache(100)
    other.load(cache.arrays())
    assert bits(other) == bits(cache)
    assert list(other) == [names[0], names[2], names[3], names[1]]

    nothing = DraftCache(100)
    assert nothing.arrays() == {}
    nothing.load({})
    assert len(nothing) == 0


def test_the_oldest_drafts_make_room() -> None:
    cache = DraftCache(10)
    names = [Name(f"sums/{number}", 0, 0) for number in range(5)]
    for name in names[:3]:
        cache.put(name, make_draft(3))
    cache.put(names[0], make_draft(4))  # 10 tokens in all; names[1] is the oldest
    assert list(cache) == [names[1], names[2], names[0]]
    cache.put(names[3], make_draft(1))
    assert list(cache) == [names[2], names[0], names[3]]
    cache.put(names[4], make_draft(11))
    assert len(cache) == 0
    assert cache.get(names[4]) is None
    smaller = DraftCache(4)
    for name in names[:2]:
        cache.put(name, make_draft(3))
    smaller.load(cache.arrays())
    assert list(smaller) == [names[1]]

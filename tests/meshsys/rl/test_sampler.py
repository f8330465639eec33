"""The same responses from every layout, with the trainer's own log-probabilities."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from meshsys.assemble import assemble
from meshsys.config import Config
from meshsys.mesh import make_mesh
from meshsys.rl.objectives import PolicyLoss, Reinforce
from meshsys.rl.prompt import Prompt
from meshsys.rl.rollouts import Rollout, RolloutRows
from meshsys.rl.sampler import OnSameDevices, Sampler
from meshsys.rl.update import PolicyUpdate
from meshsys.torus import place
from models.generation import Request
from models.sampling import Sampling

TOKENS, LONGEST = 8, 12

# Training layout, sampling layout, slots.
LAYOUTS = """
train              sample    slots
pipe=1             data=1    16
pipe=2             data=2    16
pipe=2             tensor=2  3
fsdp=2,tensor=2    data=4    8
pipe=2,data=2      tensor=2  16
pipe=2,tensor=4    data=8    24
"""
SETTINGS = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.6, 0, 1.0), (1.3, 12, 1.0), (1.0, 0, 0.8), (0.9, 40, 0.9)]


def sizes_of(text: str) -> dict[str, int]:
    return {name: int(size) for name, size in (pair.split("=") for pair in text.split(","))}


def make_requests(settings: tuple[float, int, float]) -> list[Request]:
    random = np.random.default_rng(5)
    temperature, top_k, top_p = settings
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "stop_ids": (7, 21, 99), "seed": 11}
    return [
        Request(prompt=ids, max_tokens=TOKENS, prompt_number=number, sample=sample, **how)
        for number, size in enumerate((1, 3, 5, 9, 2))
        for ids in (random.integers(0, 256, size),)
        for sample in range(3)
    ]


@functools.cache
def responses(layout: str, settings: tuple[float, int, float]) -> tuple[list[np.ndarray], float]:
    """Tokens by request, and the largest difference between sampler and trainer."""
    train, sample, slots = layout.split()
    axes = sizes_of(train)
    devices = math.prod(axes.values())
    requests = make_requests(settings)
    config = Config.model_validate(
        {
            "run": {"name": "test", "seed": 3},
            "model": {"layers": 2, "d_model": 32, "heads": 8, "kv_heads": 4, "d_ff": 64, "vocab_size": 264},
            "data": {"sequence_length": LONGEST + TOKENS, "batch_size": 16},
            "mesh": {"topology": str(devices), "axes": axes},
            "pipeline": {"microbatches": 2},
        }
    )
    assembly = assemble(config)
    how = Sampling(settings[0] or 1.0, *settings[1:])
    update = PolicyUpdate(assembly, make_mesh(assembly.placement), PolicyLoss(Reinforce()), how)
    state = update.init()
    shape = sizes_of(sample) | ({"data": devices // 2} if "tensor" in sample else {})
    mesh = make_mesh(place(assembly.placement.topology, shape))
    sampler = Sampler(assembly, mesh, OnSameDevices(assembly, state.params, mesh), slots=int(slots))
    sampler.update(state.params, 0)
    pieces = [[] for _ in requests]
    for piece in sampler.sample(requests):
        pieces[piece.request].append(piece)
    rollouts = [
        Rollout(
            Prompt("test/0", ""),
            request.ids,
            np.concatenate([piece.tokens for piece in own]),
            np.concatenate([piece.log_probs for piece in own]),
            np.zeros(0, np.int32),
            0,
            0,
            own[-1].reason == "stop",
        )
        for request, own in zip(requests, pieces, strict=True)
    ]
    rows = RolloutRows(rollouts, 16, LONGEST + TOKENS, TOKENS)
    scores = rows.to_tokens(update.score(state.params, rows.batch()))
    error = np.abs(scores - rows.padded("log_probs"))[rows.mask_NT].max()
    return [one.tokens for one in rollouts], float(error)


@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[5]], ids=str)
@pytest.mark.parametrize("layout", [" ".join(row.split()) for row in LAYOUTS.strip().splitlines()[1:]])
def test_layouts(layout: str, settings: tuple[float, int, float]) -> None:
    _check(layout, settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS[1:5], ids=str)
@pytest.mark.parametrize("layout", [" ".join(row.split()) for row in LAYOUTS.strip().splitlines()[1:]])
def test_layouts_more(layout: str, settings: tuple[float, int, float]) -> None:
    _check(layout, settings)


def _check(layout: str, settings: tuple[float, int, float]) -> None:
    want, _ = responses("pipe=1 data=1 16", settings)
    got, error = responses(layout, settings)
    assert error <= 2e-5
    for ours, alone in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, alone)
    assert len({tokens.tobytes() for tokens in got}) > (5 if settings[0] else 3)


def test_samples_of_a_group_differ_and_steps_differ() -> None:
    """Keys follow seed, prompt and sample: one more of any gives other tokens."""
    got, _ = responses("pipe=1 data=1 16", SETTINGS[1])
    assert all(not np.array_equal(got[3 * group], got[3 * group + 1]) for group in range(5))

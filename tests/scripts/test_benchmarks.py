"""The benchmarks' baselines compute what the model does, or they would be no baselines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from models import Batch, Decoder, ModelConfig
from scripts.baselines import accumulate, autodiff_scan
from scripts.baselines.jobs import Size, stage_jobs

LAYERS, RANKS, MICROBATCHES, SEQUENCES, LENGTH, VOCABULARY = 4, 2, 6, 2, 8, 16
CONFIG = ModelConfig(layers=LAYERS, d_model=16, heads=2, d_ff=32, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(CONFIG)


@pytest.fixture(scope="module")
def case(decoder: Decoder) -> tuple:
    """Parameters, a batch [M, sequences, ...] and a scale."""
    random = np.random.default_rng(0)
    shape = MICROBATCHES, SEQUENCES, LENGTH
    tokens, targets = jnp.asarray(random.integers(0, VOCABULARY, (2, *shape)), jnp.int32)
    batch = Batch(
        tokens,
        targets,
        positions=jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), (*shape[:2], 1)),
        segment_ids=jnp.asarray(random.integers(1, 3, shape), jnp.int32).sort(-1),
        weights=jnp.asarray(random.random(shape), jnp.float32),
        sequence=jnp.arange(MICROBATCHES * SEQUENCES, dtype=jnp.int32).reshape(shape[:2]),
    )
    return decoder.init(jax.random.key(0)), batch, 1 / batch.weights.sum()


@pytest.fixture(scope="module")
def expected(decoder: Decoder, case: tuple) -> tuple:
    """Loss and gradients of all sequences at once."""
    params, batch, scale = case
    whole = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), batch)
    return jax.jit(jax.value_and_grad(lambda params: scale * decoder.loss_sum(params, whole)))(params)


def staged(params: dict, lead: tuple[int, ...]) -> dict:
    return params | {"layers": jax.tree.map(lambda a: a.reshape(*lead, *a.shape[1:]), params["layers"])}


def check(function: Callable, case: tuple, expected: tuple, lead: tuple[int, ...]) -> None:
    params, batch, scale = case
    loss, grads = jax.jit(function)(staged(params, lead), batch, scale)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    for mine, right in zip(jax.tree.leaves(grads), jax.tree.leaves(staged(expected[1], lead)), strict=True):
        np.testing.assert_allclose(mine, right, rtol=0, atol=1e-4 * float(jnp.abs(right).max()))


@pytest.mark.parametrize(("remat", "unroll"), [("none", True), ("full", False)])
def test_accumulation_is_the_whole_batch(
    decoder: Decoder, case: tuple, expected: tuple, remat: str, unroll: bool
) -> None:
    check(accumulate(decoder, remat=remat, unroll=unroll), case, expected, (LAYERS,))


@pytest.mark.parametrize(("remat", "unroll"), [("none", True), ("full", False)])
def test_autodiff_scan_is_the_unpipelined_model(
    decoder: Decoder, case: tuple, expected: tuple, remat: str, unroll: bool
) -> None:
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("pipe",))
    check(autodiff_scan(decoder, mesh, remat=remat, unroll=unroll), case, expected, (RANKS, LAYERS // RANKS))


def test_full_remat_of_a_stage_really_recomputes() -> None:
    size = Size(CONFIG, SEQUENCES, LENGTH, RANKS)

    def flops(remat: str) -> float:
        return stage_jobs(size, "middle", remat)["value_and_grad"].compile().cost_analysis()["flops"]

    assert flops("full") > 1.1 * flops("none")


@pytest.mark.parametrize(
    ("script", "names"),
    [
        ("bench_pipeline.py", ("memory", "families", "flops", "time", "compile")),
        ("bench_aot.py", ("memory", "pod")),
        ("bench_planner.py", ("cpu", "v5p")),
        ("bench_recompute.py", ("simulated", "measured")),
        ("bench_attention.py", ("memory", "time", "cache", "ring")),
        ("check_pytorch.py", ("interleaved", "loops", "v")),
        ("bench_axes.py", ("predicted", "compiled")),
        ("bench_moe.py", ("step", "layer", "dropped")),
        ("bench_shared_prompts.py", ("long", "equal", "short")),
    ],
)
def test_a_script_names_its_benchmarks(script: str, names: tuple[str, ...]) -> None:
    path = Path(__file__).parents[2] / "scripts" / script
    shown = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True, check=True).stdout
    assert f"{{{','.join((*names, 'all'))}}}" in shown and "--json" in shown

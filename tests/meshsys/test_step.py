"""Five optimizer steps of every layout against plain autodiff and optax on one device."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshsys import data
from meshsys.assemble import assemble
from meshsys.config import Config, TrainConfig
from meshsys.mesh import make_mesh
from meshsys.optimizer import learning_rate, make_optimizer
from meshsys.state import Metrics, State
from meshsys.step import Step
from models import Batch, Decoder, ModelConfig
from tests.oracles.inputs import QUICK, random_batch, random_parameters

SEQUENCES, LENGTH, VOCAB = 60, 8, 264
# At a higher rate Adam makes more of rounding than the tolerances allow: it takes whole steps by the sign of gradients
# that are nearly zero.
STEPS, PEAK, WARMUP, FINAL, DECAY, CLIP = 5, 1e-3, 2, 0.1, 0.1, 0.2

# Every row is a run. Options: `tied` embeddings, `dropout`, `bfloat16`, `tick` gathers fsdp weights in every tick.
CASES = """
schedule           mesh      M   layers  remat                 options
1f1b               2x2x1x2   3   3       full                  tied
zb_h1              4x1x2x1   3   2       none                  dropout,tick
interleaved_1f1b   2x1x1x1   5   3       dots
gpipe              1x1x1x1   3   3       none                  tied,bfloat16
pipedream_2bw      2x1x1x1   3   3       none                  dropout
"""

SLOW_CASES = """
schedule           mesh      M   layers  remat                 options
1f1b               2x1x1x1   3   3       none                  tied,bfloat16
gpipe              1x2x1x1   2   2       none                  dropout
1f1b               1x1x4x2   1   3       full
1f1b               8x1x1x1   3   3       none                  tied
1f1b               4x2x1x1   15  5       names:mlpwi_0
zb_h1              2x1x2x2   5   3       offload:context       tied,tick
zb_h1              2x2x2x1   1   2       dots                  dropout
interleaved_1f1b   2x1x1x2   3   2       full                  dropout
interleaved_1f1b   2x2x2x1   3   3       none                  tied,bfloat16
"""


def rows(table: str) -> list[str]:
    return [" ".join(row.split()) for row in table.strip().splitlines()[1:]]


def make_config(row: str) -> Config:
    schedule, mesh, microbatches, layers, remat, *options = row.split()
    options = ",".join(options).split(",")
    sizes = [int(size) for size in mesh.split("x")]
    return Config.model_validate(
        {
            "run": {"name": "test", "seed": 3},
            "model": {
                "layers": int(layers),
                "d_model": 16,
                "heads": 4,
                "kv_heads": 2,
                "d_ff": 32,
                "tie_embeddings": "tied" in options,
                "dropout": 0.2 if "dropout" in options else 0.0,
                "dtype": "bfloat16" if "bfloat16" in options else "float32",
            },
            "data": {"sequence_length": LENGTH, "batch_size": SEQUENCES},
            "mesh": {
                "topology": str(math.prod(sizes)),
                "axes": dict(zip(("pipe", "data", "fsdp", "tensor"), sizes, strict=True)),
            },
            "pipeline": {
                "schedule": schedule,
                "microbatches": int(microbatches),
                "remat": remat,
                "fsdp_gather": "tick" if "tick" in options else "step",
            },
            "train": {
                "steps": STEPS,
                "learning_rate": PEAK,
                "warmup_steps": WARMUP,
                "weight_decay": DECAY,
                "gradient_clip": CLIP,
                "final_learning_rate_fraction": FINAL,
            },
        }
    )


@functools.cache
def make_step(row: str) -> Step:
    assembly = assemble(make_config(row), poison=True)
    step = Step(assembly, make_mesh(assembly.placement))
    step.compile()
    return step


def at_step_0(step: Step, params) -> State:
    """Zero moments, without a call of the optimizer."""
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), step.canonical(previous=False))
    return step.from_canonical(zeros._replace(params=params))


def batch_of(number: int) -> data.Batch:
    return data.Batch(*map(np.asarray, jax.tree.leaves(random_batch(SEQUENCES, LENGTH, VOCAB, seed=number))))


def rate_by_hand(step: int) -> float:
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    done = (step - WARMUP) / (STEPS - WARMUP)
    return PEAK * (FINAL + (1 - FINAL) * (1 + math.cos(math.pi * done)) / 2)


# --- The oracle -----------------------------------------------------------------------------------------------------


@functools.cache
def unpipelined(model: ModelConfig, seed: int, late: bool = False):
    """First parameters; then loss and gradient norm of every step, and the parameters after the last.

    With `late` a gradient is that of the parameters before the last update.
    """
    decoder = Decoder(model)
    params = first = random_parameters(decoder)
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.inject_hyperparams(optax.adamw, static_args="mask")(
            learning_rate=PEAK,
            b2=0.95,
            weight_decay=DECAY,
            mask=lambda params: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params),
        ),
    )

    def loss_of(params, batch, key):
        return decoder.loss_sum(params, batch, key) / batch.weights.sum()

    @functools.partial(jax.jit, compiler_options=QUICK)
    def take(at, params, opt_state, batch, key):
        loss, grads = jax.value_and_grad(loss_of)(at, batch, key)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, opt_state, params)
        norm = jnp.sqrt(sum(jnp.sum(grad**2) for grad in jax.tree.leaves(grads)))
        return optax.apply_updates(params, updates), opt_state, loss, norm

    opt_state, losses, norms, before = optimizer.init(params), [], [], params
    for number in range(STEPS):
        opt_state[1].hyperparams["learning_rate"] = jnp.float32(rate_by_hand(number))
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), number) if model.dropout else None
        batch = Batch(*jax.tree.leaves(random_batch(SEQUENCES, LENGTH, VOCAB, seed=number)))
        updated, opt_state, loss, norm = take(before if late else params, params, opt_state, batch, key)
        before, params = params, updated
        losses.append(float(loss))
        norms.append(float(norm))
    return first, losses, norms, jax.device_get(params)


@pytest.mark.parametrize(
    "row", [*rows(CASES), *(pytest.param(row, marks=pytest.mark.slow) for row in rows(SLOW_CASES))]
)
def test_five_steps(row):
    step = make_step(row)
    config = step.assembly.config
    model = config.model
    half = model.dtype == "bfloat16"
    reference = ModelConfig(**{**vars(model), "dtype": "float32"})
    late = step.assembly.program.period > 0
    first, losses, norms, last = unpipelined(reference, config.run.seed, late)

    state, seen = at_step_0(step, first), []
    for number in range(STEPS):
        state, metrics = step(state, batch_of(number), batch_of(number + 1))
        seen.append(jax.device_get(metrics))

    close = 3e-2 if half else 1e-5
    np.testing.assert_allclose([metrics.loss for metrics in seen], losses, rtol=close)
    np.testing.assert_allclose([metrics.grad_norm for metrics in seen], norms, rtol=close)
    np.testing.assert_allclose(
        [metrics.learning_rate for metrics in seen], [rate_by_hand(number) for number in range(STEPS)], rtol=1e-6
    )
    assert [int(metrics.tokens) for metrics in seen] == [int((batch_of(n).weights_BS > 0).sum()) for n in range(STEPS)]
    assert all(metrics.finite for metrics in seen)

    canonical = jax.device_get(step.to_canonical(state))
    assert canonical.step == STEPS
    if not half:  # five steps move a parameter by 5e-3 at most
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5), canonical.params, last)


# --- The optimizer --------------------------------------------------------------------------------------------------


def test_learning_rate_ends():
    """The warm-up's first step is peak/warmup, and the last step is one short of the cosine's end."""
    config = TrainConfig(steps=1000, learning_rate=1.0, warmup_steps=50, final_learning_rate_fraction=0.1)
    rate = learning_rate(config)
    at = [float(rate(jnp.float32(step))) for step in (0, 48, 49, 50, 999)]
    np.testing.assert_allclose(at, [1 / 50, 49 / 50, 1.0, 1.0, 0.1], rtol=1e-4)


@pytest.mark.parametrize(("steps", "warmup", "wanted"), [(3, 0, 1), (3, 1, 1), (3, 3, 1 / 3), (3, 10, 0.1), (1, 0, 1)])
def test_learning_rate_of_the_first_step(steps, warmup, wanted):
    rate = learning_rate(TrainConfig(steps=steps, learning_rate=1.0, warmup_steps=warmup))
    assert float(rate(jnp.float32(0))) == pytest.approx(wanted)


def test_weight_decay_spares_the_norms():
    decoder = Decoder(ModelConfig(layers=2, d_model=8, heads=2, d_ff=8, vocab_size=8))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), jax.eval_shape(decoder.init, jax.random.key(0)))
    optimizer = make_optimizer(TrainConfig(weight_decay=0.5))

    @functools.partial(jax.jit, compiler_options=QUICK)
    def update_without_gradient(params):
        return optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)[0]

    with jax.numpy_dtype_promotion("standard"):
        updates = update_without_gradient(params)
    decayed = {
        ".".join(part.key for part in path): bool(np.any(update))
        for path, update in jax.tree_util.tree_leaves_with_path(updates)
    }
    spared = {name for name, changed in decayed.items() if not changed}
    assert spared == {"layers.attention_norm.scale", "layers.mlp_norm.scale", "shared.head.norm.scale"}


# --- What is not finite ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interleaved() -> Step:
    """Two ranks with two stages each, so that the order of layers is not that of places."""
    return make_step("interleaved_1f1b 2x1x1x1 5 3 dots")


def squares_of(step: Step, name: tuple[str, ...], layer: int, value: float) -> Metrics:
    """Metrics with zero gradients but for one parameter."""
    table = step.assembly.program.layout.table
    shapes = step.canonical(previous=False).params
    squares = {
        "layers": jax.tree.map(lambda _: np.zeros(table.shape, np.float32), shapes["layers"]),
        "shared": jax.tree.map(lambda _: np.float32(0), shapes["shared"]),
    }
    node = squares
    for part in name[:-1]:
        node = node[part]
    node[name[-1]] = np.where(table == layer, np.float32(value), 0) if name[0] == "layers" else np.float32(value)
    return Metrics(np.float32(1), np.float32(value), np.float32(0), np.int32(1), np.bool_(False), squares)


@pytest.mark.parametrize("layer", range(3))
def test_the_layer_is_named(interleaved, layer):
    metrics = squares_of(interleaved, ("layers", "mlp", "gate"), layer, math.nan)
    assert interleaved.first_nonfinite(metrics) == f"the gradient of layers.{layer}.mlp.gate"


def test_what_is_named(interleaved):
    metrics = squares_of(interleaved, ("shared", "embed", "embedding"), 0, math.inf)
    assert interleaved.first_nonfinite(metrics) == "the gradient of embed.embedding"
    whole = metrics._replace(squares=jax.tree.map(np.zeros_like, metrics.squares))
    assert interleaved.first_nonfinite(whole) == "the norm of the gradient"
    assert interleaved.first_nonfinite(whole._replace(loss=np.float32("nan"))) == "the loss"
    both = metrics._replace(loss=np.float32("inf"))
    assert interleaved.first_nonfinite(both) == "the loss, the gradient of embed.embedding"


def test_a_step_that_is_not_finite_changes_nothing(interleaved):
    params = random_parameters(interleaved.assembly.decoder)
    params["layers"]["mlp"]["gate"] = params["layers"]["mlp"]["gate"].at[2, 0, 0].set(jnp.inf)
    state = at_step_0(interleaved, params)
    before = jax.device_get(interleaved.to_canonical(state))
    state, metrics = interleaved(state, batch_of(0), batch_of(0 + 1))
    after = jax.device_get(interleaved.to_canonical(state))
    assert not metrics.finite and after.step == 1
    jax.tree.map(np.testing.assert_array_equal, after._replace(step=before.step), before)

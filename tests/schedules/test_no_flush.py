"""Schedules without a flush: no bubbles, and step by step the gradients of a recurrence on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from models import SAVEABLE_NAMES, Decoder, ModelConfig
from schedules.actions import Action, Kind, Schedule, ScheduleError
from schedules.families import make, names
from schedules.pipeline_model import PipelineModel
from schedules.program import Program
from schedules.remat import Remat
from schedules.ticks import assign_ticks, timeline
from schedules.validate import validate
from tests.oracles.inputs import QUICK, random_batch, random_parameters
from tests.oracles.unpipelined import loss_and_gradients

STEPS, RATE = 4, 0.5


# --- As data --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "group"), [("pipedream_2bw", None), ("nf1b", None), ("nf1b", 2), ("nf1b", 3)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_rank_is_busy_in_every_tick(name, group, ranks):
    microbatches = 6 * ranks
    schedule = make(name, ranks=ranks, microbatches=microbatches, group=group)
    validate(schedule, microbatches=microbatches)
    assert all(len(row) == 3 * microbatches and None not in row for row in timeline(schedule))
    assert schedule.versions == (2 if name == "pipedream_2bw" else 1)


@pytest.mark.parametrize("name", names(flush=False))
def test_too_few_microbatches(name):
    with pytest.raises(ScheduleError, match=f"microbatches=2 is too few for {name} on 8 ranks: .* use [3-9] or more"):
        make(name, ranks=8, microbatches=2)


def test_groups_must_fit():
    with pytest.raises(ScheduleError, match="microbatches=7 are no groups of 2; use a multiple of 2"):
        make("nf1b", ranks=2, microbatches=7, group=2)


F, B = Kind.F, Kind.B


def stream(*rows: list[tuple[Kind, int]], period: int = 2) -> Schedule:
    actions = tuple(tuple(Action(rank, kind, m) for kind, m in row) for rank, row in enumerate(rows))
    return Schedule("by hand", actions, tuple(range(len(rows))), period=period)


# Rank 0 has one backward of the step before left, rank 1 too.
BY_HAND = stream([(F, 2), (B, 1), (F, 3), (B, 2)], [(B, 1), (F, 2), (B, 2), (F, 3)])


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (stream([(F, 2), (B, 2)], [(F, 2), (B, 2)]), r"stage 0 has B of microbatches \[2\]; without a flush it has 2"),
        (stream([(F, 2), (F, 3)], [(F, 2), (F, 3)]), "stage 0 has .*; without a flush it has F and B, or F, I and W"),
        (stream([(F, 2), (B, 2), (F, 3), (B, 3)], [(B, 1), (F, 2), (B, 2), (F, 3)]), "0B3 needs 1B3, which runs a"),
    ],
)
def test_damaged(schedule, words):
    validate(BY_HAND)
    with pytest.raises(ScheduleError, match=words):
        validate(schedule)


# --- As a program ---------------------------------------------------------------------------------------------------


def on_mesh(program: Program, model: PipelineModel, params, mesh: tuple[int, ...], gather: str = "step"):
    """Jitted `start` and `step`, and the tree of parameters in stage form."""
    devices = Mesh(np.array(jax.devices()[: np.prod(mesh)]).reshape(mesh), ("pipe", "data", "fsdp"))
    wide = "fsdp" if mesh[2] > 1 else None

    def spec(leaf):
        return PartitionSpec("pipe", None, None, *(wide if n == leaf.ndim - 1 else None for n in range(1, leaf.ndim)))

    shared = jax.tree.map(lambda _: PartitionSpec(), params["shared"])
    specs = {"shared": shared, "layers": jax.tree.map(spec, params["layers"])}
    start, step = program.stream(model, devices, specs, gather=gather)
    return jax.jit(start, compiler_options=QUICK), jax.jit(step, compiler_options=QUICK)


def staged(program: Program, params):
    return {"shared": params["shared"], "layers": program.layout.to_stages(params["layers"])}


def canonical(program: Program, grads):
    return {"shared": grads["shared"], "layers": program.layout.to_layers(grads["layers"])}


def descend(params, grads):
    return jax.tree.map(lambda param, grad: param - RATE * grad, params, grads)


def both(one, other):
    return jax.tree.map(lambda *pair: jnp.concatenate(pair), one, other)


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max()), got, want)


@pytest.mark.parametrize(
    ("mesh", "microbatches", "remat", "unroll", "gather"),
    [
        ((2, 1, 1), 3, "none", True, "step"),
        pytest.param((4, 1, 1), 5, "full", False, "step", marks=pytest.mark.slow),
        pytest.param((2, 1, 2), 2, "dots", True, "tick", marks=pytest.mark.slow),
        pytest.param((2, 2, 1), 4, "names:context", False, "step", marks=pytest.mark.slow),
    ],
)
def test_two_versions_are_gradient_descent_with_a_delay_of_one(mesh, microbatches, remat, unroll, gather):
    """W(t+1) = W(t) - rate * g(W(t-1)), every g of its own batch; 2BW's definition, on one device."""
    decoder = Decoder(ModelConfig(layers=3, d_model=16, heads=4, kv_heads=2, d_ff=32, vocab_size=24, dropout=0.1))
    sequences, params = 4 * microbatches, random_parameters(decoder)
    batches = [random_batch(sequences, 8, 24, seed=number) for number in range(STEPS + 1)]
    keys = jax.random.split(jax.random.key(5), STEPS + 1)
    schedule = make("pipedream_2bw", ranks=mesh[0], microbatches=microbatches)
    program = Program(schedule, 3, Remat.parse(remat, SAVEABLE_NAMES), unroll=unroll, poison=True)
    model = PipelineModel(decoder.prepare, decoder.embed, decoder.layer, decoder.head)
    start, step = on_mesh(program, model, params, mesh, gather)
    cut = [jax.tree.map(lambda a: a.reshape(microbatches, -1, *a.shape[1:]), batch) for batch in batches]
    scales = [1 / batch.weights.sum() for batch in batches]

    ours, theirs, carry = [params, params], [params, params], None
    for t in range(STEPS + 1):
        before = max(t - 1, 0)
        arguments = (
            [staged(program, version) for version in (ours[-2:] if t else [params, params])],
            both(cut[before], cut[t]),
            jnp.stack([scales[before], scales[t]]),
            jnp.stack([keys[before], keys[t]]),
        )
        carry = start(*arguments) if carry is None else carry
        loss, grads, carry = step(*arguments, program.rows(), carry)
        if not t:
            continue  # completes the gradients of a step that there was not
        wanted_loss, wanted = loss_and_gradients(decoder, theirs[before], batches[before], keys[before])
        np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
        close(canonical(program, grads), wanted)
        ours.append(descend(ours[-1], canonical(program, grads)))
        theirs.append(descend(theirs[-1], wanted))


# A model whose embedding and loss are linear, so that only its layers see which weights they run on.


def tiny_layer(params, x, context, number):
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


TINY = PipelineModel(
    prepare=lambda microbatch, key: microbatch,
    first=lambda shared, context: context["x"] @ shared["embed"],
    layer=lambda *arguments: (tiny_layer(*arguments), None),
    last=lambda shared, x, context: jnp.sum(x * context["y"]),
)


def test_one_version_goes_on_with_the_newest_weights():
    """The oracle runs the same actions on one device, in each step with the weights of that step.

    Under full remat F keeps each layer's input, and the backward is the layer's VJP there, with the newest weights.
    """
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(0, 0.4, shape), jnp.float32)

    width, layers, schedule, period = 6, 4, BY_HAND, BY_HAND.period
    params = {
        "shared": {"embed": normal(width, width)},
        "layers": {"up": normal(layers, width, width), "down": normal(layers, width, width)},
    }
    batches = [{"x": normal(period, 3, width), "y": normal(period, 3, width)} for _ in range(STEPS + 1)]
    program = Program(schedule, layers, Remat("full"), poison=True)
    start, step = on_mesh(program, TINY, params, (2, 1, 1))
    order = sorted(schedule, key=assign_ticks(schedule).__getitem__)
    of_stage = program.layout.layers

    carry, kept, arrived, sums = None, {}, {}, {}
    ours = theirs = params
    for t in range(STEPS + 1):
        pair, scale = both(batches[max(t - 1, 0)], batches[t]), jnp.ones(2)
        arguments = [staged(program, ours)], pair, scale, None
        carry = start(*arguments) if carry is None else carry
        _, grads, carry = step(*arguments, program.rows(), carry)

        sums[t] = jax.tree.map(jnp.zeros_like, params)
        for action in order:
            at, m = divmod(action.microbatch, period)
            of, number = t - 1 + at, (t - 1 + at) * period + m  # the step and the microbatch in the whole stream
            if of < 0:
                continue
            one = {name: value[m] for name, value in batches[of].items()}
            weights = [jax.tree.map(lambda a, i=i: a[i], theirs["layers"]) for i in of_stage[action.stage]]
            if action.kind is F:
                x = arrived.pop((F, action.stage, number), None)
                x = one["x"] @ theirs["shared"]["embed"] if action.stage == 0 else x
                kept[action.stage, number] = []
                for weight in weights:
                    kept[action.stage, number].append(x)
                    x = tiny_layer(weight, x, None, None)
                arrived[F, action.stage + 1, number] = x
                continue
            dx = one["y"] if action.stage == 1 else arrived.pop((B, action.stage, number))
            inputs = kept.pop((action.stage, number))
            for i, weight, x in reversed(list(zip(of_stage[action.stage], weights, inputs, strict=True))):
                _, backward = jax.vjp(lambda weight, x: tiny_layer(weight, x, None, None), weight, x)
                gradient, dx = backward(dx)
                sums[of]["layers"] = jax.tree.map(lambda a, g, i=i: a.at[i].add(g), sums[of]["layers"], gradient)
            arrived[B, action.stage - 1, number] = dx
            if action.stage == 0:
                sums[of]["shared"]["embed"] += jnp.einsum("bi,bj->ij", one["x"], dx)
        if t:
            close(canonical(program, grads), sums[t - 1])
            ours, theirs = descend(ours, canonical(program, grads)), descend(theirs, sums[t - 1])

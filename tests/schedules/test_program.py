"""The compiled program against the whole model on one device, and against its own promises of size.

One global batch of 180 sequences, which every number of microbatches divides: the loss and the gradients do not
depend on how it is cut.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import SAVEABLE_NAMES, Decoder, ModelConfig
from schedules.actions import Action, Kind, Schedule, forward_only, from_csv, split_backward
from schedules.costs import Costs
from schedules.families import make
from schedules.pipeline_model import PipelineModel
from schedules.program import Program
from schedules.recompute import add_recompute
from schedules.remat import Remat
from schedules.validate import validate
from tests.oracles import other_software
from tests.oracles.inputs import QUICK, random_batch, random_parameters
from tests.oracles.table_machine import WrongValue, execute
from tests.oracles.unpipelined import loss_and_gradients

SEQUENCES, LENGTH, VOCAB = 180, 8, 24
AXES = ("pipe", "data", "fsdp", "tensor")

# Three stages of rank 0 and one of rank 1, in an order that no family has; whole and cut backwards, bubbles, a pair.
BY_HAND = (
    "0F0,0F1,,2F0,2F1,0F2,3F0,(2F2;3B0)OVERLAP_F_B,2I0,3F1,3I1,2B1,3F2,,3W1,3B2,2W0,2I2,0B0,2W2,0I1,0B2,0W1\n"
    ",1F0,1F1,,1F2,,,,,,1I0,,1B1,1W0,,,,,,,1I2,1W2\n"
)
# Microbatches 0 and 2 go down the ranks, microbatch 1 goes up through the same layers.
TWO_WAY = "0F0,,3F1,0F2,3I1,0I0,3W1,0W0,,0I2,0W2\n2F1,1F0,1I0,1F2,1W0,,2I1,1I2,2W1,1W2\n"

# These bring a placement and an order, which are data: a few rows are enough.
PLACEMENT_ONLY = {
    *("csv:two_way", "looped_bfs", "eager_1f1b", "kfkb", "zb_h2", "zbv", "v_half", "v_min", "dualpipe_v", "chimera"),
    *("cross_region", "cross_region_wave"),
}

# Every row is one program. Options: `scan` loops over a stage's layers instead of unrolling them, `fused` leaves
# full backwards in the schedule, `apart` recomputes in actions of their own, `spread` has the
# vocabulary on all ranks, `tick` gathers fsdp weights in every tick, `tied` ties the embeddings. The default
# run has few models, as each needs a reference; the slow run has the rest.
QUICK_CASES = """
schedule           mesh      M   layers  remat                    options
gpipe              4x1x2x1   3   3       full                     fused,tick
gpipe              2x1x1x2   5   4       names:context,mlpwi_0    scan
gpipe              2x2x1x1   1   3       dots                     scan,dropout
1f1b               2x1x1x1   5   5       none                     fused,tied
1f1b               4x1x1x1   9   5       dots                     scan,tied
1f1b               2x1x2x2   3   3       offload:context          tick
interleaved_1f1b   2x1x1x1   5   5       full                     scan,tied
interleaved_1f1b   2x2x1x1   1   3       none                     fused
zb_h1              4x1x1x1   9   3       none                     scan
zb_h1              4x1x1x1   1   5       names:context            scan,tied
zb_h1              2x1x2x2   5   4       dots                     tick
zb_h1              2x2x1x1   3   3       full                     dropout
csv:zbv            2x1x1x1   5   5       full                     tied
csv:zbv            4x1x1x2   3   5       dots                     scan,tied
csv:dualpipev      2x2x1x1   5   3       names:out_proj,mlpwi_1   scan,dropout
csv:dualpipev      2x1x2x1   9   4       none                     scan,tick
csv:by_hand        2x1x1x1   3   5       none                     tied
csv:two_way        2x1x2x1   3   5       dots                     tied,tick
1f1b               2x1x1x1   3   5       full                     apart,dropout
zb_h1              2x1x1x1   3   5       names:context            apart,scan
chimera            4x1x1x1   9   5       dots                     scan,tied
v_min              2x1x1x1   5   5       none                     scan,tied
1f1b               4x1x1x1   5   3       none                     spread,scan
zb_h1              2x1x2x1   3   3       none                     spread,tied
"""

SLOW_CASES = """
schedule           mesh      M   layers  remat                    options
gpipe              1x1x1x1   3   5       none                     tied
1f1b               4x1x1x2   3   3       full                     scan
interleaved_1f1b   2x1x1x2   5   3       offload:mlpwi_1          scan,dropout
gpipe              2x2x1x1   5   4       offload:mlpwo            fused
gpipe              4x1x1x1   9   5       none                     dropout
1f1b               2x2x1x2   1   5       names:context,mlpwo      scan,fused,dropout
1f1b               4x1x2x1   9   8       full                     scan,tick
interleaved_1f1b   4x1x2x1   3   8       names:query_proj,mlpwo   scan,tick
interleaved_1f1b   4x2x1x1   9   7       dots                     scan
interleaved_1f1b   2x1x2x2   3   5       dots                     fused,tied,tick
zb_h1              4x1x2x1   3   2       offload:context,mlpwi_0  scan,tick
zb_h1              2x2x1x2   1   3       full                     dropout
csv:zbv            2x2x2x1   1   3       none                     tick
csv:zbv            4x1x1x1   9   10      offload:context          scan,dropout
csv:zbv            4x1x1x2   3   8       names:mlpwi_0,mlpwi_1    scan
csv:dualpipev      4x1x1x1   3   9       full                     scan,tied
csv:dualpipev      4x1x1x2   9   8       dots                     scan
csv:dualpipev      2x1x2x1   1   3       offload:mlpwi_0          tick
looped_bfs         2x1x2x1   5   5       dots                     scan,tied
looped_bfs         4x1x1x1   3   3       full                     scan,fused
eager_1f1b         4x1x1x1   9   3       none                     scan
eager_1f1b         2x2x1x1   1   4       full                     fused
kfkb               4x1x1x1   9   5       dots                     scan,tied
kfkb               2x1x1x2   3   3       none                     scan,fused
zb_h2              4x1x1x1   9   3       names:context            scan,dropout
zb_h2              2x1x2x1   1   4       none                     tick
zbv                4x1x1x1   9   5       none                     scan,tied
zbv                2x1x2x1   3   3       full                     tick
v_half             4x1x1x1   9   4       none                     scan
v_half             2x1x1x1   1   3       full                     dropout
v_min              4x1x1x1   9   3       dots                     scan
v_min              2x2x1x1   5   5       full                     tied
dualpipe_v         4x1x1x1   9   5       dots                     scan,tied,fused
dualpipe_v         2x1x1x2   3   3       none                     scan
chimera            2x1x2x1   3   3       none                     tick,fused
chimera            4x1x1x1   1   4       full                     scan
chimera            2x2x1x1   5   3       offload:context          scan,dropout
cross_region       4x1x1x1   9   3       none                     scan
cross_region_wave  2x1x1x1   5   4       dots                     scan
csv:two_way        2x2x1x1   3   4       offload:context          scan,dropout
csv:two_way        2x1x1x2   3   3       full                     scan
csv:by_hand        2x2x1x1   3   4       offload:context          scan,dropout
csv:by_hand        2x1x2x1   3   2       dots                     tick
csv:by_hand        2x1x1x2   3   6       full                     tied
csv:by_hand        2x1x1x1   3   3       names:context,mlpwo      scan
1f1b               2x1x1x1   5   3       full                     bfloat16
1f1b               4x1x1x1   5   3       full                     fused,apart,scan
interleaved_1f1b   2x1x2x1   5   5       dots                     apart,tick
zb_h1              2x2x1x2   1   5       offload:context          apart
1f1b               2x1x1x2   3   3       full                     spread,fused
interleaved_1f1b   2x1x2x1   5   5       none                     spread,tick,dropout
csv:two_way        2x2x1x1   3   5       none                     spread,tied
zb_h1              2x1x1x1   3   5       full                     spread,apart,bfloat16
csv:dualpipev      2x1x1x1   3   4       none                     scan,bfloat16
"""


@dataclass(frozen=True)
class Case:
    schedule: str
    mesh: tuple[int, ...]
    microbatches: int
    layers: int
    remat: str
    options: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, row: str) -> Case:
        schedule, mesh, microbatches, layers, remat, *options = row.split()
        sizes = tuple(int(size) for size in mesh.split("x"))
        words = frozenset(options[0].split(",")) if options else frozenset()
        return cls(schedule, sizes, int(microbatches), int(layers), remat, words)

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.mesh))
        words = (self.schedule, mesh, f"M{self.microbatches}", f"L{self.layers}", self.remat, *sorted(self.options))
        return " ".join(words)

    def make_schedule(self) -> Schedule:
        ranks = self.mesh[0]
        if self.schedule == "csv:by_hand":
            schedule = from_csv(BY_HAND)
        elif self.schedule == "csv:two_way":
            schedule = from_csv(TWO_WAY)
        elif self.schedule.startswith("csv:"):
            # Full backwards stay as they are written.
            schedule = from_csv(getattr(other_software, self.schedule[4:])(ranks, self.microbatches))
        else:
            schedule = make(self.schedule, ranks=ranks, microbatches=self.microbatches)
            schedule = schedule if "fused" in self.options else split_backward(schedule)
            schedule = add_recompute(schedule, Costs(R=1)) if "apart" in self.options else schedule
        validate(schedule, microbatches=self.microbatches)
        return schedule


def parse(table: str) -> list[Case]:
    return [Case.parse(row) for row in table.strip().splitlines()[1:]]


# --- Running a case -----------------------------------------------------------------------------------------------


@functools.cache
def reference(layers: int, tied: bool = False, dropout: float = 0.0, dtype: str = "float32"):
    """Decoder, parameters, batch, dropout key; loss and gradients of the whole model on one device."""
    sizes = dict(d_model=16, heads=4, kv_heads=2, d_ff=32, vocab_size=VOCAB)
    decoder = Decoder(ModelConfig(layers=layers, tie_embeddings=tied, dropout=dropout, dtype=dtype, **sizes))
    params, batch = random_parameters(decoder), random_batch(SEQUENCES, LENGTH, VOCAB)
    key = jax.random.key(7)
    return decoder, params, batch, key, *loss_and_gradients(decoder, params, batch, key)


class Pipeline:
    """A program on a mesh of the fake devices, with its parameters there."""

    def __init__(
        self,
        program: Program,
        mesh: tuple[int, ...],
        decoder: Decoder,
        params,
        gather: str = "step",
        *,
        model: PipelineModel | None = None,
        has_backward: bool = True,
    ):
        devices = np.array(jax.devices()[: np.prod(mesh)]).reshape(mesh)
        self.program, self.mesh = program, Mesh(devices, AXES)
        rules = {"embed": "fsdp", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": ("pipe", "tensor")}

        def spec(names):
            if names[0] == "layers":
                return PartitionSpec("pipe", None, None, *(rules.get(name) for name in names[1:]))
            return PartitionSpec(*(rules.get(name) for name in names))

        specs = jax.tree.map(spec, decoder.logical_axes(), is_leaf=lambda names: isinstance(names, tuple))
        shardings = jax.tree.map(lambda s: NamedSharding(self.mesh, s), specs)
        staged = {"shared": params["shared"], "layers": program.layout.to_stages(params["layers"])}
        self.params = jax.device_put(staged, shardings)
        blocks = (decoder.prepare, decoder.embed, decoder.layer, decoder.head, decoder.embed_part, decoder.head_part)
        function = program.value_and_grad if has_backward else program.value
        function = function(model or PipelineModel(*blocks), self.mesh, specs, gather=gather)
        self.step = jax.jit(function, compiler_options=QUICK)

    def arguments(self, batch, key, rows=None):
        """Of the step, for a global batch."""
        microbatches = 1 + self.program.table.microbatch.max()
        cut = jax.tree.map(lambda a: a.reshape(microbatches, -1, *a.shape[1:]), batch)
        return self.params, cut, 1 / batch.weights.sum(), key, self.program.rows() if rows is None else rows

    def __call__(self, batch, key, rows=None):
        """Loss of the global batch and gradients in the layout of the whole model."""
        program = self.program
        loss, gradients = self.step(*self.arguments(batch, key, rows))
        unused = program.layout.table < 0
        for leaf, param in zip(jax.tree.leaves(gradients), jax.tree.leaves(self.params), strict=True):
            assert leaf.shape == param.shape and leaf.dtype == param.dtype
            assert leaf.sharding.is_equivalent_to(param.sharding, leaf.ndim)
        # Places without a layer are part of the gradient's norm.
        assert all(not np.asarray(leaf)[unused].any() for leaf in jax.tree.leaves(gradients["layers"]))
        return loss, {"shared": gradients["shared"], "layers": program.layout.to_layers(gradients["layers"])}


def errors(gradients, wanted):
    """The largest error of each parameter relative to its own largest gradient; layers one by one."""
    found = {}
    pairs = zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(wanted), strict=True)
    for (path, got), want in pairs:
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        rows = zip(got, want, strict=True) if path[0].key == "layers" else [(got, want)]
        for number, (g, w) in enumerate(rows):
            found[jax.tree_util.keystr(path), number] = np.abs(g - w).max() / np.abs(w).max()
    return found


def distances(gradients, exact):
    """The root mean square of each parameter's error relative to that of its gradient."""
    pairs = zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(exact), strict=True)
    return {
        jax.tree_util.keystr(path): np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want)
        for (path, got), want in pairs
    }


def check(case: Case) -> None:
    model = case.layers, "tied" in case.options, 0.1 if "dropout" in case.options else 0.0
    dtype = "bfloat16" if "bfloat16" in case.options else "float32"
    decoder, params, batch, key, want_loss, want = reference(*model, dtype)
    remat = Remat.parse(case.remat, SAVEABLE_NAMES)
    options = dict(unroll="scan" not in case.options, vocab_parallel="spread" in case.options, poison=True)
    program = Program(case.make_schedule(), case.layers, remat, **options)
    pipeline = Pipeline(program, case.mesh, decoder, params, "tick" if "tick" in case.options else "step")
    loss, gradients = pipeline(batch, key)
    loss_tolerance, tolerance = (1e-4, 5e-2) if dtype == "bfloat16" else (1e-5, 1e-4)
    np.testing.assert_allclose(loss, want_loss, rtol=loss_tolerance)
    rounding = {}
    if dtype == "bfloat16":
        # The whole model rounds too: the pipeline may be no further from float32 than it is.
        *_, exact_loss, exact = reference(*model, "float32")
        np.testing.assert_allclose(loss, exact_loss, rtol=loss_tolerance)
        rounding, own, whole = errors(want, exact), distances(gradients, exact), distances(want, exact)
        assert max(whole.values()) < 0.05
        assert {name: error / whole[name] for name, error in own.items() if not error <= 1.5 * whole[name]} == {}
    found = errors(gradients, want)
    wrong = {name: error for name, error in found.items() if not error <= max(tolerance, rounding.get(name, 0.0))}
    assert wrong == {}


@pytest.mark.parametrize("case", parse(QUICK_CASES), ids=str)
def test_equals_the_whole_model(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", parse(SLOW_CASES), ids=str)
def test_equals_the_whole_model_more(case):
    check(case)


def test_the_tables_cover_every_pair():
    """Each schedule meets each value of each factor, as far as it can have it."""
    cases = parse(QUICK_CASES) + parse(SLOW_CASES)
    factors = {
        "remat": lambda c: c.remat.partition(":")[0],
        "pipe": lambda c: c.mesh[0],
        "data": lambda c: c.mesh[1],
        "fsdp": lambda c: c.mesh[2],
        "tensor": lambda c: c.mesh[3],
        "M": lambda c: "1" if c.microbatches == 1 else "<P" if c.microbatches < c.mesh[0] else "more",
        "layers": lambda c: _fit(c.layers, c.make_schedule().stages),
        **{word: lambda c, word=word: word in c.options for word in ("scan", "fused", "tick", "tied", "dropout")},
    }
    values = {name: {of(case) for case in cases} for name, of in factors.items()}
    values["pipe"].discard(1)
    missing = [
        (schedule, name, value)
        for schedule in dict.fromkeys(case.schedule for case in cases if case.schedule not in PLACEMENT_ONLY)
        for name, of in factors.items()
        for value in values[name]
        if not any(case.schedule == schedule and of(case) == value for case in cases)
    ]
    # zb_h1 and the files are cut as they are; the file by hand has the size that it has.
    impossible = {(name, "fused", True) for name in ("zb_h1", "csv:zbv", "csv:dualpipev", "csv:by_hand")}
    impossible |= {("csv:by_hand", "pipe", 4), ("csv:by_hand", "M", "1"), ("csv:by_hand", "M", "<P")}
    assert set(missing) == impossible


def _fit(layers: int, stages: int) -> str:
    return "fewer" if layers < stages else "even" if layers % stages == 0 else "uneven"


# --- The table is data --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    """A compiled zb_h1 on two ranks, and what it must give."""
    decoder, params, batch, key, loss, gradients = reference(4)
    schedule = make("zb_h1", ranks=2, microbatches=3)
    program = Program(schedule, 4, Remat.parse("none", SAVEABLE_NAMES), unroll=False, poison=True)
    return schedule, Pipeline(program, (2, 1, 1, 1), decoder, params), batch, key, loss, gradients


def right(result, loss, gradients):
    return abs(result[0] / loss - 1) <= 1e-5 and all(error <= 1e-4 for error in errors(result[1], gradients).values())


def test_one_program_runs_another_order(small):
    schedule, pipeline, batch, key, loss, gradients = small
    program = pipeline.program
    # Other microbatches first, and rank 1's first W before its second F.
    rows = [[Action(a.stage, a.kind, (a.microbatch + 2) % 3) for a in row] for row in schedule.actions]
    last = rows[1]
    w = next(i for i, action in enumerate(last) if action.kind is Kind.W)
    last.insert(w - 1, last.pop(w))
    other_schedule = Schedule("other", tuple(map(tuple, rows)), schedule.placement)
    validate(other_schedule)
    other = Program(other_schedule, 4, Remat("none"), unroll=False)
    shapes = [jax.tree.map(np.shape, p.rows()) for p in (program, other)]
    assert shapes[0] == shapes[1] and list(program.table.counts.values()) == list(other.table.counts.values())
    assert not np.array_equal(program.rows()["branch"], other.rows()["branch"])

    compiled = pipeline.step._cache_size()
    assert right(pipeline(batch, key), loss, gradients)
    assert right(pipeline(batch, key, other.rows()), loss, gradients)
    assert pipeline.step._cache_size() == max(compiled, 1)


def test_a_wrong_slot_cannot_go_unnoticed(small):
    """Tables with one wrong entry: what the machine of labels refuses comes out non-finite or wrong, the rest right."""
    schedule, pipeline, batch, key, loss, gradients = small
    program, table = pipeline.program, pipeline.program.table
    rng = np.random.default_rng(0)
    verdicts = []
    for _ in range(60):
        wrong = _one_wrong_entry(program, rng)
        try:
            execute(wrong, schedule.stages, schedule.ranks)
            good = True
        except WrongValue:
            good = False
        mutant = copy.copy(program)
        mutant.table = wrong
        result = pipeline(batch, key, mutant.rows())
        assert right(result, loss, gradients) == good
        verdicts.append("right" if good else "wrong" if np.isfinite(result[0]) else "non-finite")
    assert set(verdicts) == {"right", "wrong", "non-finite"}
    assert right(pipeline(batch, key), loss, gradients) and program.table is table


def _one_wrong_entry(program: Program, rng: np.random.Generator):
    """The program's table with another slot in one place.

    Of the lifetimes only those whose values are read wherever the machine of labels says: the first and the last
    block leave nothing for some actions, and few residuals are read by both I and W.
    """
    table = program.table
    lives = [program.lifetimes["layer", start, end] for start, end in ((Kind.F, Kind.I), (Kind.I, Kind.W))]
    columns = {
        "read": (table.read, table.inbox_slots + 1),
        **{offset: (column, table.inbox_slots + 1) for offset, column in enumerate(table.receive)},
        **{life: (table.slots[life], table.counts[life]) for life in lives},
    }
    name = list(columns)[rng.integers(len(columns))]
    column, size = columns[name]
    wrong = column.copy()
    where = tuple(rng.integers(column.shape))
    wrong[where] = (wrong[where] + rng.integers(1, size)) % size
    if name == "read":
        return dataclasses.replace(table, read=wrong)
    if name in lives:
        return dataclasses.replace(table, slots=table.slots | {name: wrong})
    receive = tuple(wrong if offset == name else column for offset, column in enumerate(table.receive))
    return dataclasses.replace(table, receive=receive)


# --- Size ---------------------------------------------------------------------------------------------------------


def test_size_does_not_grow_with_microbatches():
    decoder, params, *_ = reference(4)
    memory, instructions, text = [], [], []
    for microbatches in (8, 64):
        schedule = split_backward(make("1f1b", ranks=4, microbatches=microbatches))
        pipeline = Pipeline(Program(schedule, 4, Remat("none")), (4, 1, 1, 1), decoder, params)
        lowered = pipeline.step.lower(*pipeline.arguments(random_batch(20 * microbatches, LENGTH, VOCAB), None))
        compiled = lowered.compile()
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
        instructions.append(len(re.findall("^ .* = ", compiled.as_text(), re.MULTILINE)))
        text.append(len(lowered.as_text()))
    assert memory[1] <= 1.05 * memory[0]
    assert instructions[1] <= 1.02 * instructions[0] and instructions[0] > 100
    assert text[1] <= 1.02 * text[0]


# --- What the head gives besides the loss -------------------------------------------------------------------------


def with_log_probs(decoder):
    """The decoder's blocks, with a head that gives every target's log-probability too."""

    def log_probs(shared, x, context):
        logits = decoder.logits(shared, x)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), context.batch.targets[..., None], -1)[..., 0]

    def last(shared, x, context):
        return decoder.head(shared, x, context), {"log_probs": log_probs(shared, x, context)}

    return PipelineModel(decoder.prepare, decoder.embed, decoder.layer, last, has_aux=True)


AUX_CASES = """
schedule mesh microbatches layers remat options
1f1b 2x2x1x1 3 3 full
zbv 2x1x2x1 3 4 none scan
interleaved_1f1b 2x1x1x2 6 5 none fused
chimera 2x1x1x1 6 4 none
gpipe 1x2x1x2 3 2 full
"""


@pytest.mark.parametrize("case", parse(AUX_CASES), ids=str)
def test_aux_is_collected_with_gradients_and_without(case):
    decoder, params, batch, key, want_loss, want = reference(case.layers)
    model, remat = with_log_probs(decoder), Remat.parse(case.remat, SAVEABLE_NAMES)
    options = dict(unroll="scan" not in case.options, poison=True)
    context = decoder.prepare(batch, key)
    want_aux = model.last(params["shared"], decoder.hidden(params, context)[0], context)[1]["log_probs"]

    program = Program(case.make_schedule(), case.layers, remat, **options)
    pipeline = Pipeline(program, case.mesh, decoder, params, model=model)
    (loss, aux), gradients = pipeline.step(*pipeline.arguments(batch, key))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    gradients = {"shared": gradients["shared"], "layers": program.layout.to_layers(gradients["layers"])}
    assert all(error <= 1e-4 for error in errors(gradients, want).values())

    forwards = Program(forward_only(case.make_schedule()), case.layers, remat, **options)
    alone = Pipeline(forwards, case.mesh, decoder, params, model=model, has_backward=False)
    arguments = alone.arguments(batch, key)
    loss, again = alone.step(*arguments[:2], *arguments[3:])
    np.testing.assert_allclose(loss / batch.weights.sum(), want_loss, rtol=1e-5)
    for got in (aux, again):
        np.testing.assert_allclose(got["log_probs"].reshape(want_aux.shape), want_aux, atol=2e-5)

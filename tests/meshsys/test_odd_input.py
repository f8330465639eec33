"""Odd input that is right, through the real command line: it is planned without a word, and at the edges it trains."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from meshsys.cli import main
from tests.meshsys.user_files import GOOD, TEXT, TWO_RANKS, content, write


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.learning_rate=1e-3"],
        ["train.learning_rate=1E-3", "train.weight_decay=.5", "train.gradient_clip=1."],
        ["train.steps=+5"],
        ["train.steps=5 # five"],
        [" train.steps =5"],
        ["train={steps: 5, warmup_steps: 9}"],
        ['train={"steps": 5}'],
        ["mesh.topology=4", "mesh.axes={pipe: 2}"],
        ["mesh.topology=2x2x2", "mesh={axes: {tensor: 2}, topology: '2'}"],
        ["mesh.topology=v5e:2x4", "mesh.axes.pipe=4"],
        ["mesh.topology=1x1x1x1"],
        ["run.name='quoted'"],
        ["run.name=12"],
        ["run.name=true_story"],
        ["run.dir=null"],
        ["run.dir=a=b"],
        ["run.dir='  '"],
        ["run.dir=~nobody-here/a"],
        ["data.source=./folder/../text.txt"],
        ["data.source=*.txt"],
        ["data.source=."],
        ["pipeline.chunks="],
        ["pipeline.chunks=1"],
        ["pipeline.schedule=interleaved_1f1b", "pipeline.chunks=1"],
        ["pipeline.remat=names:context,context"],
        ["model.kv_heads=1", "model.dropout=0", "model.rope_theta=10000"],
        ["model.vocab_size=264"],
        ["model.layers=1"],
        ["train.steps=5", "train.steps=6"],
        ["pipeline.split_backward=False"],
        ["--json"],
    ],
    ids=" ".join,
)
def test_odd_overrides(capsys, folder, overrides):
    assert main(["plan", "good.yaml", *overrides]) == 0
    out, err = capsys.readouterr()
    assert out and err == ""


@pytest.mark.parametrize(
    "held",
    [
        GOOD.replace("\n", "\r\n"),
        "\ufeff" + GOOD,
        "---\n" + GOOD + "...\n",
        "# comment\n\n" + GOOD + "\n# end",
        GOOD.removesuffix("\n"),
        GOOD.replace("layers: 4", "layers: &four 4").replace("steps: 2", "steps: *four"),
        json.dumps({"run": {"name": "tiny"}, "data": {"source": "text.txt"}}),
        "run:\n  name: >-\n    tiny\ndata:\n  source: |-\n    text.txt\n",
    ],
    ids=range(8),
)
def test_odd_files(capsys, folder, held):
    write("my config é.yml", held)
    assert main(["plan", "./folder/../my config é.yml"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "held",
    [
        TWO_RANKS.replace("\n", "\r\n"),
        "\ufeff" + TWO_RANKS,
        TWO_RANKS.replace(",", " , ").replace("\n", "\n\n"),
        TWO_RANKS.replace("0F0,", ",,0F0,,"),
        TWO_RANKS.replace("0F0", '"0F0"').removesuffix("\n"),
        TWO_RANKS.replace("1I0,1W0,1F1", "1I0,(1F1;1W0)OVERLAP_F_B"),
        "0F0,0F1,0B0,0B1\n1F0,1I0,1W0,1F1,1B1\n",
    ],
    ids=range(7),
)
def test_odd_csv(capsys, folder, held):
    write("my schedule é.csv", held)
    two = ["mesh.topology=2", "mesh.axes.pipe=2", "pipeline.microbatches=2"]
    assert main(["plan", "good.yaml", *two, "pipeline.schedule=csv:folder/../my schedule é.csv"]) == 0
    assert capsys.readouterr().err == ""


# Edges that train


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory) -> list[float]:
    """The losses of GOOD's two steps."""
    folder = tmp_path_factory.mktemp("one_device")
    (folder / "good.yaml").write_text(GOOD)
    (folder / "text.txt").write_text(TEXT)
    paths = [f"data.source={folder / 'text.txt'}", f"run.dir={folder / 'run'}"]
    assert main(["train", str(folder / "good.yaml"), *paths]) == 0
    return losses(folder / "run")


V_SHAPED = "0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n"

# Layouts of one model, and so of the same losses; layers are 4 and sequences 8.
LAYOUTS = {
    "fewer microbatches than ranks": ["mesh.topology=4", "mesh.axes.pipe=4", "pipeline.microbatches=2"],
    "one microbatch": ["mesh.topology=4", "mesh.axes.pipe=4", "pipeline.schedule=zb_h1"],
    "three ranks, four microbatches": [
        "mesh.topology=3",
        "mesh.axes.pipe=3",
        "pipeline={schedule: zb_h1, microbatches: 4}",
    ],
    "more stages than layers": [
        "mesh.topology=2",
        "mesh.axes.pipe=2",
        "pipeline={schedule: interleaved_1f1b, chunks: 3, microbatches: 4}",
    ],
    "part of a torus": ["mesh.topology=2x2x2", "mesh.axes={pipe: 2, tensor: 2}", "pipeline.microbatches=2"],
    "tensor alone": ["mesh.topology=2", "mesh.axes.tensor=2"],
    "V-shaped": ["mesh.topology=2", "mesh.axes.pipe=2", "pipeline={schedule: 'csv:v.csv', microbatches: 2}"],
    "full backwards": ["mesh.topology=2", "mesh.axes.pipe=2", "pipeline={microbatches: 2, split_backward: false}"],
    "offload": ["mesh.topology=2", "mesh.axes.pipe=2", "pipeline={remat: 'offload:context,mlpwi_0', microbatches: 2}"],
    "fsdp, tick by tick": [
        "mesh.topology=2x2",
        "mesh.axes={pipe: 2, fsdp: 2}",
        "pipeline={fsdp_gather: tick, microbatches: 2}",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_train_alike(folder, one_device, overrides):
    write("v.csv", V_SHAPED)
    assert main(["train", "good.yaml", *overrides]) == 0
    assert losses(folder / "runs" / "tiny") == pytest.approx(one_device, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["model.layers=2", "mesh.topology=4", "mesh.axes.pipe=4", "pipeline.microbatches=2"],
        ["model.layers=1"],
        ["model.tie_embeddings=true", "mesh.topology=2", "mesh.axes.pipe=2", "pipeline.microbatches=4"],
        ["model.dtype=bfloat16", "mesh.topology=2", "mesh.axes.pipe=2", "pipeline.microbatches=4"],
        ["model.dtype=bfloat16", "model.param_dtype=bfloat16", "pipeline.remat=full"],
        ["model.kv_heads=1", "mesh.topology=2", "mesh.axes.tensor=2"],
        ["data.batch_size=1", "data.sequence_length=2"],
        ["model.d_model=2", "model.heads=1", "model.d_ff=1", "model.vocab_size=1000"],
        ["train.steps=1", "train.warmup_steps=1000", "train.gradient_clip=0", "checkpoint.every=1"],
    ],
    ids=" ".join,
)
def test_edges_train(folder, overrides):
    assert main(["train", "good.yaml", *overrides]) == 0
    assert all(math.isfinite(loss) for loss in losses(folder / "runs" / "tiny"))


@pytest.mark.slow
def test_odd_run_dirs(folder, one_device, capsys):
    """A folder with spaces and letters of all kinds, through `..` and a link; then the same run goes on."""
    (folder / "link").symlink_to("folder")
    command = ["train", "good.yaml", "run.dir=link/../läufe 1/日本 (x)", "run.name=7"]
    assert main(command) == 0
    run = folder / "läufe 1" / "日本 (x)"
    assert losses(run) == one_device
    assert main([*command, "train.steps=3"]) == 0
    assert len(losses(run)) == 3 and (run / "report.html").is_file()
    assert not (folder / "runs").exists()
    capsys.readouterr()

    for option, value in (("model.d_ff", 64), ("data.sequence_length", 8), ("run.seed", 5), ("data.source", "two.csv")):
        before = {path: path.read_bytes() for path in content(run) if path.is_file()}
        assert main([*command, "train.steps=4", f"{option}={value}"]) == 2
        out, err = capsys.readouterr()
        assert err.startswith(f"meshsys: error: {option}={value}") and err.count("\n") == 1 and ";" in err
        assert {path: path.read_bytes() for path in content(run) if path.is_file()} == before

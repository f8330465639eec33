"""Configurations: what is read, what is refused, and how the refusal reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from meshsys import yaml_core
from meshsys.config import Config, load_config, to_yaml
from meshsys.errors import ConfigError
from models.config import ModelConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def message(path, overrides=()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    assert text == text.strip()
    assert "pydantic" not in text
    return text


# What is read


def test_defaults(write):
    config = load_config(write("run: {name: tiny}"))
    assert config.model == ModelConfig()
    assert config.mesh.axes.model_dump() == dict(pipe=1, data=1, fsdp=1, tensor=1, expert=1, context=1)
    assert (config.pipeline.schedule, config.pipeline.chunks, config.pipeline.remat) == ("1f1b", None, "none")
    assert (config.train.steps, config.train.learning_rate) == (100, 3e-4)
    assert config.run_dir == Path("runs/tiny")


def test_run_dir_follows_run_dir(write):
    assert load_config(write("run: {name: tiny, dir: /data/here}")).run_dir == Path("/data/here")


def test_config_is_frozen(write):
    config = load_config(write("run: {name: tiny}"))
    with pytest.raises(ValidationError):
        config.train.steps = 3  # type: ignore[misc]
    assert hash(config) == hash(load_config(write("run: {name: tiny}")))


def test_a_model_may_be_given_as_its_record():
    assert Config(run={"name": "tiny"}, model=ModelConfig(layers=2)).model.layers == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.learning_rate=3e-4", "train", "learning_rate", 3e-4),
        ("train.learning_rate=1", "train", "learning_rate", 1.0),
        ("train.steps=7", "train", "steps", 7),
        ("train.skip_nonfinite=true", "train", "skip_nonfinite", True),
        ("pipeline.chunks=null", "pipeline", "chunks", None),
        ("pipeline.chunks=2", "pipeline", "chunks", 2),
        ("pipeline.remat=names:attention,mlp.up", "pipeline", "remat", "names:attention,mlp.up"),
        ("pipeline.schedule=csv:/tmp/a=b.csv", "pipeline", "schedule", "csv:/tmp/a=b.csv"),
        ("mesh.topology=8", "mesh", "topology", "8"),
        ("mesh.topology=v5p:4x4x4", "mesh", "topology", "v5p:4x4x4"),
        ("run.name=17", "run", "name", "17"),
        ("run.name=007", "run", "name", "007"),
        ("run.name=2024-01-01", "run", "name", "2024-01-01"),
        ("run.name=on", "run", "name", "on"),
        ("run.name='3e-4'", "run", "name", "3e-4"),
        ("data.source=*.txt", "data", "source", "*.txt"),
        ("data.source=corpus/**/*.py", "data", "source", "corpus/**/*.py"),
        ("model.dtype=bfloat16", "model", "dtype", "bfloat16"),
        ("model.rope_theta=500000", "model", "rope_theta", 500000.0),
        ("mesh.axes={pipe: 4, data: 2}", "mesh", "axes", None),
    ],
)
def test_overrides_and_round_trip(write, override, section, key, value):
    config = load_config(write("run: {name: tiny}"), [override])
    got = getattr(getattr(config, section), key)
    if key == "axes":
        assert (got.pipe, got.data, got.tensor) == (4, 2, 1)
    else:
        assert got == value and type(got) is type(value)
    assert load_config(write(to_yaml(config))) == config


def test_overrides_reach_nested_keys_and_the_last_one_counts(write):
    path = write("run: {name: tiny}\nmesh: {axes: {pipe: 2, data: 2}}")
    axes = load_config(path, ["mesh.axes.pipe=4", "mesh.axes.pipe=8"]).mesh.axes
    assert (axes.pipe, axes.data) == (8, 2)


TRAINING = [path for path in sorted(CONFIGS.glob("*.yaml")) if not path.stem.startswith(("cluster_", "jobs_"))]


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_shipped_configs(path, write):
    config = load_config(path)
    assert config.run.name == path.stem
    assert path.read_text(encoding="utf-8").startswith("# ")
    assert load_config(write(to_yaml(config))) == config


@pytest.mark.parametrize(
    "value", ["3e-4", "1.0", "12", "-1", "true", "null", "~", "", "on", "007", ".inf", "a: b", "é"]
)
def test_text_survives_the_round_trip(value):
    assert yaml_core.load(yaml_core.dump({"key": value})) == {"key": value}


# What is refused: (file, overrides, what the message must hold)

NAMED = "run: {name: tiny}\n"

BROKEN = {
    # types
    "text for integer": (NAMED + 'model: {layers: "4"}', [], "model.layers='4' is not an integer"),
    "word for integer": (NAMED + "model: {layers: four}", [], "model.layers=four is not an integer"),
    "float for integer": (NAMED + "model: {layers: 2.5}", [], "model.layers=2.5 is not an integer"),
    "whole float for integer": (NAMED + "train: {steps: 1e3}", [], "train.steps=1000.0 is not an integer"),
    "bool for integer": (NAMED + "model: {layers: true}", [], "model.layers=true is not an integer"),
    "bool for float": (NAMED + "train: {learning_rate: yes}", [], "train.learning_rate=yes is not a number"),
    "list for float": (NAMED + "train: {learning_rate: [1]}", [], "train.learning_rate=[1] is not a number"),
    "integer for bool": (NAMED + "model: {tie_embeddings: 1}", [], "model.tie_embeddings=1 is neither true nor false"),
    "yes for bool": (NAMED, ["train.skip_nonfinite=yes"], "train.skip_nonfinite=yes is neither true nor false"),
    "number for text": (NAMED + "data: {source: 1.5}", [], "data.source=1.5 is not text"),
    "list for text": (NAMED, ["data.tokenizer=[a, b]"], "data.tokenizer=[a, b] is not text"),
    "null for integer": (NAMED + "train: {steps: }", [], "train.steps=null is not an integer"),
    "text for null": (NAMED, ["pipeline.chunks=auto"], "pipeline.chunks=auto is not an integer"),
    "mapping for value": (NAMED + "train: {steps: {a: 1}}", [], "train.steps={a: 1} is not an integer"),
    "not a number": (NAMED, ["train.learning_rate=.nan"], "train.learning_rate=.nan is not a finite number"),
    "infinity": (NAMED, ["model.rope_theta=.inf"], "model.rope_theta=.inf is not a finite number"),
    "unparsable value": (NAMED, ["train.steps=["], "train.steps='[' is not an integer"),
    # ranges
    "no steps": (NAMED, ["train.steps=0"], "train.steps=0 must be at least 1"),
    "huge steps": (NAMED, ["train.steps=99999999999"], "train.steps=99999999999 must be at most 2147483647"),
    "no batch": (NAMED, ["data.batch_size=0"], "data.batch_size=0 must be at least 1"),
    "short sequence": (NAMED, ["data.sequence_length=1"], "data.sequence_length=1 must be at least 2"),
    "no learning rate": (NAMED, ["train.learning_rate=0"], "train.learning_rate=0 must be above 0"),
    "negative warm-up": (NAMED, ["train.warmup_steps=-1"], "train.warmup_steps=-1 must be at least 0"),
    "negative decay": (NAMED, ["train.weight_decay=-0.1"], "train.weight_decay=-0.1 must be at least 0"),
    "negative clip": (NAMED, ["train.gradient_clip=-1.0"], "train.gradient_clip=-1.0 must be at least 0"),
    "fraction above 1": (
        NAMED,
        ["train.final_learning_rate_fraction=2"],
        "train.final_learning_rate_fraction=2 must be at most 1",
    ),
    "no microbatch": (NAMED, ["pipeline.microbatches=0"], "pipeline.microbatches=0 must be at least 1"),
    "no chunk": (NAMED, ["pipeline.chunks=0"], "pipeline.chunks=0 must be at least 1"),
    "empty axis": (NAMED, ["mesh.axes.pipe=0"], "mesh.axes.pipe=0 must be at least 1"),
    "negative checkpoint": (NAMED, ["checkpoint.every=-1"], "checkpoint.every=-1 must be at least 0"),
    "keep nothing": (NAMED, ["checkpoint.keep=0"], "checkpoint.keep=0 must be at least 1"),
    "negative seed": (NAMED, ["run.seed=-1"], "run.seed=-1 must be at least 0"),
    "empty source": (NAMED, ["data.source=''"], "data.source='' is empty"),
    # choices and forms
    "dtype": (NAMED, ["model.dtype=fp32"], "model.dtype=fp32 is not a choice; use float32 or bfloat16"),
    "gather": (NAMED, ["pipeline.fsdp_gather=never"], "pipeline.fsdp_gather=never is not a choice; use step or tick"),
    "remat": (NAMED, ["pipeline.remat=ful"], "pipeline.remat=ful is not a policy; use none, full, dots, names:a,b"),
    "remat without names": (NAMED, ["pipeline.remat='names:'"], "pipeline.remat='names:' is not a policy"),
    "remat with a gap": (NAMED, ["pipeline.remat=offload:a,,b"], "pipeline.remat=offload:a,,b is not a policy"),
    "topology word": (NAMED, ["mesh.topology=cube"], "mesh.topology=cube is not a torus; write sizes joined by `x`"),
    "topology zero": (NAMED, ["mesh.topology=2x0"], "mesh.topology=2x0 is not a torus"),
    "topology stars": (NAMED, ["mesh.topology=2*2"], "mesh.topology=2*2 is not a torus"),
    "folder": (NAMED, ["run.name=a/b"], "run.name=a/b is not a folder name"),
    "parent folder": (NAMED, ["run.name=.."], "run.name=.. is not a folder name"),
    "line break": (NAMED, ['run.name="a\\nb"'], "run.name='a\\nb' is not a folder name"),
    # the model's own rules
    "heads": (NAMED, ["model.heads=3"], "model.heads=3 does not divide model.d_model=128"),
    "kv heads": (NAMED, ["model.kv_heads=3"], "model.kv_heads=3 does not divide model.heads=4"),
    "layers": (NAMED, ["model.layers=0"], "model.layers=0 must be at least 1"),
    "dropout": (NAMED, ["model.dropout=1.0"], "model.dropout=1.0 must be at least 0 and below 1"),
    # names
    "typo": (NAMED + "train: {stepz: 5}", [], "train.stepz=5 is not an option; did you mean train.steps?"),
    "model typo": (NAMED + "model: {layer: 5}", [], "model.layer=5 is not an option; did you mean model.layers?"),
    "axis typo": (NAMED, ["mesh.axes.tensr=2"], "mesh.axes.tensr=2 is not an option; did you mean mesh.axes.tensor?"),
    "section typo": (NAMED + "trian: {steps: 5}", [], "trian={steps: 5} is not an option; did you mean train?"),
    "section typo in override": (NAMED, ["trian.steps=5"], "trian.steps=5 is not an option; did you mean train.steps?"),
    "another section's key": (NAMED, ["train.batch_size=5"], "did you mean data.batch_size?"),
    "key without a section": ("name: tiny\nsteps: 5", [], "name=tiny is not an option; did you mean run.name?"),
    "axis beside axes": (NAMED + "mesh: {pipe: 4}", [], "mesh.pipe=4 is not an option; did you mean mesh.axes.pipe?"),
    "no such thing": (
        NAMED,
        ["checkpoint.color=red"],
        "checkpoint.color=red is not an option; checkpoint has every, keep",
    ),
    "below a value": (NAMED, ["train.steps.max=5"], "train.steps.max=5 is not an option; train.steps holds a single"),
    "empty name": (NAMED, ["=5"], "is not an option"),
    "name missing": ("train: {steps: 5}", [], "run.name is missing"),
    "name missing in its section": ("run: {seed: 5}", [], "run.name is missing"),
    "typo before what it causes": ("run: {nme: tiny}", [], "run.nme=tiny is not an option; did you mean run.name?"),
    # shape
    "null section": (NAMED + "train:", [], "train=null is not a mapping; give it keys (steps, learning_rate,"),
    "null model": (NAMED + "model:", [], "model=null is not a mapping; give it keys (layers, d_model,"),
    "null section, overridden": (NAMED + "train:", ["train.steps=5"], "train=null is not a mapping"),
    "list for a section": (NAMED + "mesh: {axes: [4, 2]}", [], "mesh.axes=[4, 2] is not a mapping"),
    "word for the model": (NAMED, ["model=small"], "model=small is not a mapping"),
    "empty file": ("", [], "config.yaml is empty; write a mapping of sections: run, model,"),
    "list at the top": ("- run", [], "config.yaml holds [run]; write a mapping"),
    "duplicate key": (
        NAMED + "train:\n  steps: 5\n  steps: 6",
        [],
        "line 4 is not valid YAML: the key `steps` is in line 3",
    ),
    "duplicate section": (NAMED + "train: {}\ntrain: {}", [], "line 3 is not valid YAML: the key `train` is in line 2"),
    "key that is no text": (NAMED + "1: 2", [], "line 2 is not valid YAML: the key `1` is not text"),
    "key that is a list": (NAMED + "? [a]\n: 2", [], "line 2 is not valid YAML: the key `['a']` is not text"),
    "open bracket": (NAMED + "train: {steps: 5", [], "line 2 is not valid YAML"),
    "tab": (NAMED + "train:\n\tsteps: 5", [], "line 3 is not valid YAML"),
    "unknown alias": (NAMED + "train: *there", [], "line 2 is not valid YAML"),
    "tag of a Python object": (NAMED + "train: !!python/object:os.system {}", [], "line 2 is not valid YAML"),
    "two documents": (NAMED + "---\n" + NAMED, [], "line 2 is not valid YAML"),
    "wrong tag": (NAMED + "train: {steps: !!int five}", [], "is not valid YAML"),
    "override without =": (NAMED, ["train.steps"], "the override `train.steps` has no `=`"),
}


@pytest.mark.parametrize(("text", "overrides", "wanted"), BROKEN.values(), ids=BROKEN)
def test_broken(write, text, overrides, wanted):
    assert wanted in message(write(text), overrides)


def test_further_problems_are_counted(write):
    assert message(write(NAMED + "train: {steps: 0}"), ["checkpoint.keep=0", "run.seed=-1"]).endswith(
        "(and 2 more problems)"
    )
    assert message(write(NAMED + "train: {steps: 0}"), ["checkpoint.keep=0"]).endswith("(and 1 more problem)")


def test_long_values_are_cut(write):
    assert len(message(write(NAMED), [f"train.steps={'x' * 1000}"])) < 120


def test_missing_file_names_its_neighbour(write):
    path = write(NAMED)
    near = path.with_name("confg.yaml")
    assert message(near) == f"the configuration file {near} does not exist; did you mean {path}?"
    assert "give the path of a YAML file" in message(path.parent / "nowhere" / "a.yaml")


def test_folder_for_a_file(tmp_path):
    assert "cannot be read: Is a directory" in message(tmp_path)


def test_file_that_is_not_text(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"run: {name: \xff}")
    assert "is not valid YAML" in message(path)

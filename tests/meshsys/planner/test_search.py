"""The search for the best configuration, and the estimate that it goes by."""

from __future__ import annotations

import json

import pytest

from meshsys.assemble import assemble
from meshsys.cli import main
from meshsys.config import Config, load_config, to_yaml
from meshsys.errors import ConfigError
from meshsys.planner import config_of, describe_search, plan_of, search
from meshsys.planner.estimate import estimate
from meshsys.torus.generations import GENERATIONS


def config(topology: str = "v5p:2x2x1", model: dict | None = None, batch_size: int = 16, **pipeline) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "searched"},
            "model": {"layers": 4, "d_model": 256, "heads": 4, "d_ff": 512} | (model or {}),
            "data": {"sequence_length": 128, "batch_size": batch_size},
            "mesh": {"topology": topology},
            "pipeline": pipeline,
        }
    )


@pytest.fixture(scope="module", autouse=True)
def few():
    """A short table will do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshsys.planner.choose._ENOUGH", 4)
        patch.setattr("meshsys.planner.choose._MOST_TRIED", 6)
        yield


@pytest.fixture(scope="module")
def found(few):
    return search(config())


def test_what_fits_comes_first_and_the_fastest_of_it(found):
    fitting = [choice for choice in found.choices if choice.fits]
    assert found.choices[: len(fitting)] == tuple(sorted(fitting, key=lambda choice: choice.step_seconds))
    limit = GENERATIONS["v5p"].chip.hbm
    assert found.limit == int(limit)
    assert all(choice.fits == (choice.bytes <= 0.9 * limit) for choice in found.choices)
    assert all(choice.data * choice.fsdp * choice.tensor * choice.pipe == 4 for choice in found.choices)
    assert len({tuple(vars(choice).items()) for choice in found.choices}) == len(found.choices) <= found.candidates


def test_a_row_is_the_plan_of_its_configuration(found):
    for choice in (found.choices[0], found.choices[-1]):
        plan = plan_of(assemble(config_of(config(), choice)))
        assert plan.memory.total == choice.bytes
        assert plan.estimate.step_seconds == choice.step_seconds
        assert plan.estimate.bubble_fraction == choice.bubble_fraction


def test_the_best_is_written_and_planned(tmp_path, capsys):
    path, best = tmp_path / "asked.yaml", tmp_path / "best.yaml"
    path.write_text(to_yaml(config("2")))
    assert main(["plan", str(path), "--search", "--topology", "v5p:2x2x1", "--json", "--out", str(best)]) == 0
    out, err = capsys.readouterr()
    table = json.loads(out)
    assert str(best) in err and err.count("\n") == 1
    chosen = load_config(best)
    assert chosen.mesh.topology == "v5p:2x2x1"
    for axis in ("data", "fsdp", "tensor", "pipe"):
        assert getattr(chosen.mesh.axes, axis) == table["choices"][0][axis]
    assert main(["plan", str(best)]) == 0
    assert "Time of a step" in capsys.readouterr().out


@pytest.mark.slow
def test_less_memory_takes_more_chips_or_more_remat():
    """7 billion parameters with their moments fill 16 chips of 16 GiB beyond what remat could save of activations."""
    large = {"layers": 32, "d_model": 4096, "heads": 32, "d_ff": 11008, "dtype": "bfloat16"}
    table = search(config("v5e:4x4", large, 64))
    best = table.choices[0]
    assert best.fits and best.data == 1
    assert "yes" in describe_search(table)


def test_nothing_fits(tmp_path, capsys):
    path = tmp_path / "large.yaml"
    path.write_text(to_yaml(config("v5e:1x1", {"d_model": 4096, "heads": 32, "d_ff": 16384})))
    assert main(["plan", str(path), "--search"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "nothing fits" in err and "--topology" in err


@pytest.mark.parametrize(
    ("asked", "words"),
    [(config("2x2"), "names no TPU generation.*v5p:4x4x4"), (config("v5p:4x4x4", batch_size=3), "data.batch_size=3")],
)
def test_what_cannot_be_searched(asked, words):
    with pytest.raises(ConfigError, match=words):
        search(asked)


def test_out_needs_search(tmp_path, capsys):
    path = tmp_path / "one.yaml"
    path.write_text(to_yaml(config()))
    assert main(["plan", str(path), "--out", "x.yaml"]) == 2
    assert "--search" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("nowhere/best.yaml", "cannot be written: No such file or directory; give"),
        ("one.yaml/best.yaml", "cannot be written: Not a directory; give"),
        (".", "is a folder; give"),
        ("", "is a folder; give"),
        ("a" * 300, "cannot be written: File name too long; give"),
        ("/dev/null", "is no regular file; give"),
    ],
)
def test_an_out_that_cannot_be_written(monkeypatch, tmp_path, capsys, out, words):
    """Is refused before the search."""
    monkeypatch.setattr("meshsys.planner.search", lambda config: pytest.fail("it searched"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text(to_yaml(config()))
    assert main(["plan", "one.yaml", "--search", "--out", out]) == 2
    printed, err = capsys.readouterr()
    assert printed == "" and err.startswith(f"meshsys: error: --out={out} {words}") and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["one.yaml"]


# --- The estimate ---------------------------------------------------------------------------------------------


def on_mesh(schedule: str, microbatches: int, **axes: int):
    asked = config("v5p:4x4x4", {"layers": 8, "dtype": "bfloat16"}, batch_size=64)
    mesh = asked.mesh.model_copy(update={"axes": asked.mesh.axes.model_copy(update=axes)})
    pipeline = asked.pipeline.model_copy(update={"schedule": schedule, "microbatches": microbatches})
    return estimate(assemble(asked.model_copy(update={"mesh": mesh, "pipeline": pipeline})))


def test_the_estimate_adds_up():
    time = on_mesh("1f1b", 8, pipe=4, data=2)
    assert time.step_seconds == pytest.approx(time.ticks_seconds + time.send_seconds + time.around_seconds)
    assert 0 < time.bubble_fraction < 1 and 0 < time.mfu < 1
    assert on_mesh("1f1b", 8, data=2).send_seconds == 0 == on_mesh("1f1b", 8, data=2).bubble_fraction


def test_more_microbatches_make_less_bubble_and_zero_bubble_less():
    few, many, zero = on_mesh("1f1b", 8, pipe=4), on_mesh("1f1b", 32, pipe=4), on_mesh("zb_h1", 8, pipe=4)
    assert many.bubble_fraction < few.bubble_fraction
    assert zero.bubble_fraction < few.bubble_fraction


def test_no_peaks_no_estimate():
    assert estimate(assemble(config("2x2"))) is None

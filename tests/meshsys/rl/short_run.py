"""A short run of reinforcement learning, in games of two turns."""

from __future__ import annotations

import json
from pathlib import Path

from meshsys.config import Config
from meshsys.rl.loop import run_rl

OWN = f"python:{Path(__file__).parent / 'own_tasks.py'}"


def run(folder: Path, steps: int, **rl) -> list[dict]:
    """Its records, of a tiny model that is paid for ASCII."""
    (folder / "tasks.jsonl").write_text('{"prompt": "a", "answer": ""}\n{"prompt": "b", "answer": ""}\n')
    config = {
        "run": {"name": "a", "dir": str(folder / "run")},
        "model": {"layers": 1, "d_model": 16, "heads": 2, "d_ff": 16},
        "mesh": {"topology": "2", "axes": {"data": 2}},
        "pipeline": {"microbatches": 1},
        "train": {"learning_rate": 0.03, "gradient_clip": 1.0, "steps": steps},
        "rl": {
            "tasks": [{"source": f"jsonl:{folder / 'tasks.jsonl'}"}],
            "environment": {"kind": f"{OWN}:Ascii", "max_turns": 2, "max_action_tokens": 4},
            "reward_pool": {"workers": 1},
            "prompts_per_step": 2,
            "samples_per_prompt": 8,
            "max_prompt_tokens": 8,
            "max_response_tokens": 16,
            **rl,
        },
    }
    assert run_rl(Config.model_validate(config)) == 0
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]

"""Some responses of every step, kept to be read: samples.jsonl."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from meshsys.files import keep_until
from meshsys.rl.collect import Collected
from meshsys.rl.rollouts import Rollout

__all__ = ["TranscriptWriter"]


class TranscriptWriter:
    """Appends a line for each response that is kept: the first of each group, in turn.

    Lines of steps after `step`, which the run is about to take again, are dropped.

    Args:
        count: responses of a step.
    """

    def __init__(self, folder: Path, step: int, count: int):
        path = folder / "samples.jsonl"
        keep_until(path, step)
        self._file, self._count = path.open("a", encoding="utf-8"), count

    def write(self, step: int, collected: Collected, text: Callable[[Rollout], str]) -> None:
        order = sorted(range(len(collected.rollouts)), key=lambda at: collected.rollouts[at].sample)
        for at in order[: self._count]:
            rollout = collected.rollouts[at]
            line = {
                "step": step,
                "prompt_id": rollout.prompt.id,
                "prompt": rollout.prompt.text,
                "response": text(rollout),
                "answer": rollout.prompt.answer,
                "reward": float(collected.score_N[at]),
                "tokens": len(rollout.tokens),
                "stopped": rollout.has_stopped,
            }
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

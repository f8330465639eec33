"""What rows that have a prompt once save: a policy's update beside one with a row for each response.

    python scripts/bench_shared_prompts.py long|equal|short|all [--json]

8 responses to each of 4 prompts, 8 to a row or each in its own; 4 layers of 256 dimensions, pipe 2 x data 2 fake CPU
devices, 1f1b, remat full. All responses are as long as they may be. The two take turns, and medians are compared.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

# JAX reads these once, when its backend starts.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
# As a script, Python looks beside this file; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax  # noqa: E402
import numpy as np  # noqa: E402

from meshsys.assemble import assemble  # noqa: E402
from meshsys.config import Config  # noqa: E402
from meshsys.mesh import make_mesh  # noqa: E402
from meshsys.rl.objectives import PolicyLoss, PpoClip, TokenFields  # noqa: E402
from meshsys.rl.policy import PolicyBatch  # noqa: E402
from meshsys.rl.prompt import Prompt  # noqa: E402
from meshsys.rl.rollouts import Rollout, RolloutRows, length_of_a_row  # noqa: E402
from meshsys.rl.update import PolicyUpdate, Sampled  # noqa: E402
from models.sampling import SOFTMAX  # noqa: E402
from scripts.bench_table import Row, run  # noqa: E402

PROMPTS, GROUP, ROUNDS = 4, 8, 5


class Way:
    """The update with so many responses to a row."""

    def __init__(self, together: int, prompt: int, response: int):
        rows, length = PROMPTS * GROUP // together, length_of_a_row(prompt, response, together)
        config = Config.model_validate(
            {
                "run": {"name": "bench"},
                "model": {"layers": 4, "d_model": 256, "heads": 4, "d_ff": 768, "vocab_size": 2048},
                "data": {"sequence_length": length, "batch_size": rows},
                "mesh": {"topology": "2x2", "axes": {"pipe": 2, "data": 2}},
                "pipeline": {"schedule": "1f1b", "microbatches": 2, "remat": "full"},
            }
        )
        assembly = assemble(config)
        self._update = PolicyUpdate(assembly, make_mesh(assembly.placement), PolicyLoss(PpoClip(0.2, 0.2)), SOFTMAX)
        random = np.random.default_rng(0)
        log_probs, versions = np.zeros(response, np.float32), np.zeros(response, np.int32)
        rollouts = [
            Rollout(Prompt("bench/0", ""), ids, tokens, log_probs, versions, group, sample, False)
            for group in range(PROMPTS)
            for ids in [random.integers(0, 2048, prompt, np.int32)]
            for sample in range(GROUP)
            for tokens in [random.integers(0, 2048, response, np.int32)]
        ]
        made = RolloutRows(rollouts, rows, length, response, together)
        ones = made.to_rows(np.ones(made.mask_NT.shape))
        fields = TokenFields(made.sequence_ids_RS, None, ones)  # type: ignore[arg-type]
        self._arguments = PolicyBatch(made.batch(), fields), Sampled(ones, made.is_sampled_RS), np.inf
        self._state = self._update.init()
        self.tokens = rows * length
        self()

    def __call__(self) -> float:
        """Seconds of an update."""
        begun = time.perf_counter()
        self._state, *_ = self._update.update(self._state, *self._arguments)
        jax.block_until_ready(self._state)
        return time.perf_counter() - begun


def compare(prompt: int, response: int, at_most: float | None) -> Iterator[Row]:
    ways = {together: Way(together, prompt, response) for together in (1, GROUP)}
    yield Row("tokens of rows, over rows of one response", ways[GROUP].tokens / ways[1].tokens, "x")
    times: dict[int, list[float]] = {together: [] for together in ways}
    for turn in range(ROUNDS):
        for together in list(ways)[:: -1 if turn % 2 else 1]:
            times[together].append(ways[together]())
    alone, shared = (statistics.median(found) for found in times.values())
    yield Row("seconds of an update, rows of one response", alone, "s")
    yield Row("  rows of 8 responses, over that", shared / alone, "x", at_most)


BENCHMARKS = {
    "long": (partial(compare, 512, 64, 0.4), "prompts of 512 tokens, responses of 64"),
    "equal": (partial(compare, 128, 128, 0.8), "prompts and responses of 128 tokens"),
    "short": (partial(compare, 32, 128, None), "prompts of 32 tokens, responses of 128"),
}


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", BENCHMARKS))

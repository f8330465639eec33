"""What the reward pool takes: to start, for a sample of several kinds, and to replace a worker that died.

    python scripts/bench_rewards.py [--workers 2] [--samples 2000] [--rounds 3]

Printed are the medians of the rounds. Rewards of packages are left out where the extra `rl` is not installed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from importlib.util import find_spec

from meshsys.rl.prompt import Prompt
from meshsys.rl.rewards import RewardConfig, RewardPool, RewardPoolConfig
from meshsys.rl.tasks.config import TaskConfig
from meshsys.rl.tasks.registry import open_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    kinds = {"exact_match": [number()], "gsm8k": [reasoning()], "rack": [plan()]}
    if find_spec("reasoning_gym"):
        kinds["reasoning_gym"] = [sum_of_terms()]
    if find_spec("math_verify"):
        kinds["math_verify"] = [fraction(n) for n in range(1, args.samples + 1)]  # it remembers what it has parsed
    for kind, samples in kinds.items():
        starts, rates = [], []
        for _ in range(args.rounds):
            began = time.perf_counter()
            with RewardPool([RewardConfig(kind=kind)], RewardPoolConfig(workers=args.workers)) as pool:
                pool.warm()
                starts.append(time.perf_counter() - began)
                pool.score(samples[:1] * 10 * args.workers)
                scores = pool.score((samples * args.samples)[: args.samples])
                assert scores.total.all() and not scores.failures
                rates.append(args.samples / scores.seconds)
        print(f"{kind:>14}: ready after {statistics.median(starts):.2f} s, {statistics.median(rates):8,.0f} samples/s")
    print(f"{'a crash':>14}: {1e3 * statistics.median(crash(args.rounds)):.1f} ms until the next sample is scored")


def number() -> tuple[Prompt, str]:
    return Prompt("a/0", "6 * 7 =", answer="42"), "42"


def reasoning() -> tuple[Prompt, str]:
    return Prompt("a/0", "6 * 7 =", answer="42"), "It is 6 times 7. " * 30 + "\n#### 42"


def fraction(n: int) -> tuple[Prompt, str]:
    return Prompt("a/0", "1 / 2 =", answer="\\frac{1}{2}"), f"So the answer is $\\boxed{{\\frac{{{n}}}{{{2 * n}}}}}$."


def plan() -> tuple[Prompt, str]:
    from meshsys.rl.environments.rack import Instance, solve

    prompt = open_task(TaskConfig(source="rack", options={"moves": 12}), 0, chat=False)[0]
    moves = solve(*Instance.of(prompt.entry)[:2])
    assert moves is not None
    return prompt, "\n".join(map(str, moves))


def sum_of_terms() -> tuple[Prompt, str]:
    prompt = open_task(TaskConfig(source="reasoning_gym:chain_sum"), 0, chat=False)[0]
    assert prompt.answer is not None
    return prompt, prompt.answer


def crash(rounds: int) -> list[float]:
    """Seconds of a sample that ends its worker and one that needs the next worker."""
    kill = RewardConfig(kind=f"python:{__file__}:die_if_asked")
    with RewardPool([kill], RewardPoolConfig(workers=1)) as pool:
        pool.warm()
        return [pool.score([(number()[0], "die"), (number()[0], "live")]).seconds for _ in range(rounds)]


def die_if_asked(prompt: Prompt, response: str) -> float:
    return os._exit(1) if response == "die" else 1.0


if __name__ == "__main__":
    main()

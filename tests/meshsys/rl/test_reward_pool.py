"""The pool of reward processes: what goes wrong in one sample costs that sample only."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshsys.errors import ConfigError
from meshsys.rl.prompt import Prompt
from meshsys.rl.rewards import RewardConfig, RewardPool, RewardPoolConfig

BAD = f"python:{Path(__file__).with_name('bad_rewards.py')}"
PROMPT = Prompt("task/0", "a question", answer="7")
SECONDS = 2.0

# What each order to `bad_rewards.obey` comes to: the kind of failure, what its message says, and the reward.
ORDERS = {
    "raise no": ("error", "ValueError: no", 0.0),
    "sys_exit": ("error", "SystemExit: 3", 0.0),
    "nan": ("error", "nan", 0.0),
    "text": ("error", "str", 0.0),
    "nothing": ("error", "NoneType", 0.0),
    "huge": ("error", "OverflowError", 0.0),
    "exit 3": ("crash", "exit status 3", 0.0),
    "exit 0": ("crash", "exit status 0", 0.0),
    "kill": ("crash", "signal 9", 0.0),
    "segfault": ("crash", "signal 11", 0.0),
    "hang": ("timeout", "2 s", 0.0),
    "print": (None, "", 2.0),
    "a plain response": (None, "", 16.0),
}


@pytest.fixture(scope="module")
def pool():
    jnp.ones(3).block_until_ready()  # JAX and its threads are there
    with RewardPool([RewardConfig(kind=f"{BAD}:obey")], RewardPoolConfig(workers=2, seconds=SECONDS)) as made:
        made.warm()
        yield made


@pytest.mark.parametrize("order", ORDERS)
def test_what_goes_wrong_costs_one_sample(pool: RewardPool, order: str):
    kind, message, reward = ORDERS[order]
    scores = pool.score([(PROMPT, "before"), (PROMPT, order), (PROMPT, "after it")])
    assert scores.total.tolist() == [6.0, reward, 8.0]
    assert [(failure.sample, failure.kind) for failure in scores.failures] == ([(1, kind)] if kind else [])
    assert all(message in failure.message for failure in scores.failures)
    counts = {"error": scores.errors, "timeout": scores.timeouts, "crash": scores.crashes}
    assert counts == {name: int(name == kind) for name in counts}


def test_ten_bad_ones_in_a_hundred(pool: RewardPool):
    bad = ["exit 1", "kill", "raise x", "nan", "segfault", "exit 2", "text", "sleep 9", "nothing", "sleep 9"]
    responses = ["x" * number for number in range(100)]
    for place, order in enumerate(bad):
        responses[10 * place + place] = order
    expected = [0.0 if response in bad else len(response) for response in responses]
    scores = pool.score([(PROMPT, response) for response in responses])
    assert scores.total.tolist() == expected
    assert (scores.errors, scores.crashes, scores.timeouts) == (4, 4, 2)
    assert [failure.sample for failure in scores.failures] == [11 * place for place in range(10)]
    assert scores.seconds < 9  # which each of the slow ones alone would take


def test_memory_is_limited(pool: RewardPool):
    if sys.platform != "linux":
        pytest.skip("memory is limited on Linux")
    scores = pool.score([(PROMPT, "allocate"), (PROMPT, "fine")])
    assert scores.total.tolist() == [0.0, 4.0] and "MemoryError" in scores.failures[0].message


def test_a_worker_that_is_full_is_replaced():
    """Memory that samples leave held costs the one that finds none, and no later one."""
    if sys.platform != "linux":
        pytest.skip("memory is limited on Linux")
    config = RewardPoolConfig(workers=1, memory_gib=0.32)
    with RewardPool([RewardConfig(kind=f"{BAD}:obey")], config) as pool:
        scores = pool.score([(PROMPT, "keep")] * 6)
    assert scores.total.tolist() == [4.0, 4.0, 0.0, 4.0, 4.0, 0.0] and scores.errors == 2


def test_what_a_sample_leaves_behind_is_no_other_samples(pool: RewardPool):
    """A timer that goes off later, and a worker that dies with nothing to do."""
    scores = pool.score([(PROMPT, "alarm")] * 4 + [(PROMPT, "sleep 0.4")] * 4)
    assert scores.failures == ()
    workers = set(_children(pool._process.pid))
    pool.score([(PROMPT, "later 0.3")])
    assert _soon(lambda: workers != set(_children(pool._process.pid)))
    assert pool.score([(PROMPT, "a sample")] * 4).failures == ()


def test_a_run_that_is_told_to_end_has_rewards_until_it_does(pool: RewardPool):
    assert pool.score([(PROMPT, "terminate"), (PROMPT, "and on")]).total.tolist() == [9.0, 6.0]


def test_workers_know_no_jax(pool: RewardPool):
    assert "jax" in sys.modules and jax.device_count() == 8
    assert pool.score([(PROMPT, "modules")]).total.tolist() == [0.0]


def test_results_do_not_depend_on_the_workers(pool: RewardPool):
    samples = [(PROMPT, f"random {number % 5}") for number in range(40)]
    first = pool.score(samples).total
    with RewardPool([RewardConfig(kind=f"{BAD}:obey")], RewardPoolConfig(workers=1)) as single:
        np.testing.assert_array_equal(single.score(samples).total, first)
    assert len(set(first)) == 5


def test_what_a_reward_started_ends_with_it(pool: RewardPool, tmp_path: Path):
    scores = pool.score([(PROMPT, f"child {tmp_path / 'pid'}")])
    assert scores.timeouts == 1
    assert _soon_gone(int((tmp_path / "pid").read_text()))


def test_groups_are_scored_while_others_are_sampled(tmp_path: Path):
    gate = tmp_path / "gate"
    with RewardPool([RewardConfig(kind=f"{BAD}:obey")], RewardPoolConfig(workers=1, seconds=60)) as pool:
        first = pool.submit([(PROMPT, f"wait {gate}"), (PROMPT, "sleep 0")])
        second = pool.submit([(PROMPT, "second")])
        assert not pool.ready(first) and not pool.ready(second)
        gate.touch()
        assert pool.collect(second).total.tolist() == [6.0]  # in any order
        assert pool.ready(first)  # as one worker takes them in turn
        assert pool.collect(first).total.tolist() == [1.0, 1.0]
        with pytest.raises(ValueError, match="before"):
            pool.collect(first)
        assert pool.score([]).total.shape == (0,)


def test_rewards_are_weighed_and_reported_by_name():
    rewards = [
        RewardConfig(kind=f"{BAD}:other", options={"scale": 10.0}, weight=0.5),
        RewardConfig(kind=f"{BAD}:obey", name="obeys", weight=-1.0),
    ]
    with RewardPool(rewards, RewardPoolConfig(workers=2, seconds=SECONDS)) as pool:
        scores = pool.score([(PROMPT, "four"), (PROMPT, "raise x"), (PROMPT, "kill")])
    assert {name: values.tolist() for name, values in scores.by_name.items()} == {
        "other": [47.0, 77.0, 0.0],
        "obeys": [4.0, 0.0, 0.0],
    }
    assert scores.total.tolist() == [0.5 * 47 - 4, 0.5 * 77, 0.0]
    assert [failure.reward for failure in scores.failures] == ["obeys", None]


def test_an_entry_may_be_anything_that_is_pickled(pool: RewardPool):
    entry = {"board": np.arange(4), "set": {1, 2}}
    assert pool.score([(Prompt("task/1", "text", entry=entry), "abc")]).total.tolist() == [3.0]


def test_nothing_is_left():
    pool = RewardPool([RewardConfig(kind=f"{BAD}:obey")], RewardPoolConfig(workers=3, seconds=60))
    pool.warm()
    server = pool._process.pid
    workers = _children(server)
    assert len(workers) == 3
    pool.submit([(PROMPT, "hang"), (PROMPT, "deaf"), (PROMPT, "hang")])
    pool.ready(pool.submit([]))  # an answer, so the samples are handed out
    pool.close()
    assert pool._process.returncode == 0  # it had not to be killed
    assert all(map(_soon_gone, [server, *workers]))
    pool.close()


def test_a_killed_run_leaves_nothing():
    script = (
        "from meshsys.rl.rewards import *; from meshsys.rl.prompt import Prompt; import os, time\n"
        f"pool = RewardPool([RewardConfig(kind={BAD + ':obey'!r})], RewardPoolConfig(workers=2, seconds=600))\n"
        "pool.submit([(Prompt('a/0', ''), 'hang')]); print(pool._process.pid, flush=True); time.sleep(600)"
    )
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    server = int(run.stdout.readline())
    left = [server, *_children(server)]
    assert len(left) == 3
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    assert all(map(_soon_gone, left))


def test_a_server_that_is_killed_is_told():
    with RewardPool([RewardConfig(kind=f"{BAD}:obey")], RewardPoolConfig(workers=1)) as own:
        own.warm()
        own._process.kill()
        with pytest.raises(RuntimeError, match=re.escape("ended (-9)")):
            own.score([(PROMPT, "abc")])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "python:no.such.module:f",
            "kind=python:no.such.module:f cannot be imported: ModuleNotFoundError",
        ),
        ("python:math:nothing", "rl.rewards.0.kind=python:math:nothing cannot be imported: AttributeError"),
        ("python:math", "rl.rewards.0.kind=python:math names no function; write python:package.module:function"),
        (f"{BAD}:NOT_A_FUNCTION", "is not a function"),
        ("python:no/such.py:f", "cannot be imported: FileNotFoundError"),
    ],
)
def test_a_reward_that_is_not_there(kind: str, message: str):
    with RewardPool([RewardConfig(kind=kind)]) as pool, pytest.raises(ConfigError, match=re.escape(message)):
        pool.warm()


def test_a_module_that_ends_its_process(tmp_path: Path):
    (tmp_path / "ends.py").write_text("import os; os._exit(5)")
    with RewardPool([RewardConfig(kind=f"python:{tmp_path / 'ends.py'}:f")]) as pool:
        with pytest.raises(ConfigError, match=r"rl.rewards: importing the rewards ended the process \(5\)"):
            pool.submit([])


def test_names_are_told_apart():
    with pytest.raises(ConfigError, match="two rewards of the name gsm8k"):
        RewardPool([RewardConfig(kind="gsm8k"), RewardConfig(kind="gsm8k")])


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _soon_gone(pid: int) -> bool:
    """Whether a process ends within seconds; one that init has yet to reap has ended."""

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    return _soon(is_gone)


def _soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True

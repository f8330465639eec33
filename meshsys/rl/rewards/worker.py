"""The process that calls reward functions, one sample at a time."""

from __future__ import annotations

import math
import os
import pickle
import random
import signal
import sys
import zlib
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from meshsys.rl.rewards.registry import Reward

__all__ = ["Judged", "work"]

_LONGEST_MESSAGE = 200


class Judged(NamedTuple):
    """One sample.

    Attributes:
        values: of each reward; 0 where it failed.
        errors: number of a reward, and what went wrong.
        is_last: the worker ends.
    """

    values: list[float]
    errors: list[tuple[int, str]]
    is_last: bool = False


def work(connection: Connection, rewards: Sequence[Reward], memory: int | None) -> None:
    """Judges pickled pairs of prompt and response that come over the connection, until that ends.

    Args:
        memory: bytes that this process may allocate from now on.
    """
    _limit_memory(memory)
    while True:
        try:
            sample = connection.recv_bytes()
        except (EOFError, OSError):  # whoever asks is gone
            return
        judged = _judge(sample, rewards)
        signal.alarm(0)  # one that a reward has left would hit the next sample
        connection.send(judged)
        if judged.is_last:
            return


def _judge(sample: bytes, rewards: Sequence[Reward]) -> Judged:
    try:
        prompt, response = pickle.loads(sample)
    except Exception as error:
        return Judged([0.0] * len(rewards), [(number, _explain(error)) for number in range(len(rewards))])
    values: list[float] = []
    errors: list[tuple[int, str]] = []
    is_full = False
    for number, reward in enumerate(rewards):
        random.seed(zlib.crc32(response.encode(errors="replace")))  # no worker's past changes a result
        try:
            values.append(_number(reward(prompt, response)))
        except BaseException as error:  # SystemExit too: it would cost the others their rewards
            values.append(0.0)
            errors.append((number, _explain(error)))
            is_full |= isinstance(error, MemoryError)  # earlier samples may hold the memory, and others would fail too
    return Judged(values, errors, is_full)


def _number(value: Any) -> float:
    """A reward as a finite number.

    Raises:
        TypeError, ValueError: it is none.
    """
    if isinstance(value, (str, bytes, bytearray)):  # which float() would read
        raise TypeError(f"the reward is {type(value).__name__} and no number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}")
    return number


def _explain(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "?"
    return f"{type(error).__name__}: {text}".removesuffix(": ")[:_LONGEST_MESSAGE]


def _limit_memory(memory: int | None) -> None:
    if memory is None or sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm") as statm:
        held = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = held + memory if hard == resource.RLIM_INFINITY else min(held + memory, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

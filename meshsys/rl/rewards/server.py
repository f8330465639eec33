"""The process between a run and its reward workers: hands out samples, kills what takes too long, replaces what died.

A run holds JAX, whose threads do not survive a fork. This process starts anew, imports the rewards once, and forks
workers, which takes milliseconds then; so a worker that is killed costs no second import. It runs in one thread and
calls no reward itself. The run asks, and it answers: `submit` with nothing, the others with one message each.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple

import numpy as np

from meshsys.errors import ConfigError
from meshsys.rl.rewards.config import RewardConfig
from meshsys.rl.rewards.registry import Reward, make_rewards
from meshsys.rl.rewards.scores import Failure, Scores
from meshsys.rl.rewards.worker import Judged, work

__all__ = ["Hello", "main"]

_FORK = get_context("fork")


class Hello(NamedTuple):
    """What a server is told first.

    Attributes:
        scorers, option: see `make_rewards`.
        memory: see `work`.
    """

    rewards: Sequence[RewardConfig]
    scorers: Sequence[str]
    option: str
    workers: int
    seconds: float
    memory: int | None


def main(descriptor: int) -> None:
    """Serves the run at the other end of a socket until that is closed."""
    os.dup2(2, 1)  # what rewards print is not part of the run's output
    # A run that is told to end may need rewards until it has saved itself. No `SIG_IGN`: programs would inherit it.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    run = Connection(descriptor)
    hello = Hello(*run.recv())
    try:
        rewards = make_rewards(hello.rewards, hello.scorers, hello.option)
    except ConfigError as error:
        run.send(error)
        return
    server = _Server(run, hello, rewards)
    run.send(None)
    try:
        server.serve()
    finally:
        server.end_workers()


@dataclass
class _Ticket:
    """Samples that were submitted together. values_RN: rewards by samples."""

    values_RN: np.ndarray
    left: int
    began: float
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class _Sample:
    ticket: int
    number: int
    pickled: bytes


class _Worker:
    """A forked process in a group of its own, with whatever it starts."""

    def __init__(self, rewards: Sequence[Reward], memory: int | None, inherited: Sequence[Connection]) -> None:
        self.connection, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_begin, args=(theirs, rewards, memory, (*inherited, self.connection)))
        self._process.start()
        theirs.close()
        self.sample: _Sample | None = None
        self.deadline = 0.0

    def give(self, sample: _Sample, deadline: float) -> None:
        """Raises OSError if the worker has died."""
        self.connection.send_bytes(sample.pickled)
        self.sample, self.deadline = sample, deadline

    def end(self) -> str:
        """Kills it and all that it started; how it ended."""
        pid = self._process.pid
        assert pid is not None
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self.connection.close()
        code = self._process.exitcode or 0
        return f"signal {-code}" if code < 0 else f"exit status {code}"


def _begin(theirs: Connection, rewards: Sequence[Reward], memory: int | None, inherited: Sequence[Connection]) -> None:
    os.setpgid(0, 0)
    for other in inherited:  # or their ends would not be seen
        other.close()
    work(theirs, rewards, memory)
    os._exit(0)


class _Server:
    def __init__(self, run: Connection, hello: Hello, rewards: Sequence[Reward]) -> None:
        self._run, self._hello, self._rewards = run, hello, rewards
        self._names = [config.label for config in hello.rewards]
        self._waiting: deque[_Sample] = deque()
        self._tickets: dict[int, _Ticket] = {}
        self._collecting: int | None = None
        self._workers: list[_Worker] = []
        for _ in range(hello.workers):
            self._workers.append(self._new_worker())

    def serve(self) -> None:
        while True:
            self._give()
            first = min((worker.deadline for worker in self._workers if worker.sample), default=None)
            timeout = None if first is None else max(0.0, first - time.monotonic())
            readable = connection.wait([self._run, *(worker.connection for worker in self._workers)], timeout)
            for worker in list(self._workers):
                if worker.connection in readable:
                    self._take(worker)
                elif worker.sample and time.monotonic() >= worker.deadline:
                    self._lose(worker, "timeout", f"took more than {self._hello.seconds:g} s")
            self._hand_over()
            if self._run in readable:
                try:
                    request = self._run.recv()
                except (EOFError, OSError):
                    return
                self._answer(*request)

    def end_workers(self) -> None:
        for worker in self._workers:
            worker.end()

    # The run

    def _answer(self, what: str, ticket: int, samples: Sequence[bytes] = ()) -> None:
        match what:
            case "submit":
                values = np.zeros((len(self._names), len(samples)))
                self._tickets[ticket] = _Ticket(values, len(samples), time.monotonic())
                self._waiting.extend(_Sample(ticket, number, sample) for number, sample in enumerate(samples))
            case "ready":
                self._run.send(self._tickets[ticket].left == 0)
            case "collect":
                self._collecting = ticket
                self._hand_over()

    def _hand_over(self) -> None:
        """The scores that the run waits for, once they are there."""
        if self._collecting is None or self._tickets[self._collecting].left:
            return
        ticket = self._tickets.pop(self._collecting)
        self._collecting = None
        weights = np.array([config.weight for config in self._hello.rewards])
        by_name = dict(zip(self._names, ticket.values_RN, strict=True))
        failures = tuple(sorted(ticket.failures, key=lambda failure: failure.sample))
        self._run.send(Scores(weights @ ticket.values_RN, by_name, failures, ticket.seconds))

    # The workers

    def _new_worker(self) -> _Worker:
        inherited = [self._run, *(worker.connection for worker in self._workers if not worker.connection.closed)]
        return _Worker(self._rewards, self._hello.memory, inherited)

    def _replace(self, worker: _Worker) -> str:
        """Ends a worker and makes another one; how it ended."""
        how = worker.end()
        self._workers[self._workers.index(worker)] = self._new_worker()
        return how

    def _give(self) -> None:
        for worker in list(self._workers):
            if worker.sample is None and self._waiting:
                try:
                    worker.give(self._waiting[0], time.monotonic() + self._hello.seconds)
                except OSError:  # it died while it had nothing to do
                    self._replace(worker)
                else:
                    self._waiting.popleft()

    def _take(self, worker: _Worker) -> None:
        sample = worker.sample
        if sample is None:  # it died while it had nothing to do
            self._replace(worker)
            return
        try:
            judged: Judged = worker.connection.recv()
            values = list(map(float, judged.values))
        except Exception:  # it has died, or what it sent is none of its messages
            self._lose(worker, "crash")
            return
        ticket = self._tickets[sample.ticket]
        ticket.values_RN[:, sample.number] = values
        for reward, message in judged.errors:
            ticket.failures.append(Failure(sample.number, "error", self._names[reward], message))
        self._done(worker)
        if judged.is_last:
            self._replace(worker)

    def _lose(self, worker: _Worker, kind: Literal["timeout", "crash"], message: str | None = None) -> None:
        """Ends a worker for good and gives its sample up."""
        sample = worker.sample
        assert sample is not None
        self._done(worker)
        how = self._replace(worker)
        failure = Failure(sample.number, kind, None, message or f"the worker ended with {how}")
        self._tickets[sample.ticket].failures.append(failure)

    def _done(self, worker: _Worker) -> None:
        assert worker.sample is not None
        ticket = self._tickets[worker.sample.ticket]
        worker.sample = None
        ticket.left -= 1
        if not ticket.left:
            ticket.seconds = time.monotonic() - ticket.began

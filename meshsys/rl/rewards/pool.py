"""A pool of processes that compute rewards, as a run sees it."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import weakref
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

from meshsys.errors import ConfigError
from meshsys.rl.prompt import Prompt
from meshsys.rl.rewards.config import RewardConfig, RewardPoolConfig
from meshsys.rl.rewards.scores import Scores

__all__ = ["RewardPool", "Ticket"]

_MOST_WORKERS = 8  # of those that are started unless the user says
_START_SECONDS = 300.0
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # sets have the same order in every run
    "OPENBLAS_NUM_THREADS": "1",  # threads of NumPy would not survive a fork
    "OMP_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",  # a reward that uses JAX leaves the accelerators to the run
}


class Ticket(NamedTuple):
    """Samples that were submitted together."""

    number: int
    samples: int


class RewardPool:
    """Scores samples in processes of its own; what a reward does there ends neither the run nor other samples.

    A reward that raises or gives no finite number is 0. A sample whose rewards take longer than `seconds` together,
    or end their process, has rewards of 0; the process is killed with all that it started, and replaced. `Scores`
    lists these failures. Results do not depend on the number of workers.

    The processes begin when the pool is made, and import what the rewards need while the caller goes on. A pool is
    used by one thread at a time, and ended by `close` or `with`.
    """

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        config: RewardPoolConfig | None = None,
        *,
        scorers: Collection[str] = (),
        option: str = "rl.rewards",
    ) -> None:
        """Begins to start the processes.

        Args:
            rewards: at least one.
            scorers: of the tasks, for rewards of the kind `task`; others are imported when they are first needed.
            option: where the rewards stand in the configuration, for messages.

        Raises:
            ConfigError: two rewards of one name.
        """
        config = config or RewardPoolConfig()
        self._option = option
        names = [reward.label for reward in rewards]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"{option} has two rewards of the name {twice}; give one of them another name")
        workers = config.workers or max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) - 1))
        memory = None if config.memory_gib is None else int(config.memory_gib * 2**30)
        self._process, self._connection = _start()
        self._end = weakref.finalize(self, _stop, self._process, self._connection)
        self._submitted = 0
        self._open: set[int] = set()
        self._greeted = False
        # Not `server.Hello`, which would be imported here for nothing else; that is a tuple too.
        self._send((tuple(rewards), tuple(scorers), option, workers, config.seconds, memory))

    def warm(self) -> None:
        """Waits until the rewards are imported; the other methods do so too.

        Raises:
            ConfigError: a reward that cannot be imported.
        """
        if self._greeted:
            return
        if not self._connection.poll(_START_SECONDS):
            self.close()
            raise ConfigError(f"{self._option}: the rewards were not imported in {_START_SECONDS:g} s; mend what waits")
        try:
            error = self._connection.recv()
        except (EOFError, OSError):
            self.close()
            code = self._process.returncode
            raise ConfigError(f"{self._option}: importing the rewards ended the process ({code}); mend that") from None
        if error is not None:
            self.close()
            raise error
        self._greeted = True

    def score(self, samples: Sequence[tuple[Prompt, str]]) -> Scores:
        """The rewards of prompts with responses."""
        return self.collect(self.submit(samples))

    def submit(self, samples: Sequence[tuple[Prompt, str]]) -> Ticket:
        """Begins to score; samples that were submitted earlier come first.

        Raises:
            ConfigError: of `warm`.
        """
        self.warm()
        self._submitted += 1
        self._open.add(self._submitted)
        pickled = [pickle.dumps(sample, pickle.HIGHEST_PROTOCOL) for sample in samples]
        self._send(("submit", self._submitted, pickled))
        return Ticket(self._submitted, len(samples))

    def ready(self, ticket: Ticket) -> bool:
        """Whether `collect` would not wait."""
        return self._ask("ready", ticket)

    def collect(self, ticket: Ticket) -> Scores:
        """Waits for the scores of a ticket and gives them out, once."""
        scores = self._ask("collect", ticket)
        self._open.remove(ticket.number)
        return scores

    def close(self) -> None:
        """Ends all processes; what is not collected is lost."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, what: str, ticket: Ticket) -> Any:
        if ticket.number not in self._open:
            raise ValueError(f"{ticket} was collected before, or is another pool's")
        self._send((what, ticket.number))
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise self._gone() from None

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            if self._greeted:
                raise self._gone() from None  # else `warm` tells why

    def _gone(self) -> RuntimeError:
        self.close()
        return RuntimeError(f"the process that hands out rewards ended ({self._process.returncode}), as by a kill")


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    """A server, in a new interpreter that finds the same modules."""
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor = theirs.fileno()
        begin = f"from meshsys.rl.rewards.server import main; main({descriptor})"
        process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {begin}"],
            stdin=subprocess.DEVNULL,
            pass_fds=[descriptor],
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,  # an interrupt at the terminal is for the run, which then ends this
        )
    return process, Connection(ours.detach())


def _stop(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

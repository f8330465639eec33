"""Sampling for later steps while earlier ones train, on devices of their own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshsys.rl.collect import Collector
from meshsys.rl.config import RlConfig
from meshsys.rl.learn import Learner
from meshsys.rl.modes.shared_rewards import SharedRewards
from meshsys.rl.modes.staleness import staleness
from meshsys.rl.modes.stepped import Stepped
from meshsys.rl.modes.stream import Batch, Stream
from meshsys.rl.prompts import PromptStream
from meshsys.rl.sampler import Sampler
from meshsys.state import State

__all__ = ["Overlap"]


class Overlap:
    """Learns from the batches of a stream that a thread samples, and gives it each step's weights.

    Args:
        slots: sequences that are sampled at once.
        steps: that the run has left.
        again: see `meshsys.rl.modes.stream.Stream`.
        seed: of the run.
    """

    def __init__(
        self,
        config: RlConfig,
        sampler: Sampler,
        collector: Collector,
        rewards: SharedRewards,
        learner: Learner,
        prompts: PromptStream,
        *,
        slots: int,
        steps: int,
        again: Sequence[int],
        seed: int,
    ):
        self._config, self._sampler, self._collector, self._rewards = config, sampler, collector, rewards
        self._learner, self._prompts, self._seed = learner, prompts, seed
        self._slots, self._steps, self._again = slots, steps, again
        self._updates = config.minibatches * config.epochs
        self._batches: queue.Queue[Batch | BaseException] = queue.Queue()
        self._weights: queue.Queue[tuple[Any, int] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._stream: Stream | None = None

    def step(self, state: State, step: int, version: int) -> Stepped:
        """See `meshsys.rl.modes.alternate.Alternate.step`."""
        begun = time.perf_counter()
        if self._thread is None:
            self._sampler.update(state.params, version)
            self._stream = self._begun(version)
            self._thread = threading.Thread(target=self._run, args=(self._stream,), name="meshsys-sampler", daemon=True)
            self._thread.start()
        else:
            self._weights.put((self._sampler.carrier(state.params), version))
        carried = time.perf_counter()
        batch = self._batches.get()
        if isinstance(batch, BaseException):
            raise batch
        came = time.perf_counter()
        scores = [self._rewards.collect(ticket) for _, ticket in batch.groups]
        scored = time.perf_counter()
        rollouts = [one for group, _ in batch.groups for one in group]
        collected = self._collector.collected(rollouts, scores, batch.seconds - batch.wait_seconds, scored - came)
        order = np.random.default_rng((self._seed, step))
        state, learned, metrics = self._learner.learn(state, rollouts, collected.score_N, order)
        record = {
            **staleness(rollouts, version, self._updates),
            "dropped_responses": batch.dropped,
            "trainer_wait_seconds": scored - carried,
            "sampler_wait_seconds": batch.wait_seconds,
        }
        trained = time.perf_counter() - scored + carried - begun
        return Stepped(state, collected, learned, metrics, trained, batch.position, record)

    def close(self) -> None:
        """Ends the thread; what it has sampled is lost, and its prompts are asked again by the run that goes on."""
        if self._thread is None or self._stream is None:
            return
        self._stream.ends = True
        self._weights.put(None)
        self._thread.join()

    def _begun(self, version: int) -> Stream:
        return Stream(
            self._config,
            self._sampler,
            self._collector,
            self._prompts,
            self._weights.get,
            slots=self._slots,
            first=version,
            updates=self._updates,
            again=self._again,
        )

    def _run(self, stream: Stream) -> None:
        try:
            for batch in stream.batches(self._steps):
                self._batches.put(batch)
        except BaseException as error:
            self._batches.put(error)

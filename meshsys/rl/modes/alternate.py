"""All devices sample, then all devices train."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from meshsys.rl.collect import Collector
from meshsys.rl.learn import Learner
from meshsys.rl.modes.stepped import Stepped
from meshsys.rl.prompts import PromptStream
from meshsys.rl.sampler import Sampler
from meshsys.state import State

__all__ = ["Alternate"]


class Alternate:
    """Samples a step's rollouts of the newest policy, and then learns from them.

    Args:
        seed: of the run.
        phase: is told what the run does now.
    """

    def __init__(
        self,
        sampler: Sampler,
        collector: Collector,
        learner: Learner,
        prompts: PromptStream,
        seed: int,
        phase: Callable[[str], None],
    ):
        self._sampler, self._collector, self._learner = sampler, collector, learner
        self._prompts, self._seed, self._phase = prompts, seed, phase

    def step(self, state: State, step: int, version: int) -> Stepped:
        """Takes a step; the state is consumed.

        Args:
            version: the updates before it.

        Raises:
            Mismatch: sampler and trainer differ; the state is as it was.
        """
        self._phase("reshard")
        self._sampler.update(state.params, version)
        self._phase("sample")
        collected = self._collector.collect(self._prompts, step)
        self._phase("train")
        begun = time.perf_counter()
        order = np.random.default_rng((self._seed, step))
        state, learned, metrics = self._learner.learn(state, collected.rollouts, collected.score_N, order)
        return Stepped(state, collected, learned, metrics, time.perf_counter() - begun, {"prompt": self._prompts.at})

    def close(self) -> None:
        """There is nothing to end."""

"""Sampling and training at once on devices of their own, and one policy to a step (periodic asynchrony).

The trainer takes gradients of groups as they come from the sampler and the rewards, and makes one update of all. Every
token is of the policy that is updated, so the step is that of `alternate` to the order of sums; what overlaps is the
sampling of late groups, the scoring, and the gradients of early ones. Groups are taken by their numbers, and never by
when they came: a run is as reproducible as with `alternate`.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Sequence

from meshsys.rl.algorithm_config import Recipe
from meshsys.rl.collect import Collector
from meshsys.rl.config import RlConfig
from meshsys.rl.learn import Learner
from meshsys.rl.modes.accumulation import Accumulation
from meshsys.rl.modes.shared_rewards import SharedRewards
from meshsys.rl.modes.staleness import staleness
from meshsys.rl.modes.stepped import Stepped
from meshsys.rl.prompts import Asked, PromptStream
from meshsys.rl.rewards import Scores, Ticket
from meshsys.rl.rollouts import Rollout
from meshsys.rl.sampler import Sampler
from meshsys.rl.update import PolicyUpdate
from meshsys.state import State

__all__ = ["Periodic", "groups_of_a_part"]


class Periodic:
    """Learns from groups while later ones are sampled.

    Args:
        rows: of a part.
    """

    def __init__(
        self,
        config: RlConfig,
        recipe: Recipe,
        update: PolicyUpdate,
        sampler: Sampler,
        collector: Collector,
        rewards: SharedRewards,
        learner: Learner,
        prompts: PromptStream,
        rows: int,
    ):
        self._config, self._recipe, self._update = config, recipe, update
        self._sampler, self._collector, self._rewards = sampler, collector, rewards
        self._learner, self._prompts = learner, prompts
        self._together = rows // config.rows_per_prompt

    def step(self, state: State, step: int, version: int) -> Stepped:
        """See `meshsys.rl.modes.alternate.Alternate.step`."""
        self._sampler.update(state.params, version)
        asked = self._prompts.take(self._config.prompts_per_step)
        accumulation = Accumulation(self._learner, self._recipe, self._update, state, self._config.max_response_tokens)
        sampling = _Sampling(self._collector, asked, step)
        waited = trained = 0.0
        rollouts: list[Rollout] = []
        scores: list[Scores] = []
        try:
            for first in range(0, len(asked), self._together):
                begun = time.perf_counter()
                for group in range(first, min(first + self._together, len(asked))):
                    found, ticket = sampling.wait_for(group)
                    rollouts += found
                    scores.append(self._rewards.collect(ticket))
                came = time.perf_counter()
                part = self._collector.collected(rollouts[first * self._config.samples_per_prompt :], scores[first:])
                accumulation.add(part.rollouts, part.score_N)
                waited, trained = waited + came - begun, trained + time.perf_counter() - came
        finally:
            sampling.join()
        begun = time.perf_counter()
        state, learned, metrics = accumulation.finish()
        ended = time.perf_counter()
        collected = self._collector.collected(rollouts, scores, sampling.seconds)
        position, train_seconds = {"prompt": self._prompts.at}, trained + ended - begun
        record = {
            **staleness(rollouts, version, 1),
            "trainer_wait_seconds": waited,
            "sampler_wait_seconds": ended - sampling.ended,
        }
        return Stepped(state, collected, learned, metrics, train_seconds, position, record)

    def close(self) -> None:
        """Nothing goes on after a step."""


class _Sampling:
    """The groups of a step, sampled and handed to the rewards by a thread."""

    def __init__(self, collector: Collector, asked: Sequence[Asked], step: int):
        self._collector, self._asked, self._step = collector, asked, step
        self._came: queue.Queue[tuple[int, list[Rollout], Ticket] | BaseException] = queue.Queue()
        self._held: dict[int, tuple[list[Rollout], Ticket]] = {}
        self._gives_up = False
        self.seconds, self.ended = 0.0, 0.0
        self._thread = threading.Thread(target=self._run, name="meshsys-sampler", daemon=True)
        self._thread.start()

    def wait_for(self, group: int) -> tuple[list[Rollout], Ticket]:
        """The group, once it is sampled; or the exception that ended the thread."""
        while group not in self._held:
            came = self._came.get()
            if isinstance(came, BaseException):
                raise came
            self._held[came[0]] = came[1:]
        return self._held.pop(group)

    def join(self) -> None:
        """Waits for the thread, which ends early where not all was taken."""
        self._gives_up = True
        self._thread.join()

    def _run(self) -> None:
        begun = time.perf_counter()
        try:
            for group, rollouts in self._collector.groups(self._asked, self._step):
                if self._gives_up:
                    return
                self._came.put((group, rollouts, self._collector.submit(rollouts)))
        except BaseException as error:
            self._came.put(error)
        finally:
            self.ended = time.perf_counter()
            self.seconds = self.ended - begun


def groups_of_a_part(config: RlConfig, unit: int) -> int:
    """The fewest groups that fill the rows of a program, a multiple of `unit`; but no more than a step has."""
    return min(math.ceil(unit / config.rows_per_prompt), config.prompts_per_step)

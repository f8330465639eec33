"""Several tasks as one endless sequence of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from meshsys.rl.prompt import Prompt
from meshsys.rl.tasks.base import Task, hashed

__all__ = ["Mixture"]

_BLOCK = 1024  # draws at a time


class Mixture:
    """Prompt n is of a task drawn with the tasks' weights; it is that task's next one.

    A task with an end begins anew after its last prompt, in another order. All follows from n and the seed, so that a
    resumed run needs no more than its n.

    Attributes:
        tasks: in the order of the configuration.
        scorers: the kinds of reward that are the tasks' own.
    """

    def __init__(self, tasks: Sequence[Task], weights: Sequence[float], seed: int) -> None:
        self.tasks = tuple(tasks)
        self.scorers = frozenset(task.scorer for task in tasks)
        self._share = np.array(weights, np.float64) / sum(weights)
        self._seed = seed
        self._drawn: list[np.ndarray] = []  # the task of each prompt, a block at a time
        self._before = [np.zeros(len(tasks), np.int64)]  # prompts of each task in earlier blocks
        self._order = lru_cache(maxsize=2 * len(tasks))(self._new_order)

    def __getitem__(self, n: int) -> Prompt:
        task, count = self._place(n)
        size = self.tasks[task].size
        if size is None:
            return self.tasks[task][count]
        epoch, place = divmod(count, size)
        return self.tasks[task][int(self._order(task, epoch)[place])]

    def _place(self, n: int) -> tuple[int, int]:
        """The task of prompt n, and how many of its prompts come before."""
        block, place = divmod(n, _BLOCK)
        while len(self._drawn) <= block:
            random = np.random.default_rng(hashed(self._seed, "tasks", len(self._drawn)))
            drawn = random.choice(len(self.tasks), _BLOCK, p=self._share).astype(np.uint16)
            self._before.append(self._before[-1] + np.bincount(drawn, minlength=len(self.tasks)))
            self._drawn.append(drawn)
        drawn = self._drawn[block]
        task = int(drawn[place])
        return task, int(self._before[block][task] + np.count_nonzero(drawn[:place] == task))

    def _new_order(self, task: int, epoch: int) -> np.ndarray:
        size = self.tasks[task].size
        assert size is not None
        return np.random.default_rng(hashed(self._seed, "order", task, epoch)).permutation(size)

"""How old the tokens are that a step learns from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshsys.rl.rollouts import Rollout

__all__ = ["staleness"]


def staleness(rollouts: Sequence[Rollout], version: int, updates: int) -> dict[str, float]:
    """For a step's record: over its tokens, the mean and the largest staleness, and those that were carried over.

    The staleness of a token is the steps between the policy that drew it and the one that learns from it. A token is
    carried over a change of weights if its response goes on with other ones.

    Args:
        version: of the policy that learns.
        updates: of a step.
    """
    stale = np.concatenate([version - one.versions for one in rollouts]) / updates
    carried = sum(int((one.versions < one.versions[-1]).sum()) for one in rollouts)
    return {"staleness_mean": float(stale.mean()), "staleness_max": float(stale.max()), "carried_tokens": carried}

"""How good answers are, found out by processes that may fail.

Imports no JAX, as those processes pass here.
"""

from meshsys.rl.rewards.config import RewardConfig, RewardPoolConfig
from meshsys.rl.rewards.pool import RewardPool, Ticket
from meshsys.rl.rewards.scores import Failure, Scores

__all__ = ["Failure", "RewardConfig", "RewardPool", "RewardPoolConfig", "Scores", "Ticket"]

"""What answers to a policy in turns, and the games that they play.

Imports no JAX, as the processes that compute rewards pass here.
"""

from meshsys.rl.environments.base import Environment, Step
from meshsys.rl.environments.config import EnvironmentConfig
from meshsys.rl.environments.play import Sample, play
from meshsys.rl.environments.registry import environment_maker
from meshsys.rl.environments.transcript import Transcript, Turn

__all__ = [
    "Environment",
    "EnvironmentConfig",
    "Sample",
    "Step",
    "Transcript",
    "Turn",
    "environment_maker",
    "play",
]

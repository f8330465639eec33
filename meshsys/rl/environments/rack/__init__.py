"""Sorting tubes in a rack: a puzzle whose shortest plans are known, as one answer or in turns."""

from meshsys.rl.environments.rack.game import RackGame, plan_reward
from meshsys.rl.environments.rack.instances import Instance, RackOptions, describe, make_instance
from meshsys.rl.environments.rack.puzzle import Move, Rack, read_moves
from meshsys.rl.environments.rack.solve import least_moves, solve

__all__ = [
    "Instance",
    "Move",
    "Rack",
    "RackGame",
    "RackOptions",
    "describe",
    "least_moves",
    "make_instance",
    "plan_reward",
    "read_moves",
    "solve",
]

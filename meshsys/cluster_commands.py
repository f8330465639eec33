"""The `meshsys cluster ...` commands."""

from __future__ import annotations

from typing import Any

from meshsys.executor_commands import add_executor_commands
from meshsys.place_command import add_place_command
from meshsys.simulate_command import add_simulate_command

__all__ = ["add_cluster_commands"]


def add_cluster_commands(commands: Any) -> None:
    """Adds `cluster` and what follows it to the parser's commands."""
    about = "place jobs on the sub-slices of a pod, simulate it, and run them on one"
    cluster = commands.add_parser("cluster", help=about, allow_abbrev=False)
    views = cluster.add_subparsers(metavar="COMMAND", required=True)
    add_place_command(views)
    add_simulate_command(views)
    add_executor_commands(views)

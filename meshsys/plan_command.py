"""`meshsys plan`: what a configuration will do, and what its compiler says of it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from meshsys.arguments import add_config, command

__all__ = ["add_plan_command"]


def add_plan_command(commands: Any) -> None:
    """Adds `meshsys plan CONFIG` to the commands."""
    parser = command(commands, "plan", _plan, "show devices, stages, schedule and memory, without training")
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--topology", metavar="T", help="instead of mesh.topology, as in v5p:4x4x4")
    parser.add_argument(
        "--compile", action="store_true", help="compile the step, and show the compiler's memory and what it runs"
    )


def _plan(args: argparse.Namespace) -> None:
    """Prints the plan; with `--compile`, but without the topology's compiler, all that needs none."""
    from meshsys.config import load_config

    topology = [f"mesh.topology={args.topology}"] if args.topology else []
    config = load_config(args.config, [*args.overrides, *topology])

    from meshsys.assemble import assemble
    from meshsys.planner import describe, plan_of

    assembly = assemble(config)
    plan = plan_of(assembly)
    missing = None
    if args.compile:
        from meshsys.planner.compile import compiled_plan, missing_compiler

        missing = missing_compiler(assembly.placement.topology)
        if missing is None:
            plan = dataclasses.replace(plan, compiled=compiled_plan(assembly))
    print(plan.to_json() if args.json else describe(plan))
    if missing is not None:
        print(f"meshsys: {missing}", file=sys.stderr)


"""`meshsys plan`: what a configuration will do, what its compiler says of it, and which one would be the best."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from meshsys.arguments import add_config, command
from meshsys.errors import ConfigError
from meshsys.files import writable, write_whole

if TYPE_CHECKING:
    from meshsys.config import Config
    from meshsys.planner import SearchPlan

__all__ = ["add_plan_command"]


def add_plan_command(commands: Any) -> None:
    """Adds `meshsys plan CONFIG` to the commands."""
    parser = command(commands, "plan", _plan, "show devices, stages, schedule and memory, without training")
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--topology", metavar="T", help="instead of mesh.topology, as in v5p:4x4x4")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the step, and show the compiler's memory and what it runs; with --search, compile the best",
    )
    parser.add_argument(
        "--search", action="store_true", help="rank mesh axes, schedules, microbatches and remat for the topology"
    )
    parser.add_argument("--out", metavar="FILE", help="with --search: write the best configuration there")


def _plan(args: argparse.Namespace) -> None:
    from meshsys.config import load_config

    topology = [f"mesh.topology={args.topology}"] if args.topology else []
    config = load_config(args.config, [*args.overrides, *topology])
    if args.out is not None and not args.search:
        raise ConfigError(f"--out={args.out} is for the best configuration of a search; add --search")
    if args.search:
        _search(config, args)
    else:
        _show(config, args)


def _show(config: Config, args: argparse.Namespace) -> None:
    """Prints the plan; with `--compile`, but without the topology's compiler, all that needs none."""
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


def _search(config: Config, args: argparse.Namespace) -> None:
    """Prints the ranking, and writes the best configuration if asked; an error where nothing fits."""
    from meshsys.config import to_yaml
    from meshsys.planner import config_of, describe_search, search
    from meshsys.planner.text import bytes_text

    out = None if args.out is None else writable(args.out, "--out")
    found = search(config)
    missing = None
    if args.compile:
        found, missing = _verified(config, found)
    best = found.choices[0] if found.choices else None
    if best is None or not best.fits:
        closest = "" if best is None else (
            f"; the closest, {bytes_text(best.bytes)} a device, has data={best.data}, fsdp={best.fsdp}, "
            f"tensor={best.tensor}, pipe={best.pipe}, schedule={best.schedule}, microbatches={best.microbatches} and "
            f"remat={best.remat}"
        )
        raise ConfigError(
            f"mesh.topology={found.topology}: nothing fits within {bytes_text(found.limit * (1 - found.margin))} a "
            f"device{closest}; use a larger --topology or a smaller model or batch"
        )
    if out is not None:
        write_whole(out, to_yaml(config_of(config, best)), "--out")
    print(found.to_json() if args.json else describe_search(found))
    if out is not None:
        print(f"meshsys: wrote {args.out}", file=sys.stderr)
    if missing is not None:
        print(f"meshsys: {missing}", file=sys.stderr)


def _verified(config: Config, found: SearchPlan) -> tuple[SearchPlan, str | None]:
    """Compiles the best that fits, and the next one where the compiler rejects it for memory."""
    from meshsys.assemble import assemble
    from meshsys.planner import config_of
    from meshsys.planner.compile import OutOfMemory, compiled_plan, missing_compiler
    from meshsys.torus import Topology

    if missing := missing_compiler(Topology.parse(found.topology)):
        return found, missing
    choices = list(found.choices)
    for place, choice in enumerate(choices):
        if not choice.fits:
            break
        try:
            size = compiled_plan(assemble(config_of(config, choice))).total
        except OutOfMemory:
            choices[place] = dataclasses.replace(choice, fits=False)
            continue
        choices[place] = dataclasses.replace(choice, verified=size)
        break
    choices.sort(key=lambda choice: not choice.fits)
    return dataclasses.replace(found, choices=tuple(choices)), None
